"""The gradients of shared weights: all users get the same sum, added in the order of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine import tied_gradients as ties_module
from holdfast.engine.tied_gradients import Ties
from holdfast.plan.layout import Layout, side_by_side
from tests.engine.memory_group import MemoryGroup, Network, on_workers
from tests.engine.pipelines import CPU, Job, LayeredModel, assert_same, each_alone, fill, lay, mlp
from tests.engine.test_tied_leaves import TIED

LAYERS = 5
USES = [0, 2, 3]  # layers of one weight; layers 1 and 4 share another
LAYOUTS: dict[str, Layout] = {
    "one worker": side_by_side(LAYERS, 1),
    "side by side": side_by_side(LAYERS, 3),
    "each layer alone": lay(([4, 2, 0, 1, 3], [1] * 5)),
    "two pipelines": lay(([3, 0], [3, 2]), ([2, 1, 4], [1, 1, 3]), size=6),
    "three pipelines": lay(([0], [5]), ([5, 1], [1, 4]), ([2, 4, 3], [2, 2, 1])),
}


def make_model() -> LayeredModel:
    layers = [nn.Linear(4, 3, bias=False) for _ in range(LAYERS)]
    layers[2].weight = layers[0].weight
    layers[3].weight = layers[0].weight
    layers[4].weight = layers[1].weight
    return LayeredModel(layers, seed=0, device=CPU)


def gradient(layer: int) -> torch.Tensor:
    """Of very different sizes, so that the order of additions shows."""
    exponents = torch.randint(-12, 12, (3, 4), generator=torch.Generator().manual_seed(layer))
    return fill(torch.empty(3, 4), layer) * 2.0**exponents


def totals(layout: Layout, network: Network | None = None) -> list[list[torch.Tensor | None]]:
    """By rank: both weights' gradients after adding up."""

    def work(group: MemoryGroup) -> list[torch.Tensor | None]:
        model = make_model()
        role = layout.role(group.rank)
        held = set(role.layers if role else ())
        model.release(set(range(LAYERS)) - held)
        for number in held:
            model.layers[number].weight.grad = gradient(number)
        ties = Ties(model)
        ties.add_up(group, layout)
        group.vote(torch.zeros(1))
        found = [None if w.grad is None else w.grad.clone() for w in (model.layers[0].weight, model.layers[1].weight)]
        aliases = [alias.grad for alias, _ in model.aliases]
        assert aliases == [None] * len(aliases), "an alias has no part in the update"
        ties.forget()
        assert all(p.grad is None for layer in model.layers for p in layer.parameters())
        return found

    return on_workers(layout.size, work, network)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_user_gets_the_sum_in_the_order_of_the_layers(name: str) -> None:
    layout = LAYOUTS[name]
    first = (gradient(0) + gradient(2)) + gradient(3)
    second = gradient(1) + gradient(4)
    for rank, found in enumerate(totals(layout)):
        role = layout.role(rank)
        held = set(role.layers if role else ())
        for grad, uses, expected in zip(found, (USES, [1, 4]), (first, second), strict=True):
            assert (grad is not None) == bool(held & set(uses))
            assert grad is None or torch.equal(grad, expected)


def test_the_order_matters() -> None:
    """The control: these gradients are such that another order gives another sum."""
    assert not torch.equal((gradient(0) + gradient(2)) + gradient(3), gradient(0) + (gradient(2) + gradient(3)))


def test_the_sending_is_spread_over_the_holders() -> None:
    """Four pipelines of two: four copies of each use, and each is sent once."""
    layout = lay(*[([2 * line, 2 * line + 1], [1, 4]) for line in range(4)])
    network = Network(8)
    sent: list[str] = []
    put = network.put

    def noting(sender: int, receiver: int, tag: int, tensor: torch.Tensor) -> Any:
        sent.append(f"{sender}→{receiver}")
        return put(sender, receiver, tag, tensor)

    network.put = noting  # type: ignore[method-assign]
    totals(layout, network)
    assert len(sent) == 4 + 2 * 4, "use 0 to each second stage, uses 2 and 3 to each first one"
    assert max(sum(each.startswith(f"{rank}→") for each in sent) for rank in range(8)) <= 4


def test_sums_in_the_order_of_arrival_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for whole training: own uses first, as a worker would add them who does not know better."""
    right = Ties._total

    def own_first(self: Ties, group: Any, layout: Any, weight: Any, uses: Any, users: Any) -> torch.Tensor:
        mine = sorted(uses, key=lambda use: group.rank not in layout.holders(use.layer))
        return right(self, group, layout, weight, mine, users)

    monkeypatch.setattr(ties_module.Ties, "_total", own_first)
    job = Job(layers=TIED["three uses"])
    with pytest.raises(AssertionError):
        assert_same(job, lay(([0, 1, 2], [2, 2, 1])), each_alone(5))


def test_nothing_is_sent_where_nothing_is_shared() -> None:
    network = Network(6)

    def work(group: MemoryGroup) -> None:
        Ties(LayeredModel(mlp(), seed=0, device=CPU)).add_up(group, each_alone(6))

    on_workers(6, work, network)
    assert network.bytes == 0
