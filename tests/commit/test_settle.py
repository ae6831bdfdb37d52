"""Settling: whoever dies whenever, each operation is applied exactly once, and to every unit of the state."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.membership import Standing, newest_of, worker_order
from holdfast.commit import settle as settling
from holdfast.commit.settle import Settlement, account_of, settle, trusted
from holdfast.errors import HoldfastError
from tests.commit.commit_model import UNITS, Settle, survives
from tests.standings import standing


def changed(shown: Standing, **fields: Any) -> Standing:
    """The same standing with another account."""
    return replace(shown, payload=replace(account_of(shown), **fields).to_json())


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=400)
def test_every_operation_is_committed_exactly_once_to_every_unit(seed: int) -> None:
    survives(seed, settle)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=400)
def test_with_eager_updates_too_and_replicas_stay_alike(seed: int) -> None:
    survives(seed, settle, eager=True)


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
    held = {w: frozenset(account_of(s).held) if s.operation == oldest else frozenset() for w, s in standings.items()}
    newcomers = tuple(w for w in standings if known.get(w) != oldest)
    return replace(plan, operation=oldest, forward=(), held=held, newcomers=newcomers)


def as_if_all_were_updated(standings: dict[str, Standing]) -> Settlement:
    """Who rolls forward is believed to update all that it has, and not only what is of its place."""
    return settle({w: changed(s, next=account_of(s).held) for w, s in standings.items()})


def everybody_is_up_to_date(standings: dict[str, Standing]) -> Settlement:
    plan = settle(standings)
    return replace(plan, held={w: frozenset(account_of(s).held) for w, s in standings.items()})


def undone_is_as_good(standings: dict[str, Standing]) -> Settlement:
    """As if undoing gave back every bit."""
    return settle({w: changed(s, undone=()) for w, s in standings.items()})


def the_last_ones_copy(standings: dict[str, Standing]) -> Settlement:
    """A copy that was undone counts even if others are untouched."""
    plan = settle(standings)
    held = {w: set(units) for w, units in plan.held.items()}
    for w, account in {w: account_of(s) for w, s in standings.items()}.items():
        if w not in plan.newcomers and w not in plan.forward:
            for unit in set(account.undone) & set(account.held):
                for units in held.values():
                    units.discard(unit)
                held[w].add(unit)
    return replace(plan, held={w: frozenset(units) for w, units in held.items()})


def untouched_because_it_will_roll_forward(standings: dict[str, Standing]) -> Settlement:
    """Who has voted is believed to be untouched, though it has to drop what it voted for."""
    return settle({w: changed(s, undone=()) if s.voted else s for w, s in standings.items()})


@pytest.mark.parametrize("broken", [undone_is_as_good, the_last_ones_copy, untouched_because_it_will_roll_forward])
def test_the_model_finds_out_copies_that_differ(broken: Settle) -> None:
    with pytest.raises(AssertionError, match=r"replicas differ|rounded without need"):
        sum(survives(seed, broken, eager=True) for seed in range(300))


@pytest.mark.parametrize(
    "broken", [never_forward, forward_whoever_voted, oldest_wins, as_if_all_were_updated, everybody_is_up_to_date]
)
def test_the_model_finds_out_a_broken_settle(broken: Settle) -> None:
    def holds(seed: int) -> bool:
        try:
            survives(seed, broken)
        except (AssertionError, IndexError, KeyError, HoldfastError):
            return False
        return True

    assert not all(holds(seed) for seed in range(300))


def test_the_model_finds_out_losses_that_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is one operation behind, and has voted, holds what it will have updated: no more, no less."""
    monkeypatch.setattr(settling, "_still_held", lambda standing, account, newest: account.held)
    with pytest.raises(AssertionError):
        sum(survives(seed, settle) for seed in range(300))


units = st.sets(st.integers(0, UNITS - 1)).map(lambda found: tuple(sorted(found)))
standings = st.builds(
    standing,
    operation=st.none() | st.integers(0, 3),
    voted=st.booleans(),
    boundary=st.booleans(),
    broken=st.booleans(),
    held=units,
    next=units,
    units=st.just(UNITS),
)
touched = st.builds(changed, standings, undone=units)
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
            account = account_of(standings[worker])
            known = account.next if worker in plan.forward else account.held
            assert units == (set(known) if worker in there else set())
    else:
        assert there == [plan.begins] == [min(standings, key=worker_order)]
        assert not plan.forward
        assert not any(plan.held.values()), "what was held of a state that is begun again is of no use"


@given(st.dictionaries(names, touched, min_size=1, max_size=8))
def test_of_what_was_undone_untouched_copies_count_or_one(standings: dict[str, Standing]) -> None:
    plan, plain = settle(standings), settle({w: changed(s, undone=()) for w, s in standings.items()})
    assert (plan.operation, plan.forward) == (plain.operation, plain.forward)
    if plan.begins is not None:
        undone = {w: account_of(s).undone for w, s in standings.items()}
        assert not undone[plan.begins] or all(undone.values())
        return
    for unit in range(UNITS):
        holders = [w for w in sorted(standings, key=worker_order) if unit in plain.held[w]]
        counts = [w for w in holders if unit in plan.held[w]]
        untouched = [w for w in holders if w in plan.forward or unit not in account_of(standings[w]).undone]
        assert counts == (untouched or holders[:1])
        assert (unit in plan.inexact) == (bool(holders) and not untouched)
        assert (unit in plan.undone) == (len(untouched) < len(holders))


def test_who_rolls_forward_has_an_exact_copy() -> None:
    """One has committed operation 4 and begun the next; the other still has the bits of 4 when it rolls forward."""
    ahead = standing(operation=5, held=(0, 1), undone=(1,), units=2)
    behind = standing(operation=4, voted=True, held=(0, 1), next=(0, 1), undone=(0, 1), units=2)
    plan = settle({"0.0": ahead, "0.1": behind})
    assert plan.held == {"0.0": {0}, "0.1": {0, 1}}
    assert (plan.undone, plan.inexact) == ((1,), ())


def test_nothing_is_said_to_be_held_that_is_not() -> None:
    held = {"0.0": frozenset({0}), "0.1": frozenset({1})}
    counts, inexact = trusted(held, {"0.0": frozenset({0, 1}), "0.1": frozenset()})
    assert counts == held
    assert inexact == {0}


@given(st.dictionaries(names, touched, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_worker_comes_to_the_same_settlement(standings: dict[str, Standing], random: random.Random) -> None:
    order = list(standings)
    random.shuffle(order)
    assert settle({worker: standings[worker] for worker in order}) == settle(standings)


def test_at_the_begin_the_first_workers_model_is_everybodys() -> None:
    plan = settle({worker: standing(boundary=True) for worker in ["0.10", "1.0", "0.9"]})
    assert (plan.operation, plan.begins, plan.newcomers) == (0, "0.9", ("0.10", "1.0"))
    assert plan.teller == "0.9"


def test_what_nobody_has_committed_is_begun_again_by_the_first() -> None:
    """Also if some have voted for it: nobody ever will commit it."""
    plan = settle({"0.0": standing(), "0.1": standing(operation=0, voted=True, held=(0, 1), units=2)})
    assert (plan.operation, plan.begins, plan.forward, plan.newcomers) == (0, "0.0", (), ("0.1",))


def test_reasons_are_in_words() -> None:
    plan = settle({"0.0": standing(operation=5), "0.1": standing(operation=4, voted=True), "0.2": standing()})
    assert plan.reason == "operation 4 is committed: 0.1 roll forward; 0.2 get the state"
    plan = settle({w: standing(operation=5, held=(0, 1), undone=(1,), broken=True) for w in ("0.0", "0.1")})
    assert plan.reason == "all copies of units 1 were updated and taken back, one is everybody's"
