"""Frameworks for the tests of the study, each in the interpreter that has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import pytest

from holdfast.study import process as processes
from holdfast.study.framework_zygote import FrameworkZygote
from holdfast.study.process import Process

pytest.register_assert_rewrite("tests.study.adapters.conformance")  # its asserts say as much as a test's
HERE = ("pytorch", "holdfast")  # what the development environment has anyway
STUDY = Path(__file__).parents[2] / ".study"

Start = Callable[[str], Process]
Fork = Callable[[str], processes.Start]


def interpreter_of(framework: str) -> Path:
    """Where a framework is installed; the test is skipped where it is not."""
    if framework in HERE:
        return Path(sys.executable)
    python = STUDY / framework / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{framework} is not installed below .study; `make test-study` installs it and runs this")
    return python


def starting(framework: str, python: Path | None = None) -> processes.Start:
    """How its process is started, in an interpreter of its own."""
    return partial(Process, framework, python or interpreter_of(framework), threads=1)


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fork]:
    """How a framework's process is forked: each is imported once."""
    with ExitStack() as stack:

        @cache
        def zygote_of(framework: str) -> FrameworkZygote:
            log = tmp_path_factory.mktemp("zygote") / f"{framework}.log"
            return stack.enter_context(FrameworkZygote(starting(framework)(log)))

        yield lambda framework: zygote_of(framework).fork


@pytest.fixture
def start(fork: Fork, tmp_path: Path) -> Iterator[Start]:
    """Starts a framework's process; all of them end with the test."""
    started: list[Process] = []

    def begin(framework: str) -> Process:
        started.append(fork(framework)(tmp_path / f"{framework}.log"))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
