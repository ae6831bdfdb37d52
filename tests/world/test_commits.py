"""Whoever is lost whenever, the weights are those of one worker: each phase, failed votes, joins and leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.commit import cohort as cohort_module
from holdfast.commit import settle as settling
from holdfast.commit.settle import settle
from holdfast.recovery.arrange import Arranger
from tests.engine.pipelines import lay
from tests.world.aimed import History, Strike, aim, one_pipeline, spread_out, votes
from tests.world.history import LAYERS, is_lost, random_layout
from tests.world.world import Process, World

IN_A_STEP = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]


def test_without_failures_a_run_is_one_generation() -> None:
    history = History(layouts=random_layout)
    assert history.judge()
    assert len(history.members) == 1
    assert len(history.finished) == 4


@pytest.mark.parametrize("phase", IN_A_STEP)
def test_one_worker_killed_in_a_step(phase: str) -> None:
    for worker in ("0.0", "0.1", "0.3"):
        for nth in (1, 4):
            history = History((worker, phase, nth), layouts=spread_out)
            assert history.struck or phase == "reduce", f"{worker} is never there so often"
            assert history.judge(), "every layer had two holders"
            assert len(history.finished) >= 3


@pytest.mark.parametrize("phase", ["reduce", "vote", "voted"])
def test_one_worker_killed_while_votes_go_in_rounds(phase: str) -> None:
    """Five workers: the fifth gives its ballot to the first, and gets the sum from it."""
    for worker in ("0.0", "0.2", "0.4"):
        history = History((worker, phase, 3), workers=5, in_rounds=True)
        assert history.judge()
        assert len(history.finished) >= 4


@pytest.mark.parametrize("phase", ["regroup", "enter", "layout", "copy"])
def test_one_more_killed_in_the_recovery(phase: str) -> None:
    """The second loss hits those who are just recovering: it may be that of the last copy."""
    struck = ended = 0
    for worker in ("0.0", "0.1", "0.2"):
        for nth in (1, 2):
            history = History(("0.3", "vote", 3), (worker, phase, nth), layouts=spread_out)
            ended += history.judge()
            struck += history.struck == 2
    assert struck >= 3
    assert ended >= 4


@pytest.mark.parametrize("phase", ["forward", "vote", "voted"])
def test_two_killed_at_once(phase: str) -> None:
    """Two of four replicas; and two stages of which each has another holder or not."""
    for first, second in (("0.0", "0.1"), ("0.1", "0.3"), ("0.0", "0.3")):
        strikes = ((first, phase, 3), (second, phase, 3))
        assert History(*strikes).judge(), "two replicas are left"
        History(*strikes, layouts=spread_out).judge()


# --- votes that succeed for some --------------------------------------------------------------------------


@pytest.mark.parametrize("unlucky", ["0", "12", "023", "0123"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_vote_that_fails_for_some(unlucky: str, nth: int) -> None:
    """Those who have seen it succeed are ahead: the others roll forward, or all do it again."""
    history = History(*votes(unlucky, nth), layouts=random_layout)
    assert history.struck == len(unlucky)
    assert history.judge()
    assert len(history.finished) == 4
    ahead = {member.standing.operation for member in history.world.generations[2].members}
    assert ahead == ({nth - 1, nth} if len(unlucky) < 4 else {nth - 1})


@pytest.mark.parametrize("rash", ["0", "12", "023", "0123"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_vote_that_some_give_up(rash: str, nth: int) -> None:
    history = History(*votes(rash, nth, "rash"), layouts=random_layout, seed=nth)
    assert history.struck == len(rash)
    assert history.judge()
    assert len(history.finished) == 4


FIRST_STEP: list[Strike] = [*votes("0", 1), ("0.2", "voted", 1, "kill 0.1")]  # only 0.2 sees it succeed and lives


def test_who_rolls_forward_does_not_take_its_old_copies_for_new() -> None:
    """At the begin the first worker has all layers; after the first step only those that it has updated are right.

    The others are lost with their only holder: their first values must not come back.
    """
    history = History(*FIRST_STEP, workers=3, layouts=one_pipeline)
    assert not history.judge()
    assert is_lost(history.world)


def test_control_old_copies_taken_for_new_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has voted, and rolls forward, is believed to have updated all that it has, also by itself."""

    def as_if_all_were_updated(standing: Any, account: Any, newest: int) -> Any:
        here = standing.operation == newest or (standing.operation == newest - 1 and standing.voted)
        return account.held if here else ()

    monkeypatch.setattr(settling, "_still_held", as_if_all_were_updated)
    monkeypatch.setattr(Arranger, "holds", lambda arranger, units: True)
    with pytest.raises(AssertionError, match=r"other bits|scripts failed"):
        History(*FIRST_STEP, workers=3, layouts=one_pipeline).judge()


def test_control_a_vote_that_is_not_rolled_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_module, "settle", lambda standings: replace(settle(standings), forward=()))
    with pytest.raises((AssertionError, KeyError)):
        History(*votes("0", 2), layouts=one_pipeline).judge()


def test_control_a_vote_that_is_rolled_forward_though_nobody_has_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker takes its own vote for a commit: it has a step more than the others."""
    real = cohort_module.Cohort._take_sides

    def take_sides(cohort: Any, generation: Any, settlement: Any) -> None:
        if cohort._voted is not None and not settlement.forward and cohort.membership.worker == "0.1":
            cohort._voted.apply(0.0)
            cohort._voted = None
        real(cohort, generation, settlement)

    monkeypatch.setattr(cohort_module.Cohort, "_take_sides", take_sides)
    with pytest.raises(AssertionError):
        assert History(*votes("0123", 2)).judge(), "the workers themselves notice that they differ"


def test_old_copies_do_not_come_back_if_the_next_generation_breaks_too() -> None:
    """The first worker rolls forward, and before it has done anything else another is lost.

    Then it gets the layers of which it still has the first values.
    """

    def places(size: int, seed: str) -> Any:
        return lay(([0, 1], [2, 2]), size=size) if size == 4 else lay(([1, 0], [2, 2]), size=size)

    history = History(*votes("0", 1), ("0.3", "layout", 2), layouts=places)
    assert [len(members) for members in history.members][:3] == [4, 4, 3]
    assert history.judge()


@pytest.mark.parametrize("layouts", [one_pipeline, spread_out])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_the_last_votes_may_fail_too(layouts: Any, back: int) -> None:
    """Those who have seen the very last succeed are gone: the others vote again, or are sent home."""
    undisturbed = Counting(workers=2, layouts=layouts)
    last = undisturbed.votes["0.0"] - back
    history = History(*votes("0", last), workers=2, layouts=layouts)
    assert history.struck == 1
    assert history.judge()


class Counting(History):
    """An undisturbed history that counts how often each worker votes."""

    def __init__(self, **settings: Any) -> None:
        self.votes: dict[str, int] = {}

        def fate(world: World, process: Process, phase: str) -> None:
            if phase == "vote":
                self.votes[process.name] = self.votes.get(process.name, 0) + 1

        super().__init__(fate=fate, **settings)


def test_an_agent_whose_last_worker_is_lost_at_the_very_end_ends_too() -> None:
    """It has planned a replacement that nobody needs any more."""
    last = Counting(workers=[1, 1]).votes["0.0"]
    history = History(("1.0", "voted", last, "kill 0.0"), workers=[1, 1])
    assert history.struck == 1
    assert history.judge()
    assert [agent.code for agent in history.world.agents] == [0, 0]


# --- workers join and leave -------------------------------------------------------------------------------


def test_workers_join_and_leave() -> None:
    """The first machine's workers leave when those of another have come; nothing is lost, nobody starts again."""
    strikes = aim(("0.0", "forward", 1, "join"))

    def fate(world: World, process: Process, phase: str) -> None:
        strikes(world, process, phase)
        if phase == "data" and process.run is not None and process.run.step == 3:
            world.agents[0].leave()

    def places(size: int, seed: str) -> Any:
        """A pipeline of the first two; whoever joins holds all layers, so that the others can go."""
        whole = [([worker], [4]) for worker in range(0 if size == 1 else 2, size)]
        return lay(*([([0, 1], [2, 2])] if size > 1 else []), *whole, size=size)

    history = History(workers=2, fate=fate, layouts=places)
    assert history.judge()
    assert history.of("joins")
    assert not history.of("failure")
    assert history.finished
    assert all(worker.startswith("1.") for worker in history.finished)


def test_a_joiner_whose_first_generation_breaks_has_no_state_yet() -> None:
    """It has a model of its own, with first values, and knows where the run is: nothing of that is the run's state."""

    def places(size: int, seed: str) -> Any:
        if size == 2 and "1.0" in seed:
            return lay(([0, 1], [2, 2]))
        return lay(*[([rank], [LAYERS]) for rank in range(size)])

    history = History(("0.0", "forward", 2, "join one"), ("0.1", "layout", 2), workers=2, layouts=places)
    assert history.members[1:3] == [["0.0", "0.1", "1.0"], ["0.0", "1.0"]]
    assert history.judge()


@pytest.mark.parametrize("phase", ["forward", "vote", "voted", "update"])
def test_one_is_killed_while_others_join_and_leave(phase: str) -> None:
    for nth in (1, 2):
        strikes: list[Strike] = [("0.0", "forward", 1, "join"), ("1.0", "vote", 1, "leave"), ("0.1", phase, nth)]
        history = History(*strikes, workers=3, seed=nth)
        assert history.struck == 3
        assert history.judge()


@pytest.mark.parametrize("seed", range(3))
def test_the_only_workers_leave_when_another_comes(tmp_path: Path, seed: int) -> None:
    """They have voted that all leave, and stay to hand the state over: the newcomer knows nothing of that vote."""

    def fate(world: World, process: Process, phase: str) -> None:
        if phase == "vote" and process.run is not None and process.run.step == 1 and not world.of("joins"):
            world.join(1)
        if phase == "regroup" and process.name == "1.0":
            world.agents[0].leave()

    history = History(workers=1, fate=fate, seed=seed, checkpoint=tmp_path, every=2)
    assert history.judge()
