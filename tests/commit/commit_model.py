"""The commit protocol as a model: whoever dies whenever, each operation is applied exactly once, to every unit.

The model knows what a worker can see and nothing else. A unit of state is the list of the attempts whose results it
has taken in, so that a result from an attempt that was dropped, or a unit that has missed one, cannot pass for right.
With eager updates a unit that was updated and undone has a mark of its own in that list, for the rounding: copies
with different marks are not the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.cluster.membership import Standing, newest_of, worker_order
from holdfast.commit.settle import Settlement
from holdfast.recovery.copy import moves
from tests.standings import lost_units, standing

Settle = Callable[[dict[str, Standing]], Settlement]
UNITS = 4


@dataclass
class Worker:
    """As ``Cohort`` and ``Arranger`` keep it; ``state`` is the truth, ``held`` what it believes to be up to date."""

    operation: int | None = None  # None: it does not know yet where the run is
    voted: int | None = None  # the attempt that it has voted for and still holds
    state: dict[int, list[int]] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    place: set[int] = field(default_factory=set)
    eager: bool = False
    undone: set[int] = field(default_factory=set)

    def standing(self) -> Standing:
        return standing(
            operation=self.operation,
            voted=self.voted is not None,
            held=tuple(sorted(self.held)),
            next=tuple(sorted(self.held & self.place)),
            units=UNITS,
            undone=tuple(sorted(self.undone | (self.place if self.eager and self.voted is not None else set()))),
        )

    def undo(self, units: Iterable[int]) -> None:
        """These were updated too early: they are as before, but for the rounding."""
        for unit in units:
            self.state[unit].append(-next(_marks))
            self.undone.add(unit)

    def drop(self) -> None:
        if self.eager and self.voted is not None:
            self.undo(self.place)
        self.voted = None

    def apply(self) -> None:
        """It has gradients for the units of its place, and for no others."""
        assert self.operation is not None
        assert self.voted is not None, "a worker applies what it does not hold"
        for unit in self.place:
            self.state[unit].append(self.voted)
        self.held &= self.place
        self.undone.clear()
        self.operation += 1
        self.voted = None


_marks = itertools.count(1)


def exactly(state: list[int]) -> list[int]:
    """What a unit would be without rounding."""
    return [attempt for attempt in state if attempt > 0]


class Lost(Exception):
    """Some unit died with its last holder: the run goes back to its checkpoint, which is another story."""


@dataclass
class World:
    """Workers in generations. Any of them may die at any point; at least one lives on."""

    chance: random.Random
    settle: Settle
    eager: bool = False
    workers: dict[str, Worker] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)  # the attempt of each operation
    attempts: int = 0
    born: int = 0

    def join(self, count: int) -> None:
        for _ in range(count):
            self.workers[f"0.{self.born}"] = Worker(eager=self.eager)
            self.born += 1

    def sometimes(self, chance: float = 0.2) -> bool:
        return self.chance.random() < chance

    def maybe_die(self, worker: str) -> bool:
        if len(self.workers) > 1 and self.sometimes(0.05):
            del self.workers[worker]
            return True
        return False

    def in_any_order(self) -> list[str]:
        names = list(self.workers)
        self.chance.shuffle(names)
        return names

    # --- a generation ----------------------------------------------------------------------------

    def enter(self) -> bool:
        """As ``Cohort._enter`` does; false if it broke on the way, at another point for each."""
        standings = {name: worker.standing() for name, worker in self.workers.items()}
        self.look_for_losses(standings)
        plan = self.settle(standings)
        for name in self.in_any_order():
            if self.maybe_die(name):
                return False  # those who come later in this order have done nothing yet
            worker = self.workers[name]
            if name in plan.forward:
                worker.apply()
            worker.drop()
            if plan.begins is not None or name in plan.newcomers:
                worker.operation = None
                worker.held.clear()
        for name in self.in_any_order():  # they hear where the run is
            if self.maybe_die(name) or self.sometimes(0.02):
                return False
            if plan.begins is None:
                self.workers[name].operation = plan.operation
        return self.provide(plan)

    def provide(self, plan: Settlement) -> bool:
        names = sorted(self.workers, key=worker_order)
        wanted: list[set[int]] = [set() for _ in names]
        for unit in range(UNITS):
            for rank in self.chance.choices(range(len(names)), k=self.chance.randint(1, 3)):
                wanted[rank].add(unit)
        if plan.begins is not None:
            for worker in self.workers.values():
                worker.state = {unit: [] for unit in range(UNITS)}  # initial values, wherever they come from
                worker.undone.clear()
            self.workers[plan.begins].held = set(range(UNITS))
            held = [set(range(UNITS)) if name == plan.begins else set() for name in names]
        else:
            held = [set(plan.held[name]) for name in names]
        for move in moves(held, wanted, dict.fromkeys(range(UNITS), 1)):
            sender, receiver = names[move.sender], names[move.receiver]
            if self.maybe_die(receiver) or self.maybe_die(sender) or self.sometimes(0.02):
                return False
            self.workers[receiver].state[move.unit] = list(self.workers[sender].state[move.unit])
            self.workers[receiver].held.add(move.unit)
            self.workers[receiver].undone.discard(move.unit)
        self.check_exactness(plan, wanted, names)
        for name, place in zip(names, wanted, strict=True):
            self.workers[name].operation = plan.operation
            self.workers[name].place = place
        return True

    def check_exactness(self, plan: Settlement, wanted: list[set[int]], names: list[str]) -> None:
        """Where a copy was left that nobody had touched, nothing is rounded."""
        for name, place in zip(names, wanted, strict=True):
            for unit in place:
                if plan.begins is None and unit not in plan.inexact:
                    assert unit not in self.workers[name].undone, "rounded without need"

    def check_copies(self) -> None:
        """Those that train are alike to the bit. Others may be kept until the first vote."""
        for unit in range(UNITS):
            copies = [worker.state[unit] for worker in self.workers.values() if unit in worker.place]
            assert all(copy == copies[0] for copy in copies), "replicas differ"

    def look_for_losses(self, standings: dict[str, Standing]) -> None:
        """What nobody has as it should be is lost, and nothing else is."""
        newest = newest_of(standings.values())
        if newest is None and self.committed:
            raise Lost
        del self.committed[newest or 0 :]  # all who had committed it are dead: it is as if it had never been
        right = set()
        for worker in self.workers.values():
            for unit in worker.held:
                state = worker.state[unit]
                if worker.voted is not None and unit in worker.place and worker.operation == len(self.committed) - 1:
                    state = [*state, worker.voted]
                if worker.operation is not None and exactly(state) == self.committed:
                    right.add(unit)
        missing = sorted(set(range(UNITS)) - right) if self.committed else []
        assert lost_units(standings.values()) == missing
        if missing:
            raise Lost

    def operate(self) -> bool:
        """One attempt and vote in the generation; false if it broke for anybody."""
        self.attempts += 1
        alive = True
        for name in self.in_any_order():
            if self.maybe_die(name):
                alive = False
            elif self.sometimes(0.05):  # gave up before its vote, with some of its units updated
                alive = False
                worker = self.workers[name]
                worker.undo(unit for unit in worker.place if self.eager and self.sometimes(0.5))
            else:
                self.workers[name].voted = self.attempts
        if not alive:
            return False
        unlucky = [name for name in self.in_any_order() if self.sometimes()]
        done = False
        for name in self.in_any_order():
            if self.maybe_die(name):  # after its vote: the others may or may not have got it
                alive = False
            elif name not in unlucky:
                self.workers[name].apply()
                done = True
        if done:
            self.committed.append(self.attempts)
        if alive and not unlucky:
            return True
        for worker in self.workers.values():  # some are already at the next operation's vote
            if done and worker.voted is None and self.sometimes():
                worker.voted = self.attempts + 1
        self.attempts += 1
        return False

    def live(self, rounds: int) -> None:
        self.join(self.chance.randint(1, 6))
        for _ in range(rounds):
            if self.enter():
                for worker in self.workers.values():
                    assert worker.operation == len(self.committed), "somebody stands elsewhere"
                    assert worker.place <= worker.held, "somebody lacks what it needs"
                    right = all(exactly(worker.state[unit]) == self.committed for unit in worker.held)
                    assert right, "lost, doubled, or out of date"
                self.check_copies()
                assert sorted(set(self.committed)) == self.committed, "an attempt was applied twice"
                while not self.sometimes(0.3) and self.operate():
                    pass
            self.join(self.chance.choice([0, 0, 0, 1, 2]))


def survives(seed: int, settle: Settle, *, eager: bool = False) -> bool:
    """Whether the run goes on to the end; false if it lost a unit."""
    try:
        World(random.Random(seed), settle, eager).live(rounds=15)
    except Lost:
        return False
    return True
