"""Contestant of ``bench undo``: commits several steps at once, with a copy of the state to go back to.

Elastic Horovod works this way. It needs memory for a second state and the time to copy it, and a lost worker
costs up to a whole block of steps. Holdfast's own way needs no copy and loses no step (docs/recovery.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import holdfast
from holdfast import codec
from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.commit.operation import Kind, Operation
from holdfast.engine.state import State
from holdfast.plan.tree import tree_sum
from holdfast.run.script import Step

Flat = tuple[bytes, list[torch.Tensor]]  # a nested value, as text and its tensors


class StateCopy:
    """Copy of all that a worker holds: weights, buffers, optimizer slots and settings, and the run's progress."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._common: Any = None
        self._units: dict[int, Flat] = {}

    def take(self) -> None:
        """Copy the state, into the memory of the copy before where shapes are the same."""
        state, before = self._state, self._units
        self._common = _copied(state.common(), None)
        held = [unit for unit in state.model.units if state.is_held(unit)]
        self._units = {unit.number: _copied(state.read(unit), before.get(unit.number)) for unit in held}

    def restore(self) -> None:
        """Write the copy back into the state."""
        self._state.set_common(_fresh(self._common))
        for number, flat in self._units.items():
            self._state.write(self._state.model.units[number], _fresh(flat))


def _copied(value: Any, before: Flat | None) -> Flat:
    text, tensors = codec.flatten(value)
    room = [torch.empty_like(tensor) for tensor in tensors] if before is None or before[0] != text else before[1]
    with torch.no_grad():
        for mine, theirs in zip(room, tensors, strict=True):
            mine.copy_(theirs)
    return text, room


def _fresh(flat: Flat) -> Any:
    """Return the value with tensors of its own: the optimizer writes into the ones it is given."""
    text, tensors = flat
    return codec.unflatten(text, [tensor.clone() for tensor in tensors])


class CommitCopyRun(holdfast.Run):
    """A ``Run`` that commits blocks of ``copy_every`` steps: they are yielded together and lost together.

    Takes the settings of ``Run``. Every worker must hold the whole model (as is the default), without a log.
    """

    def __init__(self, *, copy_every: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._copy_every = copy_every
        self._copy = StateCopy(self._state)
        self._losses: list[float] = []  # of the last block's steps

    def steps(self, total: int | None = None, *, progress: bool | None = None) -> Iterator[Step]:
        """Train until ``total`` steps are committed, block by block; no checkpoints are written."""
        assert total is not None  # it races on data that do not end
        self._cohort.boundary()
        while self.step < total:
            first = self.step
            block = range(first, min(first + self._copy_every, total))
            self._cohort.commit(StepBlock(self, block))
            for number, loss in zip(block, self._losses, strict=True):
                self._event("commit", step=number, loss=loss)
            for number, loss in zip(block, self._losses, strict=True):
                self._script.move_to(f"in {number + 1}")
                yield Step(
                    number=number,
                    loss=loss,
                    epoch=number // self.engine.order.steps_per_epoch,
                    workers=self.workers,
                    is_first_worker=self.is_first_worker,
                )
            self._cohort.boundary()
        self._script.move_to(f"after {total}")

    def attempt_block(self, block: range, group: Group) -> None:
        """Make the steps of a block, one after the other, after a copy of the state was taken."""
        self._copy.take()  # before every attempt: the state may have come from another worker
        self._losses = [self._do_step(number, group) for number in block]

    def _do_step(self, number: int, group: Group) -> float:
        if self._trace:  # for tests that count steps done again
            self._event("block-step", step=number)
        faults.at_step(number)
        losses = torch.tensor(self.engine.attempt(number, group), dtype=torch.float64, device=self.engine.model.device)
        # All exchange their losses between two steps: a worker may not write into what it has sent before
        # it knows that it has arrived.
        group.vote(losses)
        self.engine.apply(number)
        self._progress.step = number + 1
        return tree_sum(losses.tolist())

    def go_back(self) -> None:
        """Return to the copy: the block is lost."""
        self.engine.drop()
        self._copy.restore()


class StepBlock(Operation):
    """A block of steps as one operation: voted on at its end, and taken back as one."""

    kind: Kind = "step"

    def __init__(self, run: CommitCopyRun, steps: range) -> None:
        self._run, self._steps = run, steps

    def attempt(self, group: Group) -> list[float]:
        self._run.attempt_block(self._steps, group)
        return []

    def drop(self) -> None:
        self._run.go_back()
