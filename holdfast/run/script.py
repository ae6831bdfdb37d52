"""The training script's position in a run, so that all workers give the same name to what they ask for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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
    sync: Report = EVERY_STEP  # whether and why replicas synchronised after the step


class Script:
    """The position of this worker's script: in the body of a loop, or after one; and what it has asked for there.

    >>> script = Script()
    >>> script.next_key("hash"), script.next_key("hash"), script.is_after_a_loop
    ('after 0/hash 0', 'after 0/hash 1', True)
    """

    def __init__(self) -> None:
        self._place = "after 0"
        self._asked: Counter[str] = Counter()

    @property
    def is_after_a_loop(self) -> bool:
        """Whether the script is outside of all loops over steps."""
        return self._place.startswith("after")

    def move_to(self, place: str) -> None:
        """Note that the script has come to another place."""
        if place != self._place:
            self._place = place
            self._asked.clear()

    def next_key(self, kind: str) -> str:
        """Return a name for the next thing of a kind that the script asks for, the same on every worker."""
        number = self._asked[kind]
        self._asked[kind] += 1
        return f"{self._place}/{kind} {number}"
