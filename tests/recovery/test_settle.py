"""The commit protocol as a model: whoever dies whenever, each operation is applied exactly once.

The model knows what a worker can see and nothing else. An operation's result carries the number of the
attempt that made it, so that a result from an attempt that was dropped cannot pass for the right one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.membership import Standing, worker_order
from holdfast.recovery.settle import Settlement, settle

Settle = Callable[[dict[str, Standing]], Settlement]


@dataclass
class Worker:
    """``applied[t]`` is the attempt whose result operation t left in the state; None: no state yet."""

    applied: list[int] | None = None
    voted: int | None = None  # the attempt that it has voted for and still holds

    def standing(self) -> Standing:
        return Standing(operation=None if self.applied is None else len(self.applied), voted=self.voted is not None)

    def apply(self) -> None:
        assert self.applied is not None
        assert self.voted is not None, "a worker applies what it does not hold"
        self.applied.append(self.voted)
        self.voted = None


@dataclass
class World:
    """Workers in generations. Any of them may die at any point; at least one lives on."""

    chance: random.Random
    settle: Settle
    workers: dict[str, Worker] = field(default_factory=dict)
    attempts: int = 0
    born: int = 0

    def join(self, count: int) -> None:
        for _ in range(count):
            self.workers[f"0.{self.born}"] = Worker()
            self.born += 1

    def sometimes(self, chance: float = 0.2) -> bool:
        return self.chance.random() < chance

    def maybe_die(self, worker: str) -> bool:
        if len(self.workers) > 1 and self.sometimes(0.1):
            del self.workers[worker]
            return True
        return False

    def in_any_order(self) -> list[str]:
        names = list(self.workers)
        self.chance.shuffle(names)
        return names

    # --- a generation ----------------------------------------------------------------------------

    def enter(self) -> bool:
        """Settles, as ``Cohort._enter`` does; false if somebody died on the way."""
        plan = self.settle({name: worker.standing() for name, worker in self.workers.items()})
        if plan.operation == 0 and all(w.applied is None for w in self.workers.values()):
            self.workers[plan.holders[0]].applied = []
        for name in self.in_any_order():
            if self.maybe_die(name):
                return False  # those who come later in this order have done nothing yet
            if name in plan.forward:
                self.workers[name].apply()
            else:
                self.workers[name].voted = None
        for name in plan.receivers:
            holders = [h for h in plan.holders if h in self.workers]
            if self.maybe_die(name) or self.maybe_die(self.chance.choice(holders)):
                return False
            state = self.workers[holders[0]].applied
            assert state is not None, "a holder holds nothing"
            self.workers[name].applied = list(state)
        for worker in self.workers.values():
            assert worker.applied is not None
            assert len(worker.applied) == plan.operation, "somebody stands elsewhere"
            assert worker.voted is None
        return True

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
        for name in self.in_any_order():
            if self.maybe_die(name):  # after its vote: the others may or may not have got it
                alive = False
            elif name not in unlucky:
                self.workers[name].apply()
        if alive and not unlucky:
            return True
        for worker in self.workers.values():  # some are already at the next operation's vote
            if worker.voted is None and self.sometimes():
                worker.voted = self.attempts + 1
        self.attempts += 1
        return False

    def live(self, rounds: int) -> None:
        self.join(self.chance.randint(1, 5))
        for _ in range(rounds):
            known = [worker.applied for worker in self.workers.values() if worker.applied is not None]
            committed = list(max(known, key=len, default=[]))
            if self.enter():
                histories = [worker.applied for worker in self.workers.values()]
                assert all(history == committed for history in histories), "lost, doubled, or states differ"
                assert sorted(set(committed)) == committed, "an attempt was applied twice"
                while not self.sometimes(0.3) and self.operate():
                    pass
            self.join(self.chance.choice([0, 0, 0, 1, 2]))


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=300)
def test_every_operation_is_committed_exactly_once(seed: int) -> None:
    World(random.Random(seed), settle).live(rounds=12)


def never_forward(standings: dict[str, Standing]) -> Settlement:
    return replace(settle(standings), forward=())


def forward_whoever_voted(standings: dict[str, Standing]) -> Settlement:
    plan = settle(standings)
    return replace(plan, forward=tuple(w for w, s in standings.items() if s.voted))


def oldest_wins(standings: dict[str, Standing]) -> Settlement:
    """Everybody returns to the least that anybody has."""
    known = {w: s.operation for w, s in standings.items() if s.operation is not None}
    if not known:
        return settle(standings)
    oldest = min(known.values())
    holders = tuple(w for w in known if known[w] == oldest)
    receivers = tuple(w for w in standings if w not in holders)
    return Settlement(operation=oldest, forward=(), receivers=receivers, holders=holders, reason="")


@pytest.mark.parametrize("broken", [never_forward, forward_whoever_voted, oldest_wins])
def test_the_model_finds_out_a_broken_settle(broken: Settle) -> None:
    def survives(seed: int) -> bool:
        try:
            World(random.Random(seed), broken).live(rounds=12)
        except (AssertionError, IndexError):
            return False
        return True

    assert not all(survives(seed) for seed in range(100))


standings = st.builds(
    Standing, operation=st.none() | st.integers(0, 3), voted=st.booleans(), boundary=st.booleans(), broken=st.booleans()
)
names = st.builds("{}.{}".format, st.integers(0, 2), st.integers(0, 20))


@given(st.dictionaries(names, standings, min_size=1, max_size=8))
def test_everybody_holds_or_receives_and_only_voters_roll_forward(standings: dict[str, Standing]) -> None:
    plan = settle(standings)
    assert {*plan.holders, *plan.receivers} == set(standings)
    assert not {*plan.holders} & {*plan.receivers}
    assert plan.holders, "somebody has the state"
    assert set(plan.forward) <= set(plan.holders)
    assert all(standings[worker].voted for worker in plan.forward)
    assert list(plan.receivers) == sorted(plan.receivers, key=worker_order)
    assert plan.reason


@given(st.dictionaries(names, standings, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_worker_comes_to_the_same_settlement(standings: dict[str, Standing], random: random.Random) -> None:
    order = list(standings)
    random.shuffle(order)
    assert settle({worker: standings[worker] for worker in order}) == settle(standings)


def test_at_the_begin_the_first_workers_model_is_everybodys() -> None:
    plan = settle({worker: Standing(boundary=True) for worker in ["0.10", "1.0", "0.9"]})
    assert (plan.operation, plan.holders, plan.receivers) == (0, ("0.9",), ("0.10", "1.0"))


def test_reasons_are_in_words() -> None:
    plan = settle({"0.0": Standing(operation=5), "0.1": Standing(operation=4, voted=True), "0.2": Standing()})
    assert plan.reason == "operation 4 is committed: 0.1 roll forward; 0.2 get the state"
