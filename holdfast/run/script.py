"""What a training script sees of a run, and where it is: so that all workers name what they ask for alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.sync.report import EVERY_STEP, Report


@dataclass(frozen=True, kw_only=True)
class Step:
    """One committed training step. ``sync`` tells whether and why replicas synchronised after it.

    >>> Step(number=3, loss=0.5, epoch=0, workers=4, is_first_worker=True).loss
    0.5
    """

    number: int
    loss: float
    epoch: int
    workers: int
    is_first_worker: bool
    sync: Report = EVERY_STEP


class Script:
    """Where this worker's script is: in the body of a loop, or after one; and what it has asked for there.

    >>> script = Script()
    >>> script.next_key("hash"), script.next_key("hash"), script.is_after_a_loop
    ('after 0/hash 0', 'after 0/hash 1', True)
    """

    def __init__(self) -> None:
        self._place = "after 0"
        self._asked: Counter[str] = Counter()

    @property
    def is_after_a_loop(self) -> bool:
        return self._place.startswith("after")

    def move_to(self, place: str) -> None:
        if place != self._place:
            self._place = place
            self._asked.clear()

    def next_key(self, kind: str) -> str:
        """Names a thing that is asked for, the same on every worker."""
        number = self._asked[kind]
        self._asked[kind] += 1
        return f"{self._place}/{kind} {number}"
