"""Runs with frozen weights, killed while they save: the base is shared by checkpoints, and never lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint import index, series
from holdfast.checkpoint.verify import open_to_verify, verify
from tests.checkpoint.adapters import shared, written
from tests.faults.judge import covered
from tests.harness import Result, launch

SCRIPT = Path(__file__).with_name("frozen_train.py")


def train(folder: Path, name: str, *, steps: int, saved: str = "saved", durable: int = 0, **settings: object) -> Result:
    (folder / name).mkdir()
    environment = {"CHECKPOINT": str(folder / saved), "STEPS": str(steps), "DURABLE": str(durable)}
    result = launch(folder / name, script=SCRIPT, environment=environment, **settings)  # type: ignore[arg-type]
    assert result.code == 0, result.said
    return result


@pytest.mark.parametrize(
    ("worker", "phase", "step"),
    [
        ("0.1", "write", 2),  # the base is being written
        covered("kills at every call, in tests/checkpoint/test_frozen_crash.py", "0.0", "commit", 4),
        covered("kills at every call, in tests/checkpoint/test_frozen_crash.py", "0.0", "write", 2),
        covered("kills at every call, in tests/checkpoint/test_frozen_crash.py", "0.0", "commit", 2),
        covered("kills at every call, in tests/checkpoint/test_frozen_crash.py", "0.1", "snapshot", 4),
    ],
)
def test_a_kill_while_saving_and_a_resume_on_more_workers(tmp_path: Path, worker: str, phase: str, step: int) -> None:
    whole = train(tmp_path, "whole", steps=9, saved="other", workers=1)
    kill = f"kill worker={worker} step={step} phase={phase}"
    train(tmp_path, "before", steps=5, workers=2, faults=kill, durable=2 if step == 4 else 0)
    after = train(tmp_path, "after", steps=9, workers=3)
    assert after.of("resumed"), "it began anew"
    assert after.sha256 == whole.sha256
    folders = [series.folder_of(tmp_path / "saved", step) for step in series.steps_in(tmp_path / "saved")]
    assert len(folders) == 2
    assert all(verify(open_to_verify(folder)).ok for folder in folders)
    assert all(written(folder) < 200_000 for folder in folders), "two megabytes are not in them"
    needed = {Path(name).name for folder in folders for name in index.files_of(folder)}
    assert {path.name for path in shared(tmp_path / "saved")} <= needed, "nothing is left that nobody needs"
