"""Steps that are committed several at a time, with a copy of the state to go back to: how Elastic Horovod does it.

It is here to be measured against. It needs memory for a second state and the time to copy it, and loses up to the
whole of such a block of steps with a worker; the usual way (docs/recovery.md) needs no copy and loses no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast import codec
from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.commit.cohort import Kind, Operation
from holdfast.engine.engine import Engine
from holdfast.engine.state import State
from holdfast.plan.tree import tree_sum

Kept = tuple[bytes, list[torch.Tensor]]  # a value, flattened


class Copies:
    """A copy of all that a worker has: weights, buffers, the optimizer's slots and settings, and where the run is."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._kept: dict[int | None, Kept] = {}  # by unit; None: what is common to all

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensors in self._kept.values() for tensor in tensors)

    def take(self) -> None:
        """From one time to the next in the same memory."""
        state, before = self._state, self._kept
        held = [
            unit for unit in state.model.units if state.is_held(unit)
        ]  # a worker that is to leave may have no place
        self._kept = {None: _kept(state.common(), None)}
        for unit in held:
            self._kept[unit.number] = _kept(state.read(unit), before.get(unit.number))

    def restore(self) -> None:
        state = self._state
        for number, kept in self._kept.items():
            if number is None:
                state.set_common(_fresh(kept))
            else:
                state.write(state.model.units[number], _fresh(kept))


def _kept(value: Any, before: Kept | None) -> Kept:
    text, tensors = codec.flatten(value)
    room = [torch.empty_like(tensor) for tensor in tensors] if before is None or before[0] != text else before[1]
    with torch.no_grad():
        for mine, theirs in zip(room, tensors, strict=True):
            mine.copy_(theirs)
    return text, room


def _fresh(kept: Kept) -> Any:
    """Tensors of their own: the optimizer keeps what it is given, and writes into it."""
    text, tensors = kept
    return codec.unflatten(text, [tensor.clone() for tensor in tensors])


class Together:
    """Steps as one operation: done for good one by one, voted on at the end, and taken back as one.

    Between two steps all exchange their losses. It is no vote, for nobody could act on it; but a worker may not
    write into what it has sent until it knows that it has arrived.
    """

    def __init__(self, engine: Engine, state: State, attempt: Callable[[int, Group], list[float]], every: int) -> None:
        """``attempt`` computes a step and reduces its gradients; a copy is taken ``every`` so many steps."""
        self._engine, self._state, self._attempt, self._every = engine, state, attempt, every
        self.copies = Copies(state)
        self.losses: list[float] = []  # of the steps of the last operation

    def operation(self, first: int, total: int) -> Operation:
        """The next steps from ``first`` on, but no more than ``total``."""
        steps = range(first, min(first + self._every, total))

        def attempt(group: Group) -> list[float]:
            self.copies.take()  # each time: it may be another's state by now
            self.losses = [self._step(number, group) for number in steps]
            return []

        return Operation(kind=Kind.STEP, attempt=attempt, drop=self._drop)

    def _step(self, number: int, group: Group) -> float:
        faults.at_step(number)
        losses = torch.tensor(self._attempt(number, group), dtype=torch.float64, device=self._state.model.device)
        group.vote(losses)
        self._engine.apply(number)
        self._state.progress["step"] = number + 1
        return tree_sum(losses.tolist())

    def _drop(self) -> None:
        self._engine.drop()
        self.copies.restore()
