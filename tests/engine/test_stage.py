"""Pipelines of stages: whatever goes between layers, and whoever holds them, the bits are those of one worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from holdfast.cluster.group import alone
from holdfast.data.source import Data
from holdfast.engine.stage import Neighbours, Post, Stage, post_of
from holdfast.errors import LossNotFinite, UsageError
from holdfast.plan.layout import Layout, Role, side_by_side
from holdfast.run.run import Run
from tests.engine.memory_group import MemoryGroup, on_workers
from tests.engine.pipelines import (
    Job,
    Layer,
    assert_same,
    each_alone,
    lay,
    linear,
    mlp,
    one_step,
    take_place,
    train,
    train_alone,
)

# --- layouts -------------------------------------------------------------------------------------------

LAYOUTS = {
    "two stages": lay(([0, 1], [3, 3])),
    "two stages, the last first": lay(([1, 0], [1, 5])),
    "six stages": lay(([3, 5, 0, 1, 4, 2], [1] * 6)),
    "side by side": side_by_side(6, 3),
    "different depths": lay(([2, 0], [1, 5]), ([1], [6])),
    "cut at different places": lay(([3, 1, 4], [1, 1, 4]), ([0, 5], [5, 1]), size=7),
    "more pipelines than micro-batches": lay(*[([2 * i + 1, 2 * i], [i % 5 + 1, 5 - i % 5]) for i in range(7)]),
    "deep beside wide": lay(([5, 4, 3, 2], [2, 1, 1, 2]), ([1], [6]), ([0, 6], [4, 2])),
    "nobody but the middle": lay(([3], [6]), size=6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_losses_and_evaluation_are_those_of_one_worker(layout: str) -> None:
    adam = lambda ps: torch.optim.AdamW(ps, lr=0.01)  # noqa: E731
    assert_same(Job(layers=mlp, clip_norm=0.3, optimizer=adam, steps=3), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["six stages", "cut at different places"])
def test_fast_training_is_close_and_the_same_for_all_holders(layout: str) -> None:
    job = Job(layers=mlp, exact=False)
    expected = train_alone(job)
    results = train(job, LAYOUTS[layout])
    for result in results:
        assert all(not result.differs_from(other) for other in results)
        for name, tensor in result.tensors.items():
            assert torch.allclose(tensor, expected.tensors[name], atol=1e-4)


@st.composite
def layouts(draw: st.DrawFn, layers: int) -> Layout:
    sizes = draw(st.lists(st.integers(1, min(4, layers)), min_size=1, max_size=3))
    workers = draw(st.permutations(range(sum(sizes) + draw(st.integers(0, 1)))))
    lines = []
    for size in sizes:
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=size - 1, max_size=size - 1)))
        counts = [stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True)]
        lines.append(([workers.pop() for _ in range(size)], counts))
    return lay(*lines, size=sum(sizes) + len(workers))


def everything() -> list[nn.Module]:
    """A tied weight, a module twice, tuples, a mask, a frozen layer, in-place writes, layers without parameters."""
    embedding, block = linear(), linear()
    head = linear()
    head.weight = embedding.weight
    return [
        Layer(lambda x, m: (m(x), x > 0, "text"), embedding),
        Layer(lambda x, m: (m(x[0]).tanh(), x[1], None), block),
        Layer(lambda x: (x[0].t(), x[1], x[0])),
        Layer(lambda x, m: m(x[2] + x[0].t() * x[1]), block),
        nn.ReLU(inplace=True),
        Layer(lambda x, m: x + m(x), linear().requires_grad_(False)),
        head,
    ]


EVERYTHING = Job(layers=everything, clip_norm=0.3)


@given(layouts(7), st.integers(1, 6))
@settings(deadline=None, max_examples=15)
def test_any_layout_gives_the_bits_of_one_worker(layout: Layout, micro_batches: int) -> None:
    EVERYTHING.global_batch = 2 * micro_batches
    assert_same(EVERYTHING, layout)


def test_another_cut_of_the_work_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: these numbers are such that sums in another order are found out."""
    job = Job(layers=mlp, global_batch=12)
    expected = train_alone(job)
    job.exact = False
    (result,) = train(job, side_by_side(6, 1))
    assert result.differs_from(expected)


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [side_by_side(2, 1), each_alone(2)])
def test_a_loss_without_a_gradient_is_refused(layout: Layout) -> None:
    job = Job(layers=lambda: [linear(), linear()], loss=lambda output, target: mse_loss(output.detach(), target))
    with pytest.raises((UsageError, RuntimeError)):
        train(job, layout)


@pytest.mark.parametrize("layout", [side_by_side(2, 1), each_alone(2)])
def test_a_loss_that_is_not_finite_is_told_with_its_samples(layout: Layout) -> None:
    job = Job(layers=lambda: [linear(), linear()], loss=lambda output, target: (output - target).mean() / 0)
    with pytest.raises(LossNotFinite, match=r"step 0, micro-batch 0 \(samples \["):
        train(job, layout)


def test_a_layer_that_is_not_held_is_seen_in_the_loss() -> None:
    """The control for all of the above: layers elsewhere have no values here that could be used by mistake."""
    job = Job(layers=mlp)

    def work(group: MemoryGroup) -> None:
        engine = job.engine()
        take_place(engine, lay(([0, 1], [3, 3])), group)
        engine.enter(side_by_side(6, 2), group)
        one_step(engine, group, 0)

    with pytest.raises(LossNotFinite):
        on_workers(2, work)


def test_posts_know_their_neighbours() -> None:
    layout = lay(([3, 1, 4], [1, 1, 4]), ([0, 5], [5, 1]), size=7)
    posts = [post_of(layout, rank) for rank in range(7)]
    assert posts[2] is None
    assert posts[6] is None
    found = [(p.role.stage, p.before, p.behind, p.is_first, p.is_last) for p in posts if p is not None]
    assert found == [
        (0, None, 5, True, False),
        (1, 3, 4, False, False),
        (0, None, 1, True, False),
        (2, 1, None, False, True),
        (1, 0, None, False, True),
    ]


class _Shift(nn.Module):
    """Autograd gives the parameter's gradient the memory of the input's."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(shape[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift.view(x.shape)) * 2


class _Given:
    """A neighbour that gives the same again and again, each time in memory of its own."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.take = make

    def close(self) -> None: ...


class _Kept:
    """A neighbour that is slow to take what it is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, list[torch.Tensor]]] = []

    def send(self, message: tuple[str, list[torch.Tensor]]) -> list[object]:
        self.messages.append(message)
        return []


def test_a_gradient_that_is_being_sent_is_not_written_into() -> None:
    shape = (1, 4, 8)
    layer, kept = _Shift(shape), _Kept()
    post = Post(role=Role(pipeline=0, stage=1, layers=range(1, 2)), stages=3, before=0, behind=2)
    neighbours = Neighbours(
        inputs=_Given(lambda: torch.zeros(shape, requires_grad=True)),
        gradients=_Given(lambda: [torch.ones(shape)]),
        outputs=_Kept(),
        back=kept,
    )
    stage = Stage(alone(), post, neighbours)
    for number in range(2):  # as the two of a pair, whose gradients autograd adds up
        stage.forward(number, None, layer)
        stage.backward(number, 1.0)
    assert torch.equal(layer.shift.grad, torch.full(shape[1:], 4.0))
    for _, (gradient,) in kept.messages:
        assert torch.equal(gradient, torch.full(shape, 2.0))


class _Sum(nn.Module):
    """Two parameters to which autograd gives one gradient's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first.view(2, 2) + self.second.view(2, 2))


def test_parameters_do_not_share_a_gradient() -> None:
    """Else the second micro-batch would be added to both of them twice."""
    data = [(torch.ones(2), torch.ones(2)) for _ in range(4)]
    weights = []
    for batch in (4, 2):  # two micro-batches a step, then one
        run = Run(
            layers=_Sum(),
            loss=lambda output, target: (output - target).sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            data=Data(data, shuffle=False),
            global_batch=batch,
            micro_batch=2,
        )
        list(run.steps(1))
        weights.append(run.engine.model.module.first.detach().clone())
    assert torch.equal(weights[0], weights[1]), "the mean of equal samples is that of one"
