"""Lightning's ``Trainer`` on real workers: the bits of the same program as a ``Loop``, with kills, joins, a resume.

What its hooks are shown, its callbacks decide and its checkpoints have is compared as well.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from holdfast.journal.rows import Row
from tests.faults.judge import covered
from tests.integrations.judge import STEPS, Program, TrainedAlike, lost, reported

if find_spec("lightning") is None:  # importing it would take seconds, and only the workers have to
    pytest.skip("this test needs lightning", allow_module_level=True)
PROGRAM = Program(
    script=Path(__file__).with_name("lightning_train.py"), preload=("lightning.pytorch", "torch.utils.tensorboard")
)


class TestTrainer(TrainedAlike):
    """The form ``documented`` of the program is the code of docs/lightning.md."""

    program = PROGRAM

    def check_journal(self, found: list[Row]) -> None:
        steps = [row for row in found if "loss_step" in row]
        assert len(steps) == STEPS
        assert {(row["tokens"], row["lightning/tokens"]) for row in steps} == {(16, 2), (8, 2)}, (
            "the run's, and the module's"
        )


@pytest.mark.parametrize("step", [covered("after step 8", step) for step in range(2, STEPS)])
def test_a_worker_joins_after_any_step(tmp_path: Path, alone: dict[str, Any], step: int) -> None:
    faults = "kill worker=0.1 step=1 phase=vote"
    assert reported(PROGRAM.train(tmp_path, workers=2, faults=faults, WANTED=2, PATIENT=step)) == alone


@pytest.mark.thorough("two workers, and Accelerate's test of the same")
def test_more_workers_than_micro_batches(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Those that have none in a step are told what was logged in it."""
    result = PROGRAM.train(tmp_path, workers=9, faults="kill worker=0.1 step=3 phase=vote")
    assert lost(result) == {"0.1"}
    assert reported(result) == alone


def test_a_resume_in_the_middle_of_an_epoch(tmp_path: Path, alone: dict[str, Any]) -> None:
    """All workers are killed. Lightning's own files and logs go on in their folders."""
    kills = ["0.0 step=7 phase=data", "0.1 step=7 phase=data"]
    kills += ["0.1 step=6 phase=regroup", "0.1 step=7 phase=regroup"]  # slow: before somebody could join it
    faults = "; ".join(f"kill worker={each}" for each in kills)
    result = PROGRAM.train(tmp_path, workers=2, faults=faults, CHECKPOINT="kept", WANTED=2, PATIENT=5, DURABLE=6)
    assert 6 in {event["step"] for event in result.of("resumed")}
    assert reported(result) == alone
    assert [path.name for path in (tmp_path / "files" / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.thorough("a resume in the middle of an epoch, and a rerun after the end")
def test_more_steps_on_more_workers(tmp_path: Path, alone: dict[str, Any]) -> None:
    """A run that has come to its end after an epoch is started again, for more."""
    PROGRAM.train(tmp_path, workers=1, STEPS=4, CHECKPOINT="kept")
    (tmp_path / "results.jsonl").unlink()
    second = PROGRAM.train(tmp_path, workers=2, faults="kill worker=0.0 step=7 phase=vote", CHECKPOINT="kept")
    assert {event["step"] for event in second.of("resumed")} == {4}
    assert reported(second) == alone


def test_early_stopping_on_all_workers_and_in_a_rerun(tmp_path: Path) -> None:
    """A callback decides; a worker that joins when it is over, and a rerun, train no more."""
    faults = "kill worker=0.1 step=1 phase=backward"
    first = PROGRAM.train(tmp_path, workers=2, faults=faults, PATIENCE=2, CHECKPOINT="kept")
    stopped = reported(first)
    assert stopped["steps"] < STEPS
    (tmp_path / "results.jsonl").unlink()
    again = reported(PROGRAM.train(tmp_path, workers=1, PATIENCE=2, CHECKPOINT="kept"))
    assert again == stopped


def test_what_cannot_be_honoured_is_refused_by_name_and_bad_use_is_a_sentence(tmp_path: Path) -> None:
    said = reported(PROGRAM.train(tmp_path, workers=1, FORM="refusals"))
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
