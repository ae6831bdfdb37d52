"""Names of log records. A stage keeps what it has sent, so that a lost neighbour can be computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import Any


class Direction(IntEnum):
    """Direction in which a record was sent."""

    FORWARD = 0  # the output of the layer before a boundary
    BACKWARD = 1  # the gradient of that output, from the layer behind the boundary
    TIE = 2  # the gradient of one use of a shared weight; its "boundary" is the layer of the use


@dataclass(frozen=True, kw_only=True, order=True, slots=True)  # a log has very many of them
class Key:
    """Name of a record, the same on every worker. Boundary b lies between the layers b-1 and b.

    >>> print(Key(step=7, boundary=3, micro_batch=0, direction=Direction.FORWARD))
    step 7, boundary 3, micro-batch 0, forward
    """

    step: int
    boundary: int
    micro_batch: int  # of a TIE: the number of the shared weight
    direction: Direction

    def __str__(self) -> str:
        return (
            f"step {self.step}, boundary {self.boundary}, micro-batch {self.micro_batch}, {self.direction.name.lower()}"
        )


@dataclass(frozen=True, kw_only=True, order=True)
class HeldRecords:
    """Records that a worker has at one boundary: the same micro-batches of every step in [first, stop)."""

    direction: Direction
    boundary: int
    first: int
    stop: int
    micro_batches: tuple[tuple[int, int], ...]  # ranges [a, b)

    def has(self, key: Key) -> bool:
        """Return whether the record is among them.

        >>> held = HeldRecords(direction=Direction.FORWARD, boundary=3, first=0, stop=9, micro_batches=((0, 2), (6, 8)))
        >>> held.has(Key(step=8, boundary=3, micro_batch=7, direction=Direction.FORWARD))
        True
        """
        return (
            (self.direction, self.boundary) == (key.direction, key.boundary)
            and self.first <= key.step < self.stop
            and any(a <= key.micro_batch < b for a, b in self.micro_batches)
        )

    def to_json(self) -> list[Any]:
        """Return a list for ``from_json``."""
        return [int(self.direction), self.boundary, self.first, self.stop, self.micro_batches]

    @staticmethod
    def from_json(data: list[Any]) -> HeldRecords:
        """Read what ``to_json`` has made."""
        direction, boundary, first, stop, ranges = data
        return HeldRecords(
            direction=Direction(direction),
            boundary=boundary,
            first=first,
            stop=stop,
            micro_batches=tuple((a, b) for a, b in ranges),
        )


def holdings_of(keys: Iterable[Key]) -> list[HeldRecords]:
    """Summarize records: equal micro-batches of consecutive steps become one entry.

    >>> where = {"boundary": 1, "direction": Direction.FORWARD}
    >>> keys = [Key(step=step, micro_batch=number, **where) for step in (4, 5, 6) for number in (0, 1, 3)]
    >>> [(h.first, h.stop, h.micro_batches) for h in holdings_of(keys)]
    [(4, 7, ((0, 2), (3, 4)))]
    """
    found: list[HeldRecords] = []
    ordered = sorted((key.direction, key.boundary, key.step, key.micro_batch) for key in keys)
    for (direction, boundary, step), group in groupby(ordered, key=lambda entry: entry[:3]):
        ranges = _ranges(number for *_, number in group)
        here = HeldRecords(direction=direction, boundary=boundary, first=step, stop=step + 1, micro_batches=ranges)
        if found and replace(found[-1], first=step, stop=found[-1].stop + 1) == here:
            here = replace(here, first=found.pop().first)
        found.append(here)
    return found


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
