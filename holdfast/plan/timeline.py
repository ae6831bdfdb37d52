"""The 1F1B schedule, and how long a step of a pipeline takes: event by event, or faster by a recurrence.

A send occupies the sender, as in Megatron's and torch's own 1F1B, and the receiver can begin when it ends. (In 1F1B a
stage waits for the answer to what it sent, so sends beside computation would hide little.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Op:
    """One operation of a stage."""

    kind: Kind
    micro_batch: int


def one_forward_one_backward(*, stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Return the operations of a stage, in order: forwards to fill the stages behind, then pairs, then backwards.

    A pair is one forward and one backward. A stage never has more micro-batches under way than there are stages from
    it to the last one.

    >>> [f"{op.kind[0]}{op.micro_batch}" for op in one_forward_one_backward(stage=0, stages=2, micro_batches=3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(stages - stage - 1, micro_batches)
    ops = [Op("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            ops.append(Op("forward", number + ahead))
        ops.append(Op("backward", number))
    return ops


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch at one stage."""

    forward: float
    backward: float
    send_forward: float = 0.0
    send_backward: float = 0.0

    @property
    def total(self) -> float:
        """Seconds that a micro-batch occupies the stage."""
        return self.forward + self.backward + self.send_forward + self.send_backward


@dataclass(frozen=True, kw_only=True)
class TimedOperation:
    """An operation with its times: it computes from ``start`` until ``computed`` and sends until ``end`` (seconds)."""

    stage: int
    kind: Kind
    micro_batch: int
    start: float
    computed: float
    end: float


def simulate(stages: Sequence[StageTimes], micro_batches: int) -> list[TimedOperation]:
    """Return every operation of a step: each begins when its worker is free and its input has arrived.

    >>> stage = StageTimes(forward=1.0, backward=2.0)
    >>> max(span.end for span in simulate([stage, stage], 4))
    15.0
    """
    todo = [
        one_forward_one_backward(stage=stage, stages=len(stages), micro_batches=micro_batches)
        for stage in range(len(stages))
    ]
    done: dict[tuple[Kind, int, int], float] = {}
    free = [0.0] * len(stages)
    position = [0] * len(stages)
    spans: list[TimedOperation] = []
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(todo):
            while position[stage] < len(ops):
                op = ops[position[stage]]
                before = stage - 1 if op.kind == "forward" else stage + 1
                given = 0.0 if not 0 <= before < len(stages) else done.get((op.kind, before, op.micro_batch))
                if given is None:
                    break
                span = _span(stages[stage], stage, op.kind, op.micro_batch, max(given, free[stage]))
                spans.append(span)
                free[stage] = done[(op.kind, stage, op.micro_batch)] = span.end
                position[stage] += 1
                moved = True
    assert all(position[stage] == len(ops) for stage, ops in enumerate(todo)), "1F1B does not deadlock"
    return spans


def _span(times: StageTimes, stage: int, kind: Kind, micro_batch: int, start: float) -> TimedOperation:
    forward = kind == "forward"
    computed = start + (times.forward if forward else times.backward)
    end = computed + (times.send_forward if forward else times.send_backward)
    return TimedOperation(stage=stage, kind=kind, micro_batch=micro_batch, start=start, computed=computed, end=end)


def last_ends(forward: Vector, backward: Vector, micro_batches: Vector) -> Vector:
    """Return when each stage ends its last backward, with a row for each number of micro-batches.

    ``forward`` and ``backward`` are the seconds that a micro-batch occupies each stage, sends included. The first
    stage is the last to end. One round of vector operations per micro-batch: at stage i of S the backward of
    micro-batch m − (S−i) comes right before the forward of m, and needs the backward that the next stage did one round
    earlier. So a round is all those backwards at once, then the forward of m through all stages (a running maximum).

    >>> last_ends(np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([1, 4])).tolist()
    [[6.0, 4.0], [15.0, 13.0]]
    """
    stages = len(forward)
    behind = np.arange(stages, 0, -1)  # stages from here to the end: the micro-batches under way
    count = micro_batches[:, None]
    fewest, most = int(micro_batches.min()), int(micro_batches.max())
    reached = np.cumsum(forward)
    entered = reached - forward
    free = np.zeros((len(micro_batches), stages))
    answered = np.zeros((len(micro_batches), stages + 1))
    for number in range(most + stages):
        done = np.maximum(free, answered[:, 1:]) + backward
        if stages <= number <= fewest:  # every stage has a backward to do
            free = done
        else:
            turn = number - behind
            free = np.where((turn >= 0) & (turn < count), done, free)
        answered[:, :stages] = free
        if number < most:
            passed = np.maximum.accumulate(free - entered, axis=1) + reached
            free = passed if number < fewest else np.where(number < count, passed, free)
    return free
