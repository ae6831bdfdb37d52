"""Kills in every phase, of every worker: the weights must be those of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.judge import covered, kill_at_once
from tests.harness import (
    Result,
    assert_each_sample_once_per_epoch,
    assert_every_worker_commits_each_step_once,
    launch,
)

STEPS = 10
PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]
WORKERS = ["0.0", "0.1", "0.2"]


def assert_nothing_lost(result: Result, undisturbed: Result) -> None:
    assert result.code == 0
    assert result.sha256 == undisturbed.sha256
    assert result.losses == undisturbed.losses
    assert_every_worker_commits_each_step_once(result)
    assert_each_sample_once_per_epoch(result, size=70, steps_per_epoch=5)


@pytest.mark.parametrize("workers", [4, *(covered("four are more than one, too", number) for number in (1, 2, 3))])
def test_the_number_of_workers_does_not_matter(tmp_path: Path, undisturbed, workers: int) -> None:
    result = launch(tmp_path, workers=workers, environment={"STEPS": str(STEPS)})
    assert_nothing_lost(result, undisturbed(STEPS))


@pytest.mark.parametrize(
    ("phase", "worker"),
    [
        (phase, worker) if number % 3 == place else covered("another worker is killed in this phase", phase, worker)
        for number, phase in enumerate(PHASES)
        for place, worker in enumerate(WORKERS)
    ],
)
def test_kill(tmp_path: Path, undisturbed, phase: str, worker: str) -> None:
    faults = f"kill worker={worker} step=4 phase={phase}"
    result = launch(tmp_path, faults=faults, environment={"STEPS": str(STEPS)})
    assert_nothing_lost(result, undisturbed(STEPS))
    assert [e["worker"] for e in result.of("failure")] == [worker]
    survivors = {w for w in WORKERS if w != worker}
    assert survivors <= {r["worker"] for r in result.results}, "survivors never restart"
    assert len(result.of("recovery")) == 1


OTHER_ORDER = "the other one is killed in this phase"


@pytest.mark.parametrize(
    ("phase", "second"),
    [
        ("regroup", "0.0"),
        ("vote", "0.2"),
        covered(OTHER_ORDER, "regroup", "0.2"),
        covered(OTHER_ORDER, "vote", "0.0"),
    ],
)
def test_a_second_kill_during_recovery(tmp_path: Path, undisturbed, phase: str, second: str) -> None:
    faults = f"kill worker=0.1 step=4 phase=backward; kill worker={second} step=4 phase={phase}"
    result = launch(tmp_path, faults=faults, environment={"STEPS": str(STEPS)})
    assert_nothing_lost(result, undisturbed(STEPS))
    assert {e["worker"] for e in result.of("failure")} == {"0.1", second}


def test_two_at_once_and_all_but_one(tmp_path: Path, undisturbed) -> None:
    faults = kill_at_once(["0.0", "0.1", "0.3"], step=5)
    result = launch(tmp_path, workers=4, faults=faults, environment={"STEPS": str(STEPS)})
    assert_nothing_lost(result, undisturbed(STEPS))


@pytest.mark.parametrize(
    ("phase", "worker"),
    [
        ("reduce", "0.1"),
        *(covered("one hangs in reduce", phase, worker) for phase in ("forward", "vote") for worker in WORKERS),
        *(covered("another hangs in reduce", "reduce", worker) for worker in ("0.0", "0.2")),
    ],
)
def test_hang(tmp_path: Path, undisturbed, phase: str, worker: str) -> None:
    faults = f"stop worker={worker} step=4 phase={phase}"
    result = launch(tmp_path, faults=faults, environment={"STEPS": str(STEPS)}, heartbeat_timeout=1.5)
    assert_nothing_lost(result, undisturbed(STEPS))
    assert "heartbeat" in result.of("failure")[0]["cause"]


PATIENT = {"STEPS": "60", "WANTED": "3", "PATIENT": "4"}


def test_a_replacement_joins_by_itself(tmp_path: Path, undisturbed) -> None:
    result = launch(tmp_path, faults="kill worker=0.1 step=3 phase=forward", environment=PATIENT)
    assert_nothing_lost(result, undisturbed(60))
    assert {r["worker"] for r in result.results} == {"0.0", "0.2", "0.3"}


@pytest.mark.parametrize("victim", ["0.3", *(covered("the joiner dies there", worker) for worker in ("0.0", "0.2"))])
def test_kill_while_the_state_is_copied_to_a_replacement(tmp_path: Path, undisturbed, victim: str) -> None:
    """0.0 sends the initial state too, so it dies there; 0.2 and the joiner 0.3 die in the later copy."""
    faults = f"kill worker=0.1 step=3 phase=forward; kill worker={victim} phase=copy"
    result = launch(tmp_path, faults=faults, environment=PATIENT)
    assert_nothing_lost(result, undisturbed(60))
    assert {e["worker"] for e in result.of("failure")} >= {victim}


def test_a_spare_takes_the_place_of_a_lost_worker(tmp_path: Path, undisturbed) -> None:
    result = launch(tmp_path, spares=1, faults="kill worker=0.1 step=3 phase=forward", environment=PATIENT)
    assert_nothing_lost(result, undisturbed(60))
    joined = [e["workers"] for e in result.of("generation")]
    assert joined[:3] == [["0.0", "0.1", "0.2"], ["0.0", "0.2"], ["0.0", "0.2", "0.3"]]


def test_fast_numerics_survives_too(tmp_path: Path) -> None:
    faults = "kill worker=0.1 step=3 phase=forward; kill worker=0.0 step=9 phase=vote"
    result = launch(tmp_path, faults=faults, environment={**PATIENT, "NUMERICS": "fast"})
    assert result.code == 0
    assert result.sha256, "all workers agree"
    assert_every_worker_commits_each_step_once(result)
    assert_each_sample_once_per_epoch(result, size=70, steps_per_epoch=5)
