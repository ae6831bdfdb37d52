"""Replacements: which slots of an agent get a new worker, and when. Pure: the time is an argument."""

from __future__ import annotations

REPLACE_AFTER_SECONDS = 2.0  # the longest wait to start a replacement; usually the survivors have recovered before


class Replacements:
    """The planned ones. They wait until the survivors have committed again, who need the cores until then.

    >>> planned = Replacements()
    >>> planned.plan(1, at=12.0)
    >>> planned.due(11.0), planned.due(12.0), len(planned)
    ([], [1], 0)
    >>> planned.plan(0, at=20.0)
    >>> planned.recovered = True
    >>> planned.due(13.0)
    [0]
    """

    def __init__(self) -> None:
        self.recovered = False  # the survivors of the last loss have committed again
        self._planned: list[tuple[int, float]] = []  # (slot, latest time to start its new worker)

    def __len__(self) -> int:
        return len(self._planned)

    def plan(self, slot: int, *, at: float) -> None:
        """Plan a new worker for a slot, at this time (seconds) at the latest."""
        self._planned.append((slot, at))

    def due(self, now: float) -> list[int]:
        """Take out the slots whose new workers are to be started now."""
        due = [(slot, at) for slot, at in self._planned if self.recovered or now >= at]
        self._planned = [each for each in self._planned if each not in due]
        return [slot for slot, _ in due]

    def clear(self) -> None:
        """Plan nothing any more."""
        self._planned.clear()
