"""Weights that several layers share: on any layout the bits of one worker, and what torch would make of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from holdfast.engine.model import LayeredModel
from holdfast.engine.tied_weights import alias_shared, tied
from holdfast.plan.layout import Layout, side_by_side
from tests.engine.memory_group import MemoryGroup, Network, on_workers
from tests.engine.pipelines import (
    CPU,
    MAKING,
    WIDTH,
    Job,
    Layer,
    assert_same_everywhere,
    each_alone,
    fill,
    lay,
    linear,
    mixed,
    one_step,
    take_place,
    train,
    train_alone,
)

W = WIDTH


def tied_by(*pairs: tuple[int, int], layers: int = 5, frozen: Sequence[int] = ()) -> list[nn.Module]:
    """Linears of which some have the weight of an earlier one."""
    made: list[nn.Module] = [linear() for _ in range(layers)]
    for number in frozen:
        made[number].requires_grad_(False)
    for later, first in pairs:
        made[later].weight = made[first].weight
    return [Layer(lambda x, m: m(x).tanh() * 2, each) for each in made]


def shared_inside() -> list[nn.Module]:
    """A block in two layers, a part of it in a third, the weight alone in a fourth, twice in one."""
    inner = nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh()))
    alone = linear()
    alone.weight = inner[1][0].weight
    return [
        Layer(lambda x, m: m(x), inner),
        linear(),
        Layer(lambda x, m, part: m(x) + part(x), inner, inner[1]),
        Layer(lambda x, part: part(x).tanh(), inner[1][0]),
        Layer(lambda x, m, again: m(x) + again(x).sin(), alone, alone),
    ]


def made_later() -> list[Any]:
    return [
        partial(nn.Linear, W, W),
        nn.Tanh,
        tied(partial(nn.Linear, W, W), weight="0.weight"),
        tied(partial(nn.Linear, W, W), weight="0.weight", bias="2.bias"),
    ]


def twice(module: nn.Module, *more: nn.Module) -> list[nn.Module]:
    return [module, *more, module]


def gru_twice() -> list[nn.Module]:
    gru = nn.GRU(W, W, batch_first=True)
    first, again = (Layer(lambda x, m: m(x.unsqueeze(1))[0].squeeze(1), gru) for _ in range(2))
    return [first, linear(), again]


def embedding_and_head() -> list[nn.Module]:
    embedding, head = nn.Embedding(W, W), linear(bias=False)
    head.weight = embedding.weight
    return [Layer(lambda x, m: m((x.abs() * 3).long() % W).mean(1), embedding), linear(), nn.Tanh(), head]


TIED: dict[str, Callable[[], list[Any]]] = {
    "first and last": lambda: tied_by((4, 0)),
    "three uses": lambda: tied_by((2, 0), (4, 0)),
    "four uses next to each other": lambda: tied_by((1, 0), (2, 0), (3, 0)),
    "two weights crossed": lambda: tied_by((2, 0), (3, 1)),
    "frozen": lambda: tied_by((4, 0), frozen=[0, 2]),
    "the same module twice": lambda: twice(linear(), nn.Tanh(), linear()),
    "the same module next to itself": lambda: twice(linear()),
    "the same module three times": lambda: [*twice(linear(), nn.Tanh()), nn.Tanh(), linear()],
    "a block that keeps a list of its weights": gru_twice,
    "inside of layers": shared_inside,
    "a module without parameters": lambda: twice(nn.Tanh(), linear(), linear()),
    "by name": lambda: [linear(), nn.Tanh(), tied(linear(), weight="0.weight"), tied(linear(), bias="0.bias")],
    "an embedding and its head": embedding_and_head,
}


@pytest.mark.parametrize("case", TIED)
def test_shared_weights_have_the_bits_of_one_worker(case: str) -> None:
    assert_same_everywhere(Job(layers=TIED[case], clip_norm=0.3))


def test_shared_weights_train_as_torch_trains_them() -> None:
    """One gradient, the sum of all uses: close to what plain autograd gives."""
    job = Job(layers=TIED["three uses"], steps=1, global_batch=12, micro_batch=12)
    plain = nn.Sequential(*job.layers())
    for seed, p in enumerate(plain.parameters()):
        fill(p, seed).mul_(0.5)
    optimizer = job.optimizer(plain.parameters())
    inputs, targets = zip(*(job.data[i] for i in job.engine().order.samples(0, 0)), strict=True)
    mse_loss(plain(torch.stack(inputs)), torch.stack(targets)).backward()
    optimizer.step()
    for result in train(job, each_alone(5)):
        for name, p in plain.named_parameters():
            if name in result.tensors:
                assert torch.allclose(result.tensors[name], p, atol=1e-5), name


def test_layers_made_by_functions_train_where_they_are_held() -> None:
    def run(layout: Layout) -> list[dict[str, Tensor]]:
        def work(group: MemoryGroup) -> dict[str, Tensor]:
            engine = job.engine()
            with MAKING:
                role = layout.role(group.rank)
                engine.model.hold(role.layers if role else ())
                engine.model.make(engine.model.units_of(role.layers if role else ()))
            group.vote(torch.zeros(1))  # nobody draws numbers for training while others make layers
            engine.enter(layout, group)
            for step in range(2):
                one_step(engine, group, step)
            layers = engine.model.layers
            return {f"{n}.{k}": t.clone() for n in engine.model.held for k, t in layers[n].state_dict().items()}

        return on_workers(layout.size, work)

    job = Job(layers=made_later, filled=False)
    (expected,) = run(side_by_side(4, 1))
    assert len(expected) == 6
    for layout in (each_alone(4), mixed(4)):
        found: set[str] = set()
        for result in run(layout):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in result.items())
            found |= result.keys()
        assert found == expected.keys()


# --- places change ------------------------------------------------------------------------------------


def test_a_shared_weight_that_moves_away_leaves_nothing_behind() -> None:
    """A worker that had the later use of a weight, and then none, must not touch it any more."""
    job = Job(layers=lambda: tied_by((3, 0), layers=4), steps=3)
    expected = train_alone(job)
    before, after = lay(([0, 1], [2, 2]), size=3), lay(([0, 1, 2], [2, 1, 1]))
    alone = job.engine()

    def work(group: MemoryGroup) -> dict[str, Tensor]:
        engine = job.engine()
        take_place(engine, before, group)
        one_step(engine, group, 0)
        if group.rank == 2:  # gets layer 3 as somebody has it after step 0
            one_step(alone, MemoryGroup(0, Network(1)), 0)
            engine.model.hold([3])
            for mine, other in zip(engine.model.units_of([3]), alone.model.units_of([3]), strict=True):
                engine.update.set_slots(mine.parameters, alone.update.slots(other.parameters))
                for a, b in zip(mine.parameters, other.parameters, strict=True):
                    a.data.copy_(b.data)
        role = after.role(group.rank)
        engine.enter(after, group)
        one_step(engine, group, 1)
        engine.model.release(set(range(4)) - set(role.layers))
        for unit in engine.model.units:
            if not engine.model.is_held(unit):
                engine.update.forget(unit.parameters)
        one_step(engine, group, 2)
        assert all(p.grad is None for layer in engine.model.layers for p in layer.parameters())
        layers = engine.model.layers
        return {f"{n}.{k}": t.clone() for n in engine.model.held for k, t in layers[n].named_parameters()}

    for result in on_workers(3, work):
        assert result
        assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in result.items())


# --- aliases ------------------------------------------------------------------------------------------


def names_of(module: nn.Module) -> list[str]:
    return list(module.state_dict())


def test_every_layer_has_leaves_of_its_own_in_the_same_memory() -> None:
    layers = shared_inside()
    whole = nn.Sequential(*layers)
    names, before = names_of(whole), {name: t.clone() for name, t in whole.state_dict().items()}
    primaries = list(whole.parameters())
    aliases = alias_shared(whole, layers)
    assert names_of(whole) == names
    assert all(torch.equal(t, before[name]) for name, t in whole.state_dict().items())
    leaves = [id(p) for layer in layers for p in layer.parameters()]
    assert len(leaves) == len(set(leaves)), "no leaf is in two layers"
    assert {id(weight) for _, weight in aliases} <= {id(p) for p in primaries}
    assert {id(p) for p in whole.parameters()} == {*map(id, primaries), *(id(alias) for alias, _ in aliases)}
    assert all(alias.data_ptr() == weight.data_ptr() for alias, weight in aliases)
    assert all(list(whole)[number] is layer for number, layer in enumerate(layers))


def test_the_first_layer_that_has_a_module_keeps_it() -> None:
    inner = linear()
    block = nn.Sequential(inner)
    first, second = nn.Sequential(block), nn.Sequential(block)
    layers: list[nn.Module] = [first, second]
    alias_shared(nn.Sequential(*layers), layers)
    assert first[0] is block
    assert block[0] is inner
    assert second[0] is not block
    assert layers[1] is second


@pytest.mark.parametrize("names", [["0", "1", "2"], ["first", "act", "again"], ["2", "1", "0"]])
def test_a_copy_takes_its_place_in_the_whole_whatever_it_is_called(names: list[str]) -> None:
    """Else it would not hear when training ends and evaluating begins."""
    block = nn.Sequential(linear(), nn.Dropout(0.5))
    whole = nn.Sequential(OrderedDict(zip(names, [block, nn.Tanh(), block], strict=True)))
    model = LayeredModel(whole, seed=0, device=CPU)
    assert [model.module.get_submodule(name) for name in names] == model.layers
    model.module.eval()
    assert not any(module.training for layer in model.layers for module in layer.modules())


def test_buffers_of_a_shared_module_are_not_copied() -> None:
    norm = nn.BatchNorm1d(W)
    layers: list[nn.Module] = [norm, linear(), norm]
    alias_shared(nn.Sequential(*layers), layers)
    assert layers[2] is not norm
    assert all(a is b for a, b in zip(layers[2].buffers(), norm.buffers(), strict=True))


def test_nothing_is_changed_where_nothing_is_shared() -> None:
    layers: list[nn.Module] = [linear(), nn.Tanh(), linear()]
    kept = list(layers)
    assert alias_shared(nn.Sequential(*layers), layers) == []
    assert layers == kept
