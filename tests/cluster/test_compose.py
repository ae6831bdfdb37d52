"""Who makes up the next generation: nobody's state is lost, nobody joins where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.cluster import compose as compose_module
from holdfast.cluster.compose import compose, first_generation, first_members, judge_error
from holdfast.cluster.membership import Standing, machine_of, worker_order
from holdfast.commit.settle import judge, settle
from tests.standings import lost_units, standing

NOBODY: dict[str, Standing] = {}
UNITS = 3


@st.composite
def reachable(draw: st.DrawFn) -> dict[str, Standing]:
    """Standings that the commit protocol can leave: if anybody has committed t, everybody else has voted for it.

    Some hold parts of the state, and together they may lack something.
    """
    names = draw(st.lists(st.integers(0, 12), unique=True, max_size=6))
    operation = draw(st.integers(0, 5))
    somebody_committed = draw(st.booleans())
    found = {}
    for name in names:
        committed = somebody_committed and draw(st.booleans())
        holds_nothing = draw(st.integers(0, 9)) == 0
        held = sorted(draw(st.sets(st.integers(0, UNITS - 1)) | st.just(set(range(UNITS)))))
        found[f"0.{name}"] = standing(
            operation=None if holds_nothing else operation + committed,
            voted=not holds_nothing and ((somebody_committed and not committed) or draw(st.booleans())),
            boundary=draw(st.booleans()),
            leaving=draw(st.integers(0, 3)) == 0,
            held=() if holds_nothing else tuple(held),
            next=() if holds_nothing else tuple(unit for unit in held if draw(st.booleans())),
            units=UNITS,
        )
    return found


waiting_lists = st.lists(st.integers(20, 40).map("0.{}".format), unique=True, max_size=5)
targets = st.integers(1, 8)


@given(reachable(), waiting_lists, targets)
def test_members_are_survivors_and_joiners_each_once_and_sorted(
    standings: dict[str, Standing], waiting: list[str], target: int
) -> None:
    made = compose(standings=standings, waiting=waiting, target=target, judge=judge)
    assert list(made.members) == sorted(set(made.members), key=worker_order)
    assert set(made.members) <= {*standings, *waiting}
    assert set(made.members) & set(standings) == set(standings) - set(made.dismissed)
    assert set(made.dismissed) <= set(standings)
    assert made.reason


@given(reachable(), waiting_lists, targets)
def test_there_are_never_more_than_wanted_unless_they_survived(
    standings: dict[str, Standing], waiting: list[str], target: int
) -> None:
    made = compose(standings=standings, waiting=waiting, target=target, judge=judge)
    joiners = set(made.members) - set(standings)
    staying = [w for w in made.members if w in joiners or not standings[w].leaving]
    assert not joiners or len(staying) <= target


@given(reachable(), waiting_lists, targets)
def test_joiners_come_only_where_all_stand_at_one_boundary(
    standings: dict[str, Standing], waiting: list[str], target: int
) -> None:
    made = compose(standings=standings, waiting=waiting, target=target, judge=judge)
    if set(made.members) - set(standings):
        assert all(s.boundary for s in standings.values())
        assert len({s.operation for s in standings.values()} - {None}) <= 1


@given(reachable(), targets)
def test_only_those_asked_to_leave_are_let_go(standings: dict[str, Standing], target: int) -> None:
    made = compose(standings=standings, waiting=[], target=target, judge=judge)
    assert all(standings[worker].leaving for worker in made.dismissed)


@given(reachable(), targets)
def test_leavers_leave_only_if_somebody_who_stays_has_a_state(standings: dict[str, Standing], target: int) -> None:
    made = compose(standings=standings, waiting=[], target=target, judge=judge)
    if made.members and any(s.operation is not None for s in standings.values()):
        assert any(standings[worker].operation is not None for worker in made.members)


@given(reachable(), waiting_lists, targets)
def test_no_part_of_the_state_leaves_with_a_leaver(
    standings: dict[str, Standing], waiting: list[str], target: int
) -> None:
    made = compose(standings=standings, waiting=waiting, target=target, judge=judge)
    if made.members:
        before, after = (
            lost_units(standings.values()),
            lost_units([standings[w] for w in made.members if w in standings]),
        )
        assert set(after) <= set(before)
        known = {s.operation for s in standings.values()} - {None}
        assert not known or max(known) in {standings[w].operation for w in made.members if w in standings}


@given(reachable(), targets)
def test_leavers_at_a_boundary_are_kept_only_for_what_the_others_lack(
    standings: dict[str, Standing], target: int
) -> None:
    made = compose(standings=standings, waiting=[], target=target, judge=judge)
    kept = [w for w in made.members if standings[w].leaving and standings[w].boundary]
    if kept:
        others = [s for s in standings.values() if not (s.leaving and s.boundary)]
        newest = max((s.operation for s in standings.values() if s.operation is not None), default=None)
        assert lost_units(others) or newest not in {s.operation for s in others}


def test_leavers_hand_over_to_those_who_wait() -> None:
    standings = {"0.0": standing(operation=3, boundary=True, leaving=True)}
    made = compose(standings=standings, waiting=["1.0"], target=1, judge=judge)
    assert (made.members, made.dismissed) == (("0.0", "1.0"), ())
    assert compose(standings=standings, waiting=[], target=1, judge=judge).members == ()


def test_no_committed_operation_leaves_with_a_leaver() -> None:
    standings = {"0.0": standing(operation=5, leaving=True), "0.1": standing(operation=4, voted=True)}
    assert operation_after(standings) == 5


def operation_after(standings: Mapping[str, Standing]) -> int:
    members = compose(standings=standings, waiting=[], target=4, judge=judge).members
    return settle({worker: standings[worker] for worker in members}).operation


@given(reachable())
def test_no_committed_operation_is_lost_at_one_boundary(standings: dict[str, Standing]) -> None:
    """Where leavers leave as planned: everybody has come to the same boundary."""
    known = [s.operation for s in standings.values() if s.operation is not None]
    assume(known and not all(s.leaving for s in standings.values()))
    same = {w: s if s.operation is None else replace(s, operation=max(known)) for w, s in standings.items()}
    assert operation_after(same) == max(known)


def test_the_only_holder_stays_until_a_joiner_has_its_state() -> None:
    standings = {"0.0": standing(operation=3, boundary=True, leaving=True), "0.1": standing(boundary=True)}
    made = compose(standings=standings, waiting=[], target=2, judge=judge)
    assert (made.members, made.dismissed) == (("0.0", "0.1"), ())
    standings["0.1"] = standing(operation=3, boundary=True)
    made = compose(standings=standings, waiting=[], target=2, judge=judge)
    assert (made.members, made.dismissed, made.reason) == (("0.1",), ("0.0",), "0.0 left as asked")


def test_when_everybody_leaves_the_run_ends() -> None:
    leaving = standing(operation=3, boundary=True, leaving=True)
    made = compose(standings={"0.0": leaving, "0.1": leaving}, waiting=[], target=0, judge=judge)
    assert made.members == ()
    assert set(made.dismissed) == {"0.0", "0.1"}
    assert "everybody" in made.reason


def test_the_first_generation_is_made_of_those_who_wait() -> None:
    made = compose(standings=NOBODY, waiting=["0.10", "0.9", "0.2"], target=2, judge=judge)
    assert made.members == ("0.2", "0.9")


def test_the_place_of_a_leaver_can_be_taken_at_once() -> None:
    here = standing(operation=3, boundary=True)
    made = compose(standings={"0.0": here, "0.1": replace(here, leaving=True)}, waiting=["0.2"], target=2, judge=judge)
    assert made.members == ("0.0", "0.2")
    assert made.reason == "0.2 joined; 0.1 left as asked"


@pytest.mark.parametrize(
    ("slots", "minimum", "waiting", "ready", "reason"),
    [
        ({}, 1, {}, False, "0 of at least 1 hosts are here"),
        ({0: 2}, 2, {0: 2}, False, "1 of at least 2 hosts are here"),
        ({0: 2, 1: 1}, 2, {0: 2}, False, "host 1 has 0 of 1 workers ready"),
        ({0: 2, 1: 1}, 2, {0: 1, 1: 1}, False, "host 0 has 1 of 2 workers ready"),
        ({0: 2, 1: 1}, 1, {0: 3, 1: 1}, True, "2 hosts with 3 workers are ready"),
    ],
)
def test_the_first_generation_waits_for_all_hosts_and_slots(
    slots: dict[int, int], minimum: int, waiting: dict[int, int], ready: bool, reason: str
) -> None:
    made = first_generation(slots=slots, minimum_hosts=minimum, waiting=waiting)
    assert (made.ready, made.reason) == (ready, reason)


@pytest.mark.parametrize(
    ("earlier", "alive", "stop"),
    [([], 3, False), (["KeyError: 'y'"], 3, False), (["KeyError: 'x'"], 3, True), ([], 0, True)],
)
def test_an_error_ends_the_run_when_it_comes_again_or_leaves_nobody(earlier: list[str], alive: int, stop: bool) -> None:
    verdict = judge_error(error="KeyError: 'x'", earlier=earlier, alive=alive)
    assert verdict.stop == stop


def test_leavers_go_at_a_boundary_only() -> None:
    """Elsewhere they may have to save first: if all leave, their next vote shows it to them."""
    leaving = standing(operation=4, leaving=True)
    assert compose(standings={"0.0": leaving, "0.1": leaving}, waiting=[], target=0, judge=judge).members == (
        "0.0",
        "0.1",
    )
    at_boundary = replace(leaving, boundary=True)
    assert compose(standings={"0.0": at_boundary, "0.1": at_boundary}, waiting=[], target=0, judge=judge).members == ()


def test_who_holds_the_only_copy_of_a_layer_hands_it_over_before_it_leaves() -> None:
    here = standing(operation=3, boundary=True, held=(0, 1), units=3)
    leaving = standing(operation=3, boundary=True, held=(1, 2), units=3, leaving=True)
    third = standing(operation=3, boundary=True, held=(2,), units=3)
    made = compose(standings={"0.0": here, "0.1": leaving}, waiting=[], target=2, judge=judge)
    assert (made.members, made.dismissed) == (("0.0", "0.1"), ())
    made = compose(standings={"0.0": here, "0.1": leaving, "0.2": third}, waiting=[], target=2, judge=judge)
    assert (made.members, made.dismissed) == (("0.0", "0.2"), ("0.1",))


def test_who_will_have_updated_a_layer_counts_as_its_holder_and_who_will_not_does_not() -> None:
    ahead = standing(operation=5, boundary=True, held=(0,), units=2)
    behind = standing(operation=4, voted=True, boundary=True, held=(0, 1), next=(1,), units=2)
    other = standing(operation=4, voted=True, boundary=True, held=(0, 1), next=(0,), units=2)
    assert lost_units([ahead, behind]) == []
    assert lost_units([ahead, other]) == [1], "its copy of unit 1 is one operation old"
    assert lost_units([other]) == [], "nobody has committed it: nothing is old"


def test_a_copy_that_broke_off_is_no_begin() -> None:
    """Who was being given the state when that broke has a part of it: from that alone nobody can go on."""
    assert lost_units([standing(operation=3, held=(0,), units=2), standing()]) == [1]
    assert lost_units([standing(operation=3, held=(), units=2)]) == [0, 1]
    assert lost_units([standing(operation=0, held=(), units=2)]) == [], "all there is are initial states"


def test_choosing_the_first_members_looks_at_each_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of thousands that begins again from its checkpoint must not take longer than a heartbeat for it."""
    asked: list[str] = []
    monkeypatch.setattr(compose_module, "machine_of", lambda name: asked.append(name) or machine_of(name))
    names = [f"{host}.{n}" for host in range(9) for n in range(9)]
    chosen = first_members(waiting=names, slots=dict.fromkeys(range(8), 8))
    assert chosen == [f"{host}.{n}" for host in range(8) for n in range(8)]
    assert len(asked) == len(names)
