"""Lightning's ``Trainer`` on real workers: the bits of the same program as a ``Loop``, with kills, joins, a resume.

What its hooks are shown, its callbacks decide and its checkpoints have is compared as well.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.faults.judge import covered
from tests.harness import Result
from tests.integrations import judge
from tests.integrations.judge import lost, reported
from tests.s3_server import needs_seaweed, stored

if find_spec("lightning") is None:  # importing it would take seconds, and only the workers have to
    pytest.skip("this test needs lightning", allow_module_level=True)
SCRIPT = Path(__file__).with_name("lightning_train.py")
PRELOAD = ("lightning.pytorch", "torch.utils.tensorboard")
STEPS = 12


def train(folder: Path, **settings: Any) -> Result:
    return judge.train(folder, SCRIPT, preload=PRELOAD, **settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker reports, undisturbed."""
    return reported(train(tmp_path_factory.mktemp("alone"), workers=1))


def test_it_has_the_bits_of_a_loop(tmp_path: Path, alone: dict[str, Any]) -> None:
    loop = reported(train(tmp_path, workers=1, FORM="loop"))
    assert (loop["weights"], loop["step"]) == (alone["weights"], STEPS)


def test_what_the_page_shows(tmp_path: Path) -> None:
    """The code of docs/lightning.md."""
    assert reported(train(tmp_path, workers=2, FORM="documented"))["step"] == 3 * 2  # epochs of two steps


def test_kills_and_joins(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Two are left, then one and who has joined."""
    kills = ["0.0 step=2 phase=backward", "0.1 step=3 phase=voted", "0.2 step=10 phase=data"]
    faults = "; ".join(f"kill worker={each}" for each in kills)
    result = train(tmp_path, workers=3, faults=faults, WANTED=2, PATIENT=8)
    assert lost(result) == {"0.0", "0.1", "0.2"}
    assert reported(result) == alone
    rows = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    assert len([row for row in rows if '"loss_step"' in row]) == STEPS


@pytest.mark.parametrize("step", [covered("after step 8", step) for step in range(2, STEPS)])
def test_a_worker_joins_after_any_step(tmp_path: Path, alone: dict[str, Any], step: int) -> None:
    faults = "kill worker=0.1 step=1 phase=vote"
    assert reported(train(tmp_path, workers=2, faults=faults, WANTED=2, PATIENT=step)) == alone


@pytest.mark.thorough("two workers, and Accelerate's test of the same")
def test_more_workers_than_micro_batches(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Those that have none in a step are told what was logged in it."""
    result = train(tmp_path, workers=9, faults="kill worker=0.1 step=3 phase=vote")
    assert lost(result) == {"0.1"}
    assert reported(result) == alone


def test_a_resume_in_the_middle_of_an_epoch(tmp_path: Path, alone: dict[str, Any]) -> None:
    """All workers are killed. Lightning's own files and logs go on in their folders."""
    kills = ["0.0 step=7 phase=data", "0.1 step=7 phase=data"]
    kills += ["0.1 step=6 phase=regroup", "0.1 step=7 phase=regroup"]  # slow: before somebody could join it
    faults = "; ".join(f"kill worker={each}" for each in kills)
    result = train(tmp_path, workers=2, faults=faults, CHECKPOINT="kept", WANTED=2, PATIENT=5, DURABLE=6)
    assert 6 in {event["step"] for event in result.of("resumed")}
    assert reported(result) == alone
    assert [path.name for path in (tmp_path / "files" / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.thorough("a resume in the middle of an epoch, and a rerun after the end")
def test_more_steps_on_more_workers(tmp_path: Path, alone: dict[str, Any]) -> None:
    """A run that has come to its end after an epoch is started again, for more."""
    train(tmp_path, workers=1, STEPS=4, CHECKPOINT="kept")
    (tmp_path / "results.jsonl").unlink()
    second = train(tmp_path, workers=2, faults="kill worker=0.0 step=7 phase=vote", CHECKPOINT="kept")
    assert {event["step"] for event in second.of("resumed")} == {4}
    assert reported(second) == alone


def test_early_stopping_on_all_workers_and_in_a_rerun(tmp_path: Path) -> None:
    """A callback decides; a worker that joins when it is over, and a rerun, train no more."""
    faults = "kill worker=0.1 step=1 phase=backward"
    first = train(tmp_path, workers=2, faults=faults, PATIENCE=2, CHECKPOINT="kept")
    stopped = reported(first)
    assert stopped["steps"] < STEPS
    (tmp_path / "results.jsonl").unlink()
    again = reported(train(tmp_path, workers=1, PATIENCE=2, CHECKPOINT="kept"))
    assert again == stopped


@needs_seaweed
def test_a_resume_from_a_store(tmp_path: Path, alone: dict[str, Any]) -> None:
    with stored(tmp_path) as around:
        train(tmp_path, workers=1, STEPS=4, **around)
        (tmp_path / "results.jsonl").unlink()
        second = train(tmp_path, workers=2, faults="kill worker=0.0 step=7 phase=vote", **around)
    assert {event["step"] for event in second.of("resumed")} == {4}
    assert reported(second) == alone


def test_control_a_gradient_that_is_missing_is_seen(tmp_path: Path, alone: dict[str, Any]) -> None:
    result = train(tmp_path, workers=2, faults="skip-gradient worker=0.1 step=2")
    assert reported(result)["weights"] != alone["weights"]


def test_what_cannot_be_honoured_is_refused_by_name_and_bad_use_is_a_sentence(tmp_path: Path) -> None:
    said = reported(train(tmp_path, workers=1, FORM="refusals"))
    words = {
        "ByHand": "automatic_optimization",
        "Clips": "on_before_optimizer_step",
        "ReturnsNothing": "no loss",
        "LogsTexts": "self.log",
        "Gathers": "all_gather",
        "Backward": "beside that of the step",
        "StepsByHand": "stepped by hand",
        "Skips": "was not computed",
    }
    assert len(said) > len(words)
    for name, text in said.items():
        assert words.get(name, name) in text
