"""Machines that cannot reach each other: who goes on, and for how long the others are kept out. Pure.

All of them reach the coordinator, so nobody counts as lost. Without a decision the same workers would be put together
again and again. The larger side goes on. The others wait, and are tried again later: the network may be mended.

An elected coordinator may itself be on the smaller side. Etcd tells it so, and it leaves the role to the larger one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.cluster.membership import Standing, machine_of

FIRST_SECONDS = 60.0  # for which a machine is kept out at first; each time it fails again, for twice as long
LONGEST_SECONDS = 3600.0  # each try costs those who train a heartbeat or two, so an hour apart they cost nothing
MANY = 16  # machines that are decided exactly: all sides are tried, which takes twice as long for each more
REFUSALS = 5  # generations without a commit in which one machine refuses another

Pair = frozenset[int]  # two machines, by the numbers of their agents


def pairs_of(complaints: Mapping[str, Collection[str]]) -> set[Pair]:
    """Return the pairs of machines between which workers complain of each other.

    >>> pairs_of({"0.0": ["1.0", "1.1", "0.1"], "1.0": []})
    {frozenset({0, 1})}
    """
    found = {
        frozenset({machine_of(name), machine_of(other)}) for name, others in complaints.items() for other in others
    }
    return {pair for pair in found if len(pair) == 2}


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
    stays = set(workers) - {machine for pair in pairs for machine in pair}
    for component in _components(pairs):
        stays |= _stays(component, [pair for pair in pairs if pair <= component], workers)
    return stays


def why_resign(members: Mapping[int, int], *, heard: Collection[int], alive: Collection[int]) -> str:
    """Return why an elected coordinator should leave its role to another machine; "": it should not.

    ``members``: the machines of the last generation that etcd has, which hold the state, and the number of workers of
    each. ``heard``: machines that are connected to it. ``alive``: machines whose agents show signs of life in etcd.
    Of two halves that of the coordinator goes on.

    >>> why_resign({0: 1, 1: 1, 2: 1}, heard={0}, alive={0, 1, 2})
    'it reaches 1 of 3 workers, and 2 are on machines that are alive in etcd'
    >>> why_resign({0: 1, 1: 1, 2: 1}, heard={0}, alive={0, 1}), why_resign({0: 2, 1: 1}, heard={0}, alive={0, 1})
    ('', '')
    """
    here = sum(workers for machine, workers in members.items() if machine in heard)
    missed = sum(workers for machine, workers in members.items() if machine in alive and machine not in heard)
    if missed <= here:
        return ""
    return f"it reaches {here} of {sum(members.values())} workers, and {missed} are on machines that are alive in etcd"


def _components(pairs: Collection[Pair]) -> list[set[int]]:
    """Return the machines in these pairs, in groups that no pair connects: each can be decided by itself."""
    found: list[set[int]] = []
    for pair in pairs:
        joined = [group for group in found if group & pair]
        found = [group for group in found if not group & pair]
        found.append(set(pair).union(*joined))
    return found


def _stays(machines: set[int], pairs: Collection[Pair], workers: Mapping[int, int]) -> set[int]:
    """Return the best side of some machines. Of many it is a good one: the best would take too long to find."""
    if not pairs:
        return machines
    # Either this machine goes, or all those go that it cannot reach. The one with the most pairs decides the most.
    most = max(sorted(machines), key=lambda machine: sum(machine in pair for pair in pairs))
    partners = {machine for pair in pairs if most in pair for machine in pair} - {most}

    def among(some: set[int]) -> set[int]:
        return _stays(some, [pair for pair in pairs if pair <= some], workers)

    def worth(side: set[int]) -> tuple[int, list[int]]:
        return sum(workers[machine] for machine in side), [-machine for machine in sorted(side)]

    if len(machines) > MANY:
        return among(machines - {most} if worth({most}) < worth(partners) else machines - partners)
    return max(among(machines - partners), among(machines - {most}), key=worth)


@dataclass(kw_only=True)
class Refusals:
    """Machines that refused others since the last commit, and in how many generations.

    A worker that gives a generation up refuses those who still call it. But the same machine does not refuse the same
    other one in many generations, unless a firewall does.

    >>> refusals, standings = Refusals(), {"1.0": Standing(refused=("2.0",)), "2.0": Standing()}
    >>> [bool(refusals.cut(standings)) for _ in range(5)]
    [False, False, False, False, True]
    """

    _times: Counter[Pair] = field(default_factory=Counter)

    def cut(self, standings: Mapping[str, Standing]) -> set[Pair]:
        """Take in what workers show after a generation has failed; return the machines that count as cut off."""
        self._times.update(pairs_of({name: standing.refused for name, standing in standings.items()}))
        return {pair for pair, times in self._times.items() if times >= REFUSALS}


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

    def add(self, machine: int, now: float, most: float = LONGEST_SECONDS) -> float:
        """Keep a machine out; return for how many seconds, ``most`` at the most."""
        seconds = min(2 * self._seconds.get(machine, FIRST_SECONDS / 2), most)
        self._seconds[machine], self._until[machine] = seconds, now + seconds
        return seconds

    def now(self, now: float) -> set[int]:
        """Return the machines that are kept out at the moment."""
        return {machine for machine, until in self._until.items() if now < until}

    @property
    def doubted(self) -> set[int]:
        """The machines that were kept out, and have not worked with the others since."""
        return {*self._seconds}

    def reached(self, machines: Collection[int]) -> None:
        """Note that these machines work together: the next time is a first time again."""
        for machine in machines:
            self._until.pop(machine, None)
            self._seconds.pop(machine, None)
