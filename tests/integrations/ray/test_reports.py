"""What Ray's callbacks are told of a journal, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrations.ray.reports import Reports
from holdfast.integrations.ray.worker import CHECKPOINTS, LOGS
from holdfast.journal import rows

pytest.importorskip("ray", reason="needs Ray: pip install 'holdfast[ray]'")


class Told:
    """A callback of Ray that notes the steps that it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.steps += [row["step"] for row in metrics]


def write(folder: Path, steps: range) -> None:
    """Begin a journal anew, as a run does, with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    os.close(rows.replace(folder / rows.NAME, [{"step": step, "loss": 1.0} for step in steps]))


def test_a_run_that_begins_anew_under_an_old_name_tells_all_its_steps(tmp_path: Path) -> None:
    """The journal of the run before it is there until then, and may have been as long."""
    write(tmp_path / LOGS, range(4))
    told = Told()
    reports = Reports(tmp_path, [told], context=None)  # type: ignore[list-item]
    reports.look()
    assert told.steps == []
    write(tmp_path / LOGS, range(4))
    reports.look()
    assert told.steps == [0, 1, 2, 3]


def test_a_run_that_goes_on_tells_no_step_again(tmp_path: Path) -> None:
    write(tmp_path / CHECKPOINTS, range(4))
    saved = tmp_path / CHECKPOINTS / "step-00000004"
    saved.mkdir()
    (saved / "index.json").touch()
    told = Told()
    reports = Reports(tmp_path, [told], context=None)  # type: ignore[list-item]
    write(tmp_path / CHECKPOINTS, range(6))
    reports.look()
    assert told.steps == [4, 5]
