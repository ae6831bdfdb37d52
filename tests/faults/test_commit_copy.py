"""The copy to go back to: kills cost up to a block of steps, and the weights come out the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Result, assert_each_sample_once_per_epoch, assert_every_worker_commits_each_step_once, launch

STEPS, EVERY = 10, 4


def copied(folder: Path, *, steps: int = STEPS, every: int = EVERY, faults: str = "", **more: Any) -> Result:
    settings = {name: more.pop(name) for name in list(more) if name.isupper()}
    environment = {"STEPS": str(steps), "UPDATE": "commit-copy", "EVERY": str(every), "STAGES": "1", **settings}
    return launch(folder, faults=faults, environment=environment, **more)


def assert_same(result: Result, undisturbed: Result) -> None:
    assert result.code == 0, result.said
    assert result.sha256 == undisturbed.sha256
    assert result.losses == undisturbed.losses
    assert_every_worker_commits_each_step_once(result)
    assert_each_sample_once_per_epoch(result, size=70, steps_per_epoch=5)


def done_again(result: Result) -> int:
    """Steps that the survivors of the first generation had done, and had to do again."""
    done: dict[int, set[int]] = {}
    for event in result.of("vote"):
        done.setdefault(event["generation"], set()).add(event["step"])
    return sum(len(done[before] & done[after]) for before, after in itertools.pairwise(sorted(done)))


@pytest.mark.parametrize("workers", [1, 3])
def test_undisturbed(tmp_path: Path, undisturbed: Any, workers: int) -> None:
    result = copied(tmp_path, workers=workers)
    assert_same(result, undisturbed(STEPS))
    assert done_again(result) == 0


@pytest.mark.parametrize(
    ("step", "phase", "worker", "lost"),
    [
        (4, "forward", "0.0", 0),  # the first of its block: only that one is done again, if anybody had come so far
        (6, "backward", "0.1", 2),
        (6, "update", "0.2", 3),
        (7, "vote", "0.1", 4),
        (7, "reduce", "0.0", 3),
    ],
)
def test_kill(tmp_path: Path, undisturbed: Any, step: int, phase: str, worker: str, lost: int) -> None:
    result = copied(tmp_path, faults=f"kill worker={worker} step={step} phase={phase}")
    assert_same(result, undisturbed(STEPS))
    assert lost <= done_again(result) <= EVERY


def test_the_vote_at_the_end_of_a_block_fails_for_some(tmp_path: Path, undisturbed: Any) -> None:
    """Whoever sees it succeed is ahead, and the others take their state for good."""
    result = copied(tmp_path, MEDDLE=f"deaf 0.0 {EVERY + 1}; die 0.1 {EVERY + 1}")  # the others tell losses
    assert_same(result, undisturbed(STEPS))
    forward = [e for e in result.of("entered") if "roll forward" in e["reason"]]
    assert {e["worker"] for e in forward} == {"0.0", "0.2"}
    assert done_again(result) == 0


def test_a_second_kill_while_they_go_back(tmp_path: Path, undisturbed: Any) -> None:
    faults = "kill worker=0.1 step=6 phase=backward; kill worker=0.0 step=5 phase=regroup"
    result = copied(tmp_path, faults=f"{faults}; kill worker=0.0 step=6 phase=regroup")
    assert_same(result, undisturbed(STEPS))


def test_a_replacement_joins_between_blocks(tmp_path: Path, undisturbed: Any) -> None:
    result = copied(
        tmp_path, steps=60, faults="kill worker=0.1 step=6 phase=forward", WANTED="3", PATIENT="4", FIRST_LOOP="0"
    )
    assert_same(result, undisturbed(60))
    assert {line["worker"] for line in result.results} == {"0.0", "0.2", "0.3"}


def test_with_checkpoints_all_may_be_lost(tmp_path: Path, undisturbed: Any) -> None:
    faults = "; ".join(f"kill worker=0.{number} step=9 phase=forward" for number in range(3))
    result = copied(tmp_path, faults=faults, CHECKPOINT=str(tmp_path / "saved"))
    assert result.code == 0, result.said
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.of("resumed")


def test_a_gradient_left_out_shows(tmp_path: Path, undisturbed: Any) -> None:
    """The control: in a step that was done again."""
    faults = "kill worker=0.1 step=6 phase=backward; skip-gradient worker=0.0 step=7; skip-gradient worker=0.2 step=7"
    result = copied(tmp_path, faults=faults)
    assert result.code == 0
    assert result.sha256 != undisturbed(STEPS).sha256
