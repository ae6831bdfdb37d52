"""The election of the coordinator, as one agent sees it."""

from __future__ import annotations

import pytest

from holdfast.cluster.quorum.election import (
    DEPOSED,
    LONGEST_REST_SECONDS,
    RESIGNED,
    REST_SECONDS,
    REVOKE_AGAIN_SECONDS,
    Campaign,
    CoordinatorEnded,
    Election,
    EtcdSilent,
    Follow,
    LeaseGone,
    PortRefused,
    Resign,
    Rested,
    Revoke,
    Seen,
    Serve,
    StepDown,
)
from holdfast.cluster.quorum.records import Holder

HERE, THERE = ("10.0.0.1", 1), ("10.0.0.2", 2)
MINE = Holder(agent="me", lease=7, address=HERE, epoch=5)
OTHER = Holder(agent="other", lease=8, address=THERE, epoch=6)


@pytest.fixture
def election() -> Election:
    return Election(agent="me", lease=7)


@pytest.fixture
def holder(election: Election) -> Election:
    election.step(Seen(holder=MINE), 0.0)
    assert election.serves
    return election


def test_a_free_role_is_run_for_and_another_s_is_followed(election: Election) -> None:
    assert election.step(Seen(holder=None), 0.0) == [Campaign()]
    assert election.step(Seen(holder=OTHER), 0.0) == [Follow(address=THERE)]
    assert not election.serves


def test_who_is_elected_serves_once(election: Election) -> None:
    assert election.step(Seen(holder=MINE), 0.0) == [Serve(epoch=5), Follow(address=HERE)]
    assert election.step(Seen(holder=MINE), 1.0) == [Follow(address=HERE)]


def test_a_role_that_another_has_got_is_given_up(holder: Election) -> None:
    assert holder.step(Seen(holder=OTHER), 1.0) == [StepDown(), Follow(address=THERE)]
    assert holder.step(Seen(holder=None), 2.0) == [Campaign()]


def test_without_its_lease_it_does_not_serve_although_its_own_name_is_still_there(holder: Election) -> None:
    assert holder.step(LeaseGone(lease=9), 1.0) == [StepDown(), Follow(address=HERE)]
    assert holder.step(Seen(holder=None), 2.0) == [Campaign()]
    again = Holder(agent="me", lease=9, address=HERE, epoch=8)
    assert holder.step(Seen(holder=again), 3.0)[0] == Serve(epoch=8)


def test_a_coordinator_that_was_killed_is_started_again_in_its_epoch(holder: Election) -> None:
    assert holder.step(CoordinatorEnded(code=-9), 1.0) == [Serve(epoch=5), Follow(address=HERE)]


@pytest.mark.parametrize("code", [0, DEPOSED])
def test_a_coordinator_that_is_done_or_deposed_is_not(holder: Election, code: int) -> None:
    assert holder.step(CoordinatorEnded(code=code), 1.0) == []
    wanted = [] if code == 0 else [Campaign()]  # after the end of the run nobody needs the role
    assert holder.step(Seen(holder=None), 2.0) == wanted


def test_the_lease_of_a_holder_whose_port_refuses_is_revoked_once_in_a_while(election: Election) -> None:
    election.step(Seen(holder=OTHER), 0.0)
    assert election.step(PortRefused(address=HERE), 1.0) == [], "it is not the holder's"
    assert election.step(PortRefused(address=THERE), 1.0) == [Revoke(lease=8)]
    again = Holder(agent="other", lease=9, address=THERE, epoch=9)
    election.step(Seen(holder=again), 2.0)
    assert election.step(PortRefused(address=THERE), 2.0) == [], "perhaps it is a firewall that refuses"
    late = 1.0 + REVOKE_AGAIN_SECONDS
    assert election.step(PortRefused(address=THERE), late) == [Revoke(lease=9)]


def test_its_own_lease_is_never_revoked(holder: Election) -> None:
    assert holder.step(PortRefused(address=HERE), 1.0) == []


def test_an_agent_that_leaves_does_not_want_the_role(election: Election) -> None:
    election.over = True
    assert election.step(Seen(holder=None), 0.0) == []
    assert election.step(Seen(holder=MINE), 0.0) == [Follow(address=HERE)]


def test_a_holder_that_etcd_does_not_answer_stops_until_it_has_a_new_lease(holder: Election) -> None:
    assert holder.step(EtcdSilent(), 1.0) == [StepDown()]
    assert holder.step(CoordinatorEnded(code=-9), 1.1) == [], "it was killed on purpose"
    assert holder.step(Seen(holder=MINE), 2.0) == [Follow(address=HERE)], "it does not serve under its old lease"
    holder.step(LeaseGone(lease=9), 3.0)
    assert holder.step(Seen(holder=None), 4.0) == [Campaign()]


def test_a_holder_that_resigns_leaves_the_role_to_others_for_longer_each_time(holder: Election) -> None:
    assert holder.step(CoordinatorEnded(code=RESIGNED), 1.0) == [StepDown(), Resign(rest=REST_SECONDS)]
    assert holder.step(Seen(holder=MINE), 1.1) == [Follow(address=HERE)], "etcd does not know yet"
    holder.step(LeaseGone(lease=9), 2.0)
    assert holder.step(Seen(holder=None), 2.0) == []
    assert holder.step(Seen(holder=OTHER), 2.1) == [Follow(address=THERE)]
    assert holder.step(Rested(), 13.0) == [Follow(address=THERE)]
    assert holder.step(Seen(holder=None), 14.0) == [Campaign()]
    for lease, rest in ((9, 2 * REST_SECONDS), (10, LONGEST_REST_SECONDS)):
        again = Holder(agent="me", lease=lease, address=HERE, epoch=lease)
        assert holder.step(Seen(holder=again), 15.0)[0] == Serve(epoch=lease)
        assert holder.step(CoordinatorEnded(code=RESIGNED), 20.0) == [StepDown(), Resign(rest=rest)]
        holder.step(LeaseGone(lease=lease + 1), 21.0)
        assert holder.step(Seen(holder=None), 21.0) == []
        assert holder.step(Rested(), 50.0) == [Campaign()], "nobody else has taken it"
