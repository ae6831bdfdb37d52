"""Random placements, for systems for which it matters which node of a pipeline is lost.

A trace does not tell where a lost node stood, so the mean over many placements is taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from holdfast.simulate.course import Segment

PLACEMENTS, FEWEST = 64, 8  # placements at most and at least
DRAWS = 16_000  # random numbers in all: with many losses each placement averages by itself, so fewer are enough


def enough(losses: int) -> int:
    """Return the number of placements for a trace with so many losses.

    >>> enough(14), enough(1000), enough(1_000_000)
    (64, 16, 8)
    """
    return max(FEWEST, min(PLACEMENTS, DRAWS // max(losses, 1)))


def draws(losses: int, *, placements: int | None = None, seed: int = 0) -> list[list[float]]:
    """Return for each placement a number in [0, 1) per loss: where the lost node stood.

    Over all placements each loss hits every part of the cluster equally often (a Latin hypercube), so that few
    placements are enough.

    >>> made = draws(3, placements=4)
    >>> [sorted(int(4 * draw) for draw in column) for column in zip(*made)]
    [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    """
    placements = placements or enough(losses)
    rng = random.Random(seed)
    columns = []
    for _ in range(losses):
        column = [(number + rng.random()) / placements for number in range(placements)]
        rng.shuffle(column)
        columns.append(column)
    return [[column[number] for column in columns] for number in range(placements)]


def mean(courses: Sequence[Sequence[Segment]]) -> list[Segment]:
    """Return the mean over several courses at every moment. All must begin and end together.

    >>> fast = Segment(start=0, end=4, samples_per_s=8.0, used=2, idle=0, lost=0, why="training")
    >>> slow = Segment(start=0, end=2, samples_per_s=0.0, used=0, idle=0, lost=2, why="restarting")
    >>> late = Segment(start=2, end=4, samples_per_s=4.0, used=1, idle=1, lost=0, why="training")
    >>> [(s.start, s.end, s.samples_per_s, s.lost) for s in mean([[fast], [slow, late]])]
    [(0, 2, 4.0, 1.0), (2, 4, 6.0, 0.0)]
    """
    times = sorted({segment.start for course in courses for segment in course} | {courses[0][-1].end})
    at = [0] * len(courses)
    found = []
    for start, end in pairwise(times):
        now = []
        for number, course in enumerate(courses):
            while course[at[number]].end <= start:
                at[number] += 1
            now.append(course[at[number]])
        found.append(
            Segment(
                start=start,
                end=end,
                samples_per_s=_mean(now, lambda segment: segment.samples_per_s),
                used=_mean(now, lambda segment: segment.used),
                idle=_mean(now, lambda segment: segment.idle),
                lost=_mean(now, lambda segment: segment.lost),
                why=f"mean of {len(courses)} placements",
            )
        )
    return found


def _mean(segments: Sequence[Segment], value: Callable[[Segment], float]) -> float:
    return sum(map(value, segments)) / len(segments)
