"""The training script's position in a run, so that all workers give the same name to what they ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UsageError
from holdfast.sync.report import EVERY_STEP, Report


@dataclass(frozen=True, kw_only=True)
class Step:
    """One committed training step.

    >>> Step(number=3, loss=0.5, epoch=0, workers=4, is_first_worker=True).loss
    0.5
    """

    number: int  # the first step is 0
    loss: float  # mean over the step's samples, before its update
    epoch: int  # the first pass over the data is 0
    workers: int  # number of workers that train
    is_first_worker: bool  # true on exactly one worker: print and write files there
    lr: float | None = None  # learning rate of the optimizer's first group, as this step used it
    grad_norm: float | None = None  # norm of the whole gradient, before it is clipped
    seconds: float = 0.0  # from the begin of the step to its commit on this worker; with all recovery
    tokens: float = 0.0  # weights of its micro-batches together: samples, unless the run has ``weight=``
    sync: Report = EVERY_STEP  # whether and why replicas synchronised after the step
    notes: Sequence[Any] | None = None  # what was noted of each micro-batch: ``step.commit(notes=…)`` of a ``Loop``


class Script:
    """The position of this worker's script: in the body of a loop, or after one; and what it has asked for there.

    >>> script = Script()
    >>> script.next_key("hash"), script.next_key("hash"), script.is_after_a_loop
    ('after 0/hash 0', 'after 0/hash 1', True)
    """

    def __init__(self) -> None:
        self._place = "after 0"
        self._asked: Counter[str] = Counter()
        self.is_computing = False  # in a ``Loop``, between the first micro-batch and the commit
        self.left_in: int | None = None  # the step of a ``Loop`` in whose middle the script has left it

    @property
    def is_after_a_loop(self) -> bool:
        """Whether the script is outside of all loops over steps."""
        return self._place.startswith("after")

    @property
    def prefix(self) -> str:
        """What the names of everything that is asked for here begin with."""
        return f"{self._place}/"

    def move_to(self, place: str) -> None:
        """Note that the script has come to another place."""
        if place != self._place:
            self._place = place
            self._asked.clear()

    def begin_again(self, place: str) -> None:
        """Note that the script comes to a place, perhaps once more: what it asks for is counted anew."""
        self._place = place
        self._asked.clear()

    def next_key(self, kind: str) -> str:
        """Return a name for the next thing of a kind that the script asks for, the same on every worker.

        Raises ``UsageError`` in the middle of a step.
        """
        self.refuse_left()
        if self.is_computing:
            raise UsageError(
                "evaluate, predict, save_model and sha256 cannot come in the middle of a step",
                hint="call them after step.commit(), or before step.micro_batches()",
            )
        number = self._asked[kind]
        self._asked[kind] += 1
        return f"{self._place}/{kind} {number}"

    def refuse_left(self) -> None:
        """Raise ``UsageError`` if the script has left a ``Loop`` in the middle of a step."""
        if self.left_in is not None:
            raise UsageError(
                f"the loop was left in the middle of step {self.left_in}",
                hint="break after step.commit(), or before step.micro_batches()",
            )
