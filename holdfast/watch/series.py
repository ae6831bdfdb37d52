"""A curve over the steps of a run, in bounded memory: old and new steps alike become coarser as it grows."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

POINTS = 512  # of a curve at most: more than a phone has columns, and enough for a wide screen
DIGITS = 6  # that are told of a value: more cannot be seen


@dataclass(slots=True)
class Point:
    """Some consecutive steps: their number, the sum, the lowest, the highest and the last value."""

    step: int
    count: int
    total: float
    low: float
    high: float
    last: float

    def join(self, other: Point) -> None:
        """Add later steps."""
        self.count += other.count
        self.total += other.total
        self.low, self.high, self.last = min(self.low, other.low), max(self.high, other.high), other.last


class Series:
    """A value of each step, kept as at most ``points`` points with mean, lowest and highest.

    >>> loss = Series(points=4)
    >>> for step in range(8):
    ...     loss.add(step, float(step))
    >>> loss.to_json()
    {'steps': [0, 2, 4, 6], 'mean': [0.5, 2.5, 4.5, 6.5], 'low': [0, 2, 4, 6], 'high': [1, 3, 5, 7]}
    >>> loss.stride
    2
    """

    def __init__(self, points: int = POINTS) -> None:
        self._most = points
        self.stride = 1  # steps of one point
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    @property
    def last(self) -> float | None:
        """The value of the last step."""
        return self._points[-1].last if self._points else None

    def add(self, step: int, value: float) -> None:
        """Add the value of a step. What is no finite number is left out: a curve cannot show it."""
        if not math.isfinite(value):
            return
        point = Point(step - step % self.stride, 1, value, value, value, value)
        if not self._points or self._points[-1].step < point.step:
            self._points.append(point)
            self._thin()
            return
        place = bisect_left(self._points, point.step, key=lambda each: each.step)
        if self._points[place].step == point.step:
            self._points[place].join(point)
        else:
            self._points.insert(place, point)
            self._thin()

    def rewind(self, step: int) -> None:
        """Forget this step and later ones, because they are trained again."""
        del self._points[bisect_left(self._points, step, key=lambda each: each.step) :]

    def at(self, step: int) -> Point | None:
        """Return the point that a step lies in, or the one before."""
        place = bisect_left(self._points, step + 1, key=lambda each: each.step)
        return self._points[place - 1] if place else None

    def _thin(self) -> None:
        while len(self._points) > self._most:
            self._coarsen()

    def _coarsen(self) -> None:
        """Make points of twice as many steps."""
        self.stride *= 2
        found: list[Point] = []
        for point in self._points:
            point.step -= point.step % self.stride
            if found and found[-1].step == point.step:
                found[-1].join(point)
            else:
                found.append(point)
        self._points = found

    def to_json(self) -> dict[str, list[Any]]:
        """Return the curve as lists of equal length."""
        points = self._points
        return {
            "steps": [point.step for point in points],
            "mean": [_short(point.total / point.count) for point in points],
            "low": [_short(point.low) for point in points],
            "high": [_short(point.high) for point in points],
        }


class Clock:
    """When each step was first committed: for every point the time of its last step, in whole milliseconds.

    >>> clock = Clock()
    >>> clock.add(0, 10.0); clock.add(1, 12.5)
    >>> clock.step_at(11.0), clock.step_at(9.0), clock.to_json()
    (1, 0, {'steps': [0, 1], 't': [10.0, 12.5]})
    """

    def __init__(self, points: int = POINTS) -> None:
        self._series = Series(points)

    def add(self, step: int, t: float) -> None:
        """Note when a step was committed."""
        self._series.add(step, t)

    def rewind(self, step: int) -> None:
        """Forget this step and later ones."""
        self._series.rewind(step)

    def step_at(self, t: float) -> int:
        """Return how many steps were committed at a time, to the precision of the points."""
        done = [point.step + point.count for point in self._series._points if point.last <= t]
        return max(done, default=0)

    def to_json(self) -> dict[str, list[Any]]:
        """Return steps and times as lists."""
        points = self._series._points
        return {"steps": [point.step for point in points], "t": [round(point.last, 3) for point in points]}


def _short(value: float) -> float:
    """Return a number with few digits, and without a fraction if it has none.

    >>> _short(2.0), _short(0.123456789)
    (2, 0.123457)
    """
    found = float(f"{value:.{DIGITS}g}")
    return int(found) if found.is_integer() and abs(found) < 1e9 else found
