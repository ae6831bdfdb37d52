"""Machines that cannot reach each other: who goes on, and for how long the others are kept out. Pure.

All of them reach the coordinator, so nobody counts as lost. Without a decision the same workers would be put together
again and again. The larger side goes on. The others wait, and are tried again later: the network may be mended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

FIRST_SECONDS = 60.0  # for which a machine is kept out at first; each time it fails again, for twice as long
LONGEST_SECONDS = 3600.0  # each try costs those who train a heartbeat or two, so an hour apart they cost nothing

Pair = frozenset[int]  # two machines, by the numbers of their agents


def side_that_stays(workers: Mapping[int, int], cut: Collection[Pair]) -> set[int]:
    """Return the machines with the most workers among which no two are cut off from each other.

    ``workers``: the number of workers of each machine. ``cut``: pairs of machines that cannot reach each other. Among
    equals the side with the lowest number stays: all else being equal, the coordinator is there.

    >>> side_that_stays({0: 2, 1: 2, 2: 2}, [frozenset({1, 2})])
    {0, 1}
    >>> side_that_stays({0: 1, 1: 2, 2: 2}, [frozenset({0, 1}), frozenset({0, 2})])
    {1, 2}
    """
    pairs = [pair for pair in cut if pair <= workers.keys()]
    if not pairs:
        return set(workers)
    # Either this machine goes, or all those go that it cannot reach. The one with the most pairs decides the most.
    most = max(sorted(workers), key=lambda machine: sum(machine in pair for pair in pairs))
    partners = {machine for pair in pairs if most in pair for machine in pair} - {most}
    without = side_that_stays({m: n for m, n in workers.items() if m != most}, pairs)
    with_it = side_that_stays({m: n for m, n in workers.items() if m not in partners}, pairs)

    def worth(side: set[int]) -> tuple[int, list[int]]:
        return sum(workers[m] for m in side), [-m for m in sorted(side)]

    return max(with_it, without, key=worth)


@dataclass(kw_only=True)
class KeptOut:
    """The machines that are kept out of generations for some time, because others cannot reach them.

    >>> kept = KeptOut()
    >>> kept.add(2, now=0.0)
    60.0
    >>> kept.now(59.0), kept.now(61.0), kept.add(2, now=70.0)
    ({2}, set(), 120.0)
    """

    _until: dict[int, float] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)  # how long each was kept out the last time

    def add(self, machine: int, now: float) -> float:
        """Keep a machine out; return for how many seconds."""
        seconds = min(2 * self._seconds.get(machine, FIRST_SECONDS / 2), LONGEST_SECONDS)
        self._seconds[machine], self._until[machine] = seconds, now + seconds
        return seconds

    def now(self, now: float) -> set[int]:
        """Return the machines that are kept out at the moment."""
        return {machine for machine, until in self._until.items() if now < until}

    def reached(self, machines: Collection[int]) -> None:
        """Note that these machines work together: the next time is a first time again."""
        for machine in machines:
            self._until.pop(machine, None)
            self._seconds.pop(machine, None)
