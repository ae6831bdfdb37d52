"""Kills, hangs, joins and leaves in every policy: only a lost replica's own steps since the last average are lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from holdfast.cluster.agent import Agent
from tests.faults.judge import covered, sweep
from tests.faults.sync_judge import (
    POLICIES,
    STEPS,
    Rules,
    Trial,
    assert_good_end,
    assert_nothing_lost,
    assert_nothing_lost_by_a_server,
    assert_went_on,
    times_apart,
    train,
)
from tests.harness import Meddler, count_events, until

# At a step of training, or (None) when the phase first comes: with the first synchronisation.
STEP_PHASES = ["data", "forward", "backward", "update"]
SYNC_PHASES = ["average", "averaged", "vote", "voted"]
BALLOTS = ["delta", "target", "variance", "gradients"]


ALL = [
    (policy, phase, worker)
    for policy in POLICIES
    for phase in [*STEP_PHASES, *SYNC_PHASES, *(["ballot"] if policy in BALLOTS else [])]
    for worker in ("0.0", "0.1", "0.2")
]
# Each policy and each phase once, each victim several times.
SOME = [
    ("delta", "ballot", "0.0"), ("target", "forward", "0.1"), ("variance", "average", "0.2"),
    ("local", "backward", "0.0"), ("overlap", "averaged", "0.1"), ("fedavg", "vote", "0.2"),
    ("diloco", "voted", "0.0"), ("gradients", "update", "0.1"), ("ssp", "data", "0.2"),
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, "strike", ALL, SOME)
    sweep(metafunc, "changed", list(POLICIES), ["overlap"])
    sweep(metafunc, "policy", list(POLICIES), ["target"])
    sweep(metafunc, "deadlocked", list(POLICIES), ["local", "ssp"])


def assert_survived(trial: Trial, policy: str, lost: set[str], *, workers: int = 3, steps: int = STEPS) -> None:
    assert_good_end(trial, steps=steps)
    assert_went_on(trial, lost, workers=workers)
    if policy == "ssp":
        assert_nothing_lost_by_a_server(trial)
    else:
        assert_nothing_lost(trial.lives, Rules.of(policy), steps=steps)
        assert times_apart(trial.lives, steps=steps) > 1, "nothing was tried"


def test_kill(tmp_path: Path, strike: tuple[str, str, str]) -> None:
    policy, phase, victim = strike
    step = " step=4" if phase in STEP_PHASES else ""
    trial = train(tmp_path, policy, faults=f"kill worker={victim}{step} phase={phase}", EVALUATE=7)
    assert_survived(trial, policy, {victim})


def test_a_second_kill_during_recovery(tmp_path: Path, policy: str) -> None:
    regroups = [f"kill worker=0.0 step={step} phase=regroup" for step in range(2, 8)]  # wherever it is by then
    faults = "; ".join(["kill worker=0.1 step=4 phase=backward", *regroups])
    trial = train(tmp_path, policy, faults=faults, workers=4)
    assert_survived(trial, policy, {"0.0", "0.1"}, workers=4)


@pytest.mark.thorough("there is a second kill during recovery in another test")
def test_a_second_kill_in_the_average_of_the_survivors(tmp_path: Path, policy: str) -> None:
    faults = "kill worker=0.1 step=1 phase=forward; kill worker=0.2 phase=averaged"
    trial = train(tmp_path, policy, faults=faults, workers=3)
    assert_survived(trial, policy, {"0.1", "0.2"})


@pytest.mark.thorough("more than one is lost in another test")
def test_all_but_one(tmp_path: Path, policy: str) -> None:
    faults = "; ".join(f"kill worker=0.{n} step=5 phase=update" for n in (0, 1, 3))
    trial = train(tmp_path, policy, faults=faults, workers=4)
    assert_survived(trial, policy, {"0.0", "0.1", "0.3"}, workers=4)


def test_replicas_far_apart_meet_at_the_furthest(tmp_path: Path) -> None:
    """Nobody waits for anybody between averages: a slow one is many steps behind when a third is lost."""
    faults = "kill worker=0.2 step=9 phase=forward"
    trial = train(tmp_path, "LocalSGD(every=50)", faults=faults, steps=20, SLOW="0.0:0.1")
    assert_survived(trial, "local", {"0.2"}, steps=20)


@pytest.mark.parametrize("phase", ["averaged", covered("one hangs in an average", "forward")])
def test_hang(tmp_path: Path, policy: str, phase: str) -> None:
    step = " step=4" if phase == "forward" else ""
    trial = train(tmp_path, policy, faults=f"stop worker=0.1{step} phase={phase}", heartbeat_timeout=1.0)
    assert_survived(trial, policy, {"0.1"})


def test_a_deadlock(tmp_path: Path, deadlocked: str) -> None:
    """Its heartbeats come, and for a while the others train on without it."""
    faults = "lock worker=0.1 step=4 phase=forward"
    trial = train(tmp_path, deadlocked, faults=faults, step_timeout="2.5:30")
    assert_survived(trial, deadlocked, {"0.1"})
    (event,) = trial.result.of("stuck")
    assert (event["worker"], event["limit"]) == ("0.1", 2.5)


# --- joins and leaves ------------------------------------------------------------------------------------

PATIENT = {"WANTED": 3, "PATIENT": 4}


def test_a_replacement_starts_from_the_average(tmp_path: Path, changed: str) -> None:
    trial = train(tmp_path, changed, steps=60, faults="kill worker=0.1 step=3 phase=forward", **PATIENT)
    assert_survived(trial, changed, {"0.1"}, steps=60)
    assert {line["worker"] for line in trial.result.results} == {"0.0", "0.2", "0.3"}
    assert min(e["number"] for e in trial.of("step")["0.3"]) > 3


@pytest.mark.thorough("replacements and outer steps are in other tests")
def test_a_replacement_takes_the_same_outer_steps(tmp_path: Path) -> None:
    """It may come in right after an overlapped one, of which it knows nothing."""
    faults = "kill worker=0.1 step=3 phase=forward"
    trial = train(tmp_path, "DiLoCo(every=1, overlap=1)", model="waves", steps=60, faults=faults, **PATIENT)
    assert_good_end(trial, steps=60, finish=["0.0", "0.2", "0.3"])


def test_a_joiner_waits_for_no_long_period(tmp_path: Path) -> None:
    """The next average would be after a thousand steps of 20 ms: joiners are let in before."""
    faults = "kill worker=0.1 step=3 phase=forward"
    trial = train(tmp_path, "LocalSGD(every=1000)", steps=110, faults=faults, **PATIENT)
    assert_survived(trial, "local", {"0.1"}, steps=110)
    assert min(trial.lives["0.3"].before) < 100
    assert len(trial.result.of("generation")) <= 5, "all stop at the same place"


@pytest.mark.parametrize("victim", ["0.3", covered("the other one is killed", "0.2")])
def test_kill_while_the_state_is_copied_to_a_replacement(tmp_path: Path, victim: str) -> None:
    faults = f"kill worker=0.1 step=3 phase=forward; kill worker={victim} phase=copy"
    trial = train(tmp_path, "local", steps=60, faults=faults, **PATIENT)
    assert_good_end(trial, steps=60, finish=["0.0"])
    assert_nothing_lost(trial.lives, Rules(), steps=60)


@pytest.mark.parametrize(
    "period",
    ["LocalSGD(every=3)", covered("local SGD does the same", "DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)")],
)
def test_a_joiner_whose_first_generation_breaks(tmp_path: Path, period: str) -> None:
    """It has the state, so it is no newcomer in the next one; and must know all the same where its policy is."""
    faults = "kill worker=0.1 step=3 phase=forward"
    trial = train(tmp_path, period, steps=60, faults=faults, SABOTAGE="interrupted 0.3", **PATIENT)
    assert_survived(trial, "local", {"0.1"}, steps=60)
    assert "0.3" in {line["worker"] for line in trial.result.results}


def leaving(worker: str, at: int) -> Meddler:
    async def meddle(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "commit", step=at, worker=worker))
        agent.workers[worker].tell({"type": "leave"})
        await asyncio.sleep(0)

    return meddle


def test_a_leaver_leaves_its_steps_behind(tmp_path: Path, changed: str) -> None:
    """It goes right after an average: whatever it has done since the last one is in it."""
    trial = train(tmp_path, changed, steps=40, meddle=leaving("0.1", 4), WANTED=2)
    assert_good_end(trial, steps=40)
    assert not trial.result.of("failure")
    assert {line["worker"] for line in trial.result.results} == {"0.0", "0.2"}
    if changed == "ssp":
        assert sum(trial.result.results[0]["count"]) == pytest.approx(40)
        return
    lives = trial.lives
    assert_nothing_lost(lives, Rules.of(changed), steps=40)
    last = max(lives["0.1"].after)
    assert last < 40
    mean = sum(lives[worker].after[last] for worker in ("0.0", "0.1", "0.2")) / 3
    assert abs(lives["0.0"].before[last] - mean).max() < 1e-9, "the leaver's steps are in the average"


@pytest.mark.thorough("there is one joiner in another test")
def test_one_joiner_after_the_other(tmp_path: Path) -> None:
    faults = "kill worker=0.1 step=3 phase=forward; kill worker=0.2 step=9 phase=forward"
    trial = train(tmp_path, "LocalSGD(every=1000)", steps=110, faults=faults, **PATIENT)
    assert_good_end(trial, steps=110, finish=["0.0", "0.3", "0.4"])
    assert_nothing_lost(trial.lives, Rules(), steps=110)


def test_everybody_is_asked_to_leave_and_comes_back(tmp_path: Path) -> None:
    """They meet, save and go; what each has done by itself is in what they saved."""
    saved = {"CHECKPOINT": tmp_path / "saved", "EVERY": 1000}

    async def meddle(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "commit", step=4, worker="0.1"))
        os.kill(os.getpid(), signal.SIGTERM)

    first = train(tmp_path / "a", "LocalSGD(every=1000)", steps=60, meddle=meddle, WANTED=99, **saved)
    assert first.result.code == 128 + signal.SIGTERM
    assert not first.result.of("failure")
    last = {max(life.after) for life in first.lives.values()}
    assert len(last) == 1, f"all left at the same step: {last}"
    second = train(tmp_path / "b", "LocalSGD(every=1000)", steps=60, **saved)
    assert_good_end(second, steps=60)
    begin = {min(life.before) for life in second.lives.values()}
    assert begin == last
    mean = sum(life.after[min(last)] for life in first.lives.values()) / 3
    assert abs(second.lives["0.0"].before[min(last)] - mean).max() < 1e-9


@pytest.mark.thorough("a joiner does not wait, either")
def test_a_leaver_waits_for_no_long_period(tmp_path: Path) -> None:
    trial = train(tmp_path, "LocalSGD(every=1000)", steps=60, meddle=leaving("0.1", 4), WANTED=2)
    assert_good_end(trial, steps=60)
    assert {line["worker"] for line in trial.result.results} == {"0.0", "0.2"}
    assert max(trial.lives["0.1"].after) < 50


# --- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase", ["write", *(covered("one is killed as it writes", phase) for phase in ("snapshot", "commit"))]
)
def test_kill_while_saving(tmp_path: Path, policy: str, phase: str) -> None:
    saved = {"CHECKPOINT": tmp_path / "saved", "EVERY": 4}
    trial = train(tmp_path, policy, faults=f"kill worker=0.0 phase={phase}", **saved)
    assert_survived(trial, policy, {"0.0"})


def test_everybody_killed_in_the_average(tmp_path: Path, policy: str) -> None:
    faults = "; ".join(f"kill worker=0.{n} step=8 phase=averaged" for n in range(2))
    saved = {"CHECKPOINT": tmp_path / "saved", "EVERY": 2}
    trial = train(tmp_path, policy, workers=2, faults=faults, **saved)
    assert_good_end(trial)


# --- controls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flaw", ["greedy", *(covered("test_sync_judge.py has it", flaw) for flaw in ("deaf 0.1", "forgetful 0.1"))]
)
def test_averages_done_wrong_are_noticed(tmp_path: Path, flaw: str) -> None:
    trial = train(tmp_path, "local", SABOTAGE=flaw, steps=6)
    with pytest.raises(AssertionError):
        assert_survived(trial, "local", set(), steps=6)
