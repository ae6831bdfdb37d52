"""Frameworks for the tests of the study, each in the interpreter that has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.study.process import Process

pytest.register_assert_rewrite("tests.study.adapters.conformance")  # its asserts say as much as a test's
HERE = ("pytorch", "holdfast")  # what the development environment has anyway
STUDY = Path(__file__).parents[2] / ".study"

Start = Callable[[str], Process]


def interpreter_of(framework: str) -> Path:
    """Where a framework is installed; the test is skipped where it is not."""
    if framework in HERE:
        return Path(sys.executable)
    python = STUDY / framework / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{framework} is not installed below .study; `make test-study` installs it and runs this")
    return python


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a framework's process; all of them end with the test."""
    started: list[Process] = []

    def begin(framework: str) -> Process:
        log = tmp_path / f"{framework}.log"
        started.append(Process(framework, interpreter_of(framework), log=log, threads=1))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
