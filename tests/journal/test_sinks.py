"""The real TensorBoard and MLflow, across a lost writer and a resume, read by their own readers.

Weights & Biases has a process beside each writer: tests/faults/test_journal.py kills real ones.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.journal.sinks import TensorBoard, make_sink
from tests.journal import readers
from tests.journal.test_journal import Worker

Make = Callable[[], Any]
EXPECTED = [(step, pytest.approx(1.0 / (1 + step))) for step in range(9)]


def installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install -e .[dev]")


def live(folder: Path, make: Make) -> None:
    """A run of nine steps: its writer is lost after the fourth; then all are, and steps 5 to 7 are trained again.

    The lost ones' sinks are left as they are: nobody closes them.
    """
    lost, other = Worker(folder, first=True, sinks=(make(),)), Worker(folder, sinks=(make(),))
    for worker in (lost, other):
        worker.begin(0)
        for number in range(4):
            worker.step(number)
    other.first = True
    for number in range(4, 8):
        other.step(number)
    saved = [row for row in other.progress.rows if row["step"] < 5]
    resumed = Worker(folder, first=True, sinks=(make(),))
    resumed.progress.rows = saved
    resumed.begin(5)
    for number in range(5, 9):
        resumed.step(number)
    resumed.journal.end()
    assert readers.jsonl(folder) == EXPECTED


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    installed("tensorboard")
    live(tmp_path, lambda: make_sink("tensorboard", {}))
    assert readers.tensorboard(tmp_path / "tensorboard") == EXPECTED


def test_without_purging_tensorboard_would_show_steps_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("tensorboard")
    real = TensorBoard.begin
    monkeypatch.setattr(TensorBoard, "begin", lambda self, folder, step: real(self, folder, 10**6))
    live(tmp_path, lambda: make_sink("tensorboard", {"folder": tmp_path / "own"}))
    assert len(readers.tensorboard(tmp_path / "own")) > len(EXPECTED)


def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need more than mlflow-skinny
    uri = f"file:{tmp_path}/mlruns"
    live(tmp_path, lambda: make_sink("mlflow", {"uri": uri}))
    assert sorted(readers.mlflow(tmp_path, uri)) == EXPECTED


def test_what_nobody_knows_is_refused() -> None:
    for given, options, words in [
        ("visdom", {}, "nothing to log to"),
        (3, {}, "nothing to log to"),
        (type("Notes", (), dict.fromkeys(("begin", "write", "end"), print)), {}, "nothing to log to"),  # a class
        ("mlflow", {"project": "x"}, "options"),
    ]:
        with pytest.raises(UsageError, match=words):
            make_sink(given, options)


CLOSES_ITSELF = """
import atexit
import torch
import holdfast

class Library:
    \"\"\"A sink whose library closes itself at the exit of Python, as that of Weights & Biases does.\"\"\"

    def __init__(self): self.is_closed, self.rows = False, 0
    def begin(self, folder, step): atexit.register(self.close)
    def close(self): self.is_closed = True
    def write(self, row):
        assert not self.is_closed, "closed"
        self.rows += 1
    def end(self): print(self.rows, "rows, closed:", self.is_closed)

run = holdfast.Run(
    layers=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=[(torch.ones(2), torch.ones(1))] * 8, global_batch=4, micro_batch=2, checkpoint="runs",
)
run.log_to(Library())
for step in run.steps(3):
    pass
run.log({"end": 1.0})
"""


def test_the_last_rows_of_a_script_come_before_a_library_closes_itself(tmp_path: Path) -> None:
    """Without an agent a run ends at the exit of Python, where libraries of sinks end, too."""
    (tmp_path / "train.py").write_text(CLOSES_ITSELF)
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == "4 rows, closed: False\n", ended.stderr
