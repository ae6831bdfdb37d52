"""The commit protocol as a model: whoever dies whenever, each operation is applied exactly once, to every unit.

The model knows what a worker can see and nothing else. A unit of state is the list of the attempts whose results it
has taken in, so that a result from an attempt that was dropped, or a unit that has missed one, cannot pass for right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import membership
from holdfast.cluster.membership import Standing, lost_units, newest_of, worker_order
from holdfast.recovery import settle as settling
from holdfast.recovery.copy import moves
from holdfast.recovery.settle import Settlement, settle

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

    def standing(self) -> Standing:
        return Standing(
            operation=self.operation,
            voted=self.voted is not None,
            held=tuple(sorted(self.held)),
            next=tuple(sorted(self.held & self.place)),
            units=UNITS,
        )

    def apply(self) -> None:
        """It has gradients for the units of its place, and for no others."""
        assert self.operation is not None
        assert self.voted is not None, "a worker applies what it does not hold"
        for unit in self.place:
            self.state[unit].append(self.voted)
        self.held &= self.place
        self.operation += 1
        self.voted = None


class Lost(Exception):
    """Some unit died with its last holder: the run goes back to its checkpoint, which is another story."""


@dataclass
class World:
    """Workers in generations. Any of them may die at any point; at least one lives on."""

    chance: random.Random
    settle: Settle
    workers: dict[str, Worker] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)  # the attempt of each operation
    attempts: int = 0
    born: int = 0

    def join(self, count: int) -> None:
        for _ in range(count):
            self.workers[f"0.{self.born}"] = Worker()
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
            worker.voted = None
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
        for name, place in zip(names, wanted, strict=True):
            self.workers[name].operation = plan.operation
            self.workers[name].place = place
        return True

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
                if worker.operation is not None and state == self.committed:
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
            if self.maybe_die(name) or self.sometimes(0.05):  # died, or gave up before its vote
                alive = False
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
                    right = all(worker.state[unit] == self.committed for unit in worker.held)
                    assert right, "lost, doubled, or out of date"
                assert sorted(set(self.committed)) == self.committed, "an attempt was applied twice"
                while not self.sometimes(0.3) and self.operate():
                    pass
            self.join(self.chance.choice([0, 0, 0, 1, 2]))


def survives(seed: int, settle: Settle) -> bool:
    """Whether the run goes on to the end; false if it lost a unit."""
    try:
        World(random.Random(seed), settle).live(rounds=15)
    except Lost:
        return False
    return True


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=400)
def test_every_operation_is_committed_exactly_once_to_every_unit(seed: int) -> None:
    survives(seed, settle)


def test_the_model_is_not_all_about_losses() -> None:
    """The control: many of its runs go on to the end, and many do not."""
    ended = sum(survives(seed, settle) for seed in range(200))
    assert 20 < ended < 190


def never_forward(standings: dict[str, Standing]) -> Settlement:
    return replace(settle(standings), forward=())


def forward_whoever_voted(standings: dict[str, Standing]) -> Settlement:
    plan = settle(standings)
    return replace(plan, forward=tuple(w for w, s in standings.items() if s.voted))


def oldest_wins(standings: dict[str, Standing]) -> Settlement:
    """Everybody returns to the least that anybody has."""
    known = {w: s.operation for w, s in standings.items() if s.operation is not None}
    plan = settle(standings)
    if plan.begins is not None:
        return plan
    oldest = min(known.values())
    held = {w: frozenset(s.held) if s.operation == oldest else frozenset() for w, s in standings.items()}
    newcomers = tuple(w for w in standings if known.get(w) != oldest)
    return replace(plan, operation=oldest, forward=(), held=held, newcomers=newcomers)


def as_if_all_were_updated(standings: dict[str, Standing]) -> Settlement:
    """Who rolls forward is believed to update all that it has, and not only what is of its place."""
    return settle({w: replace(s, next=s.held) for w, s in standings.items()})


def everybody_is_up_to_date(standings: dict[str, Standing]) -> Settlement:
    plan = settle(standings)
    return replace(plan, held={w: frozenset(s.held) for w, s in standings.items()})


@pytest.mark.parametrize(
    "broken", [never_forward, forward_whoever_voted, oldest_wins, as_if_all_were_updated, everybody_is_up_to_date]
)
def test_the_model_finds_out_a_broken_settle(broken: Settle) -> None:
    def holds(seed: int) -> bool:
        try:
            survives(seed, broken)
        except (AssertionError, IndexError, KeyError, ValueError):
            return False
        return True

    assert not all(holds(seed) for seed in range(300))


def test_the_model_finds_out_losses_that_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is one operation behind, and has voted, holds what it will have updated: no more, no less."""
    monkeypatch.setattr(membership, "still_held", lambda standing, newest: standing.held)
    monkeypatch.setattr(settling, "still_held", lambda standing, newest: standing.held)
    with pytest.raises(AssertionError):
        sum(survives(seed, settle) for seed in range(300))


units = st.sets(st.integers(0, UNITS - 1)).map(lambda found: tuple(sorted(found)))
standings = st.builds(
    Standing,
    operation=st.none() | st.integers(0, 3),
    voted=st.booleans(),
    boundary=st.booleans(),
    broken=st.booleans(),
    held=units,
    next=units,
    units=st.just(UNITS),
)
names = st.builds("{}.{}".format, st.integers(0, 2), st.integers(0, 20))


@given(st.dictionaries(names, standings, min_size=1, max_size=8))
def test_everybody_stands_there_or_is_told_and_only_voters_roll_forward(standings: dict[str, Standing]) -> None:
    plan = settle(standings)
    assert set(plan.held) == set(standings)
    assert plan.teller in standings
    assert plan.teller not in plan.newcomers
    assert not {*plan.forward} & {*plan.newcomers}
    assert all(standings[worker].voted for worker in plan.forward)
    assert list(plan.newcomers) == sorted(plan.newcomers, key=worker_order)
    assert plan.reason
    there = [w for w in standings if w not in plan.newcomers]
    if plan.begins is None:
        assert plan.operation == newest_of(standings.values())
        assert all(standings[w].operation == plan.operation or w in plan.forward for w in there)
        for worker, units in plan.held.items():
            known = standings[worker].next if worker in plan.forward else standings[worker].held
            assert units == (set(known) if worker in there else set())
    else:
        assert there == [plan.begins] == [min(standings, key=worker_order)]
        assert not plan.forward
        assert not any(plan.held.values()), "what was held of a state that is begun again is of no use"


@given(st.dictionaries(names, standings, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_worker_comes_to_the_same_settlement(standings: dict[str, Standing], random: random.Random) -> None:
    order = list(standings)
    random.shuffle(order)
    assert settle({worker: standings[worker] for worker in order}) == settle(standings)


def test_at_the_begin_the_first_workers_model_is_everybodys() -> None:
    plan = settle({worker: Standing(boundary=True) for worker in ["0.10", "1.0", "0.9"]})
    assert (plan.operation, plan.begins, plan.newcomers) == (0, "0.9", ("0.10", "1.0"))
    assert plan.teller == "0.9"


def test_what_nobody_has_committed_is_begun_again_by_the_first() -> None:
    """Also if some have voted for it: nobody ever will commit it."""
    plan = settle({"0.0": Standing(), "0.1": Standing(operation=0, voted=True, held=(0, 1), units=2)})
    assert (plan.operation, plan.begins, plan.forward, plan.newcomers) == (0, "0.0", (), ("0.1",))


def test_reasons_are_in_words() -> None:
    plan = settle({"0.0": Standing(operation=5), "0.1": Standing(operation=4, voted=True), "0.2": Standing()})
    assert plan.reason == "operation 4 is committed: 0.1 roll forward; 0.2 get the state"
