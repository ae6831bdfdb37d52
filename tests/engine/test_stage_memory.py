"""What a stage keeps in memory: its layers, and the micro-batches under way, and no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast.engine.walk import walk
from holdfast.errors import Broken
from tests.engine.memory_group import Lost, MemoryGroup, Network, Receive, on_workers
from tests.engine.pipelines import Job, fill, lay, linear, numbers, one_step, take_place


class Counted(nn.Module):
    """Counts how many of its outputs' graphs are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.alive = self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(y, self._gone)  # which the graph needs for its backward pass
        return y.sin()

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_has_as_many_micro_batches_under_way_as_there_are_stages_to_the_end(stages: int) -> None:
    count = 32
    data = numbers(count)
    job = Job(layers=lambda: [Counted() for _ in range(4)], data=data, global_batch=count, micro_batch=1, filled=False)
    layout = lay((range(stages), [4 // stages] * stages))
    network = Network(stages)
    kept: list[int] = [0] * stages

    def work(group: MemoryGroup) -> list[int]:
        engine = job.engine()
        take_place(engine, layout, group)
        send = group.send

        def counting(sends: Any) -> Any:
            mine = f"{group.rank} →"
            kept[group.rank] = max(
                kept[group.rank], sum(letter.address.startswith(mine) for letter in [*network.letters])
            )
            return send(sends)

        group.send = counting
        one_step(engine, group, 0)
        one_step(engine, group, 1)
        layers = [engine.model.layers[n] for n in sorted(engine.model.held)]
        assert all(layer.alive <= 1 for layer in layers), "something is left of the step before"
        return [layer.most for layer in layers]

    for stage, most in enumerate(on_workers(stages, work, network)):
        assert max(most) <= stages - stage
    if stages > 1:  # headers, activations and gradients that may not have arrived yet, not those of 32 micro-batches
        assert max(kept) <= 6 * stages


class Breaking(MemoryGroup):
    """Lost after so many receives."""

    left = 30

    def wait(self, work: Receive) -> None:
        self.left -= 1
        if self.left < 0:
            work.let_go()
            raise Broken("lost")
        super().wait(work)


def test_a_broken_attempt_keeps_no_activations_once_it_is_dropped() -> None:
    """What comes next is the copying of layers: that is when memory is needed."""
    job = Job(layers=lambda: [Counted() for _ in range(4)], data=numbers(32), global_batch=32, micro_batch=1)
    layout = lay((range(4), [1] * 4))

    def work(group: MemoryGroup) -> tuple[int, Any, Any]:
        engine = job.engine()
        breaking = Breaking(group.rank, group.network)
        take_place(engine, layout, breaking)
        try:
            engine.attempt(0, breaking)
        except (Broken, Lost):
            pass
        layer: Any = engine.model.layers[group.rank]
        before = layer.alive
        engine.drop()
        return before, layer, engine

    found = on_workers(4, work)
    gc.collect()  # the frames of the errors
    assert any(before > 0 for before, _, _ in found), "the control: something was under way"
    assert [layer.alive for _, layer, _ in found] == [0] * 4


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The memory behind tensors; what several share counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_is_bounded_by_the_layers_of_the_place() -> None:
    """Weights, slots, and room for gradients: of eight equal layers, a worker has those of its place and no more."""
    width, layers = 64, 8
    one = 4 * (width * width + width)  # bytes of a layer
    data = TensorDataset(fill(torch.empty(8, width), 1), fill(torch.empty(8, width), 2))
    adam = lambda ps: torch.optim.Adam(ps, lr=0.01)  # noqa: E731
    job = Job(layers=lambda: [linear(width, width) for _ in range(layers)], data=data, optimizer=adam, global_batch=8)
    layout = lay(([0, 1, 2], [1, 2, 5]), ([3, 4], [4, 4]), size=6)

    def work(group: MemoryGroup) -> tuple[float, float, float]:
        engine = job.engine()
        take_place(engine, layout, group)
        for step in range(2):
            one_step(engine, group, step)
        state = engine.update.optimizer.state
        held = [p for n in engine.model.held for p in engine.model.layers[n].parameters()]
        assert {id(p) for p in state} == {id(p) for p in held}, "slots for held parameters only"
        slots = bytes_of(t for slot in state.values() for t in slot.values())
        rooms = [t for b in engine.buckets for t in (b.scratch, *(s.memory for s in b.free)) if t is not None]
        assert all(p.grad is None for p in engine.model.module.parameters())
        return bytes_of(engine.model.module.parameters()) / one, slots / one, bytes_of(rooms) / one

    for rank, (weights, slots, rooms) in enumerate(on_workers(6, work)):
        role = layout.role(rank)
        held = len(role.layers) if role else 0
        assert held <= weights <= held + 0.01
        assert 2 * held <= slots <= 2 * held + 0.01
        assert rooms <= 4 * held


def test_while_evaluating_a_first_stage_is_only_so_far_ahead() -> None:
    count = 64
    data = numbers(count)
    job = Job(layers=lambda: [linear() for _ in range(3)], data=data, micro_batch=1)
    layout = lay(([0, 1, 2], [1, 1, 1]))
    network = Network(3)
    most = [0]

    def work(group: MemoryGroup) -> list[float]:
        engine = job.engine()
        take_place(engine, layout, group)
        send = group.send

        def counting(sends: Any) -> Any:
            most[0] = max(most[0], len([*network.letters]))
            return send(sends)

        group.send = counting
        seen: list[float] = []
        walk(engine, data, group, lambda passed: seen.append(float(mse_loss(*passed.pair))))
        group.vote(torch.zeros(1))
        return seen

    assert len(on_workers(3, work, network)[2]) == count
    assert most[0] < 40
