"""The 1F1B schedule as a plain list of operations: what a stage does, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
