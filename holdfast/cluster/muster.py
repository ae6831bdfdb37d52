"""The muster: the workers that the roster knows of, and who of them has shown a standing.

It is asked after every message of every worker, so it never looks at all of them: it notes each change where it
belongs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Generation, Standing, machine_of
from holdfast.cluster.pulse import Still


@dataclass(kw_only=True)
class Worker:
    """A worker, as its agent has told of it."""

    name: str
    address: str  # of its machine, for the other workers
    port: int  # at which they reach it
    incarnation: str  # random; tells its process from another of the same name
    label: Label  # facts about the training that must be the same on all workers
    host: str  # its failure domain
    fresh: bool  # it has never been in a generation
    heard: float  # time of its last sign of life, as far as its agent tells
    standing: Standing | None = None  # None while it trains
    doing: tuple[int, str] | None = None  # the number of its next operation, and what it is
    still: Still | None = None  # for how long its training thread shows no sign of progress

    @property
    def machine(self) -> int:
        """The number of its agent."""
        return machine_of(self.name)


class Muster:
    """Workers by name; the members of the present generation, dead or alive; and who waits to join.

    >>> worker = Worker(name="0.0", address="", port=7, incarnation="", label={}, host="0", fresh=True, heard=0.0)
    >>> muster = Muster()
    >>> muster.add(worker)
    >>> muster.show(worker, Standing())
    >>> [waiting.name for waiting in muster.waiting]
    ['0.0']
    """

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.members: list[str] = []  # of the present generation, by rank
        self._members_on: defaultdict[int, list[str]] = defaultdict(list)  # the same by machine
        self._on: defaultdict[int, dict[str, None]] = defaultdict(dict)  # workers by machine, in order
        self.workers: dict[str, Worker] = {}
        self.standings: dict[str, Standing] = {}  # of members that are here and have shown one
        self._members: set[str] = set()
        self._here: set[str] = set()  # members that are here
        self._waiting: dict[str, Worker] = {}  # workers that were never in a generation, and have shown a standing

    def begin(self, generation: Generation) -> None:
        """Note the present generation."""
        self.generation = generation
        self.members = generation.workers
        self._members = {*self.members}
        self._members_on.clear()
        for name in self.members:
            self._members_on[machine_of(name)].append(name)
        self._here = self._members & self.workers.keys()
        self.standings = {n: s for n in self._here if (s := self.workers[n].standing) is not None}
        self._waiting = {n: w for n, w in self.workers.items() if w.fresh and w.standing is not None}

    def add(self, worker: Worker) -> None:
        """Note a worker, or what is new of one."""
        self.workers[worker.name] = worker
        self._on[worker.machine][worker.name] = None
        if worker.name in self._members:
            self._here.add(worker.name)
        if worker.standing is not None:
            self.show(worker, worker.standing)

    def show(self, worker: Worker, standing: Standing) -> None:
        """Note the standing that a worker shows."""
        worker.standing = standing
        if worker.name in self._members:
            self.standings[worker.name] = standing
        if worker.fresh:
            self._waiting[worker.name] = worker

    def remove(self, name: str) -> None:
        """Forget a worker that is gone. A member stays one, until the next generation."""
        self.workers.pop(name, None)
        self._on[machine_of(name)].pop(name, None)
        self._here.discard(name)
        self.standings.pop(name, None)
        self._waiting.pop(name, None)

    def refresh(self, name: str) -> None:
        """Note that a worker counts as one that was never in a generation."""
        worker = self.workers[name]
        worker.fresh = True
        if worker.standing is not None:
            self._waiting[name] = worker

    def is_member(self, name: str) -> bool:
        """Whether a worker is in the present generation."""
        return name in self._members

    @property
    def all_have_shown(self) -> bool:
        """Whether every member that is here has shown a standing."""
        return len(self.standings) == len(self._here)

    @property
    def waiting_count(self) -> int:
        """How many wait to join, at the most: quick, and exact before the first generation."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Worker]:
        """The workers that wait to join."""
        return [worker for name, worker in self._waiting.items() if name not in self._members]

    def workers_on(self, machine: int) -> list[str]:
        """The workers of a machine."""
        return list(self._on[machine])

    def members_on(self, machine: int) -> list[str]:
        """The members of the present generation, dead or alive, that are of a machine."""
        return self._members_on[machine]
