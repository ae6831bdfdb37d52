"""Errors of holdfast in a script of one process: one sentence and an exit code, as under ``holdfast run``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import Command

BAD = "from holdfast.errors import CheckpointError\nraise CheckpointError('it is damaged', hint='take another')\n"
CAUGHT = (
    "from holdfast.errors import UsageError\ntry: raise UsageError('no')\nexcept UsageError: pass\nopen('nothing')\n"
)


def python(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    given = {**os.environ, **environment}
    return subprocess.run([sys.executable, "train.py"], cwd=folder, env=given, capture_output=True, text=True)


def test_an_error_is_one_sentence_and_its_exit_code(tmp_path: Path) -> None:
    found = python(tmp_path, f"import atexit\natexit.register(print, 'cleaned up')\n{BAD}")
    assert (found.returncode, found.stderr) == (4, "holdfast: it is damaged (take another)\n")
    assert found.stdout == "cleaned up\n"
    agent = Command("run", "train.py", folder=tmp_path)
    assert (agent.wait(60), agent.stderr) == (4, found.stderr), "holdfast run says the same"


def test_a_traceback_on_request(tmp_path: Path) -> None:
    found = python(tmp_path, BAD, HOLDFAST_TRACEBACK="1")
    assert found.returncode == 4
    assert found.stderr.startswith("Traceback")
    agent = Command("run", "train.py", folder=tmp_path, HOLDFAST_TRACEBACK="1")
    assert agent.wait(60) == 4
    assert "Traceback" in (tmp_path / "holdfast-logs" / "worker-0.0.log").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('nothing')\n",
        CAUGHT,
        f"import sys\nsys.excepthook = lambda *about: sys.__excepthook__(*about)\n{BAD}",  # as notebooks do
        f"import sys\nsys.settrace(lambda *about: None)\n{BAD}",  # as debuggers do
    ],
)
def test_other_errors_and_other_hooks_are_left_alone(tmp_path: Path, text: str) -> None:
    found = python(tmp_path, text)
    assert found.returncode
    assert found.stderr.startswith("Traceback")
