"""How long a step of a pipeline takes: 1F1B event by event, and the same end by a fast recurrence.

A worker hands over what it has computed before it goes on, as Megatron's and torch's own 1F1B do: a send
occupies the sender, and the receiver can begin when it ends. (In 1F1B a stage waits for the answer to
what it sent, so sending beside computing would hide little of it.)
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
    kind: Kind
    micro_batch: int


def one_forward_one_backward(*, stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Enough forwards to fill the stages behind, then one forward and one backward in turn, then the rest.

    A stage has as many micro-batches under way as there are stages from it to the end, never more.

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
        return self.forward + self.backward + self.send_forward + self.send_backward


@dataclass(frozen=True, kw_only=True)
class TimedOperation:
    """One operation on a worker's time line: computing until ``computed``, sending until ``end``."""

    stage: int
    kind: Kind
    micro_batch: int
    start: float
    computed: float
    end: float


def simulate(stages: Sequence[StageTimes], micro_batches: int) -> list[TimedOperation]:
    """Every operation of a step, exactly: each begins when its worker is free and its input is there.

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


def makespan(stages: Sequence[StageTimes], micro_batches: int) -> float:
    """The end of the last operation, without listing them: one round of vector operations per micro-batch.

    At stage i the backward of micro-batch m − (S−i) comes right before the forward of m, and needs the
    backward that the next stage did one round earlier; so a round is all those backwards at once, then
    the forward of m through all stages (a running maximum).

    >>> makespan([StageTimes(forward=1.0, backward=2.0)] * 2, 4)
    15.0
    """
    forward = np.array([times.forward + times.send_forward for times in stages])
    backward = np.array([times.backward + times.send_backward for times in stages])
    return float(last_ends(forward, backward, np.array([micro_batches]))[0, 0])


def last_ends(forward: Vector, backward: Vector, micro_batches: Vector) -> Vector:
    """When each stage has done its last backward, a row for each number of micro-batches.

    From what a micro-batch's forward and backward occupy the stages. The first stage is the last to end.
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
