"""A framework's process: answers, errors, ends and hangs, each in words."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from holdfast.study.framework_processes import FrameworkProcesses
from holdfast.study.framework_zygote import FrameworkZygote
from holdfast.study.process import Failed, Process
from tests.study import toy
from tests.study.conftest import Fork, starting

PYTHON = Path(sys.executable)


@pytest.fixture(params=["started", "forked"])
def process(request: pytest.FixtureRequest, fork: Fork, tmp_path: Path):
    """A toy in an interpreter of its own, which imports little; and a fork of PyTorch."""
    begin = starting("toy", toy.interpreter(tmp_path)) if request.param == "started" else fork("pytorch")
    with begin(tmp_path / "log") as found:
        yield found


def test_it_answers_and_an_error_is_no_end(process: Process) -> None:
    assert process.ask("hello")["versions"]
    with pytest.raises(Failed, match="no model was made yet"):
        process.ask("load", form="torch.save", folder="nowhere")
    assert process.ask("hello"), "it goes on"


def test_one_that_dies_says_how(process: Process) -> None:
    process.ask("hello")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(Failed, match="SIGKILL"):
        process.ask("hello")


def test_one_that_hangs_is_ended(process: Process) -> None:
    process.ask("hello")
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(Failed, match="did not answer"):
        process.ask("hello", within=1.0)
    assert not process.alive


def test_a_framework_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    with Process("chainer", PYTHON, log=tmp_path / "log") as process, pytest.raises(Failed, match="chainer"):
        process.ask("hello")


def test_forks_do_not_outlive_a_study_that_dies_and_say_when_their_zygote_has(tmp_path: Path) -> None:
    with FrameworkZygote(starting("toy", toy.interpreter(tmp_path))(tmp_path / "log")) as zygote:
        one, other = (zygote.fork(tmp_path / name) for name in ("one", "other"))
        assert one.ask("hello") == other.ask("hello")
        one._requests.close()
        one._answers.close()  # as if the study had died
        while one.alive:
            time.sleep(0.01)
        os.kill(zygote._process.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="SIGKILL"):
            zygote.fork(tmp_path / "third")
        assert other.ask("hello"), "it has a life of its own"
        other.kill()
        while (status := Path(f"/proc/{other.pid}/status")).exists() and "State:\tZ" not in status.read_text():
            time.sleep(0.01)


def test_a_team_starts_a_dead_one_again(fork: Fork, tmp_path: Path) -> None:
    shapes = [("weight", (4, 3)), ("bias", (4,))]
    with FrameworkProcesses({"pytorch": fork("pytorch")}, tmp_path) as team:
        team.model(shapes, seed=0, together=True)
        folder = str(tmp_path / "save")
        assert team.ask("pytorch", "save", form="torch.save", folder=folder)["bytes"] > 0
        os.kill(team._processes["pytorch"].pid, signal.SIGKILL)
        with pytest.raises(Failed):
            team.ask("pytorch", "save", form="torch.save", folder=folder)
        assert team.ask("pytorch", "save", form="torch.save", folder=folder)["bytes"] > 0


def test_no_process_outlives_its_team(tmp_path: Path) -> None:
    with FrameworkProcesses({"toy": starting("toy", toy.interpreter(tmp_path))}, tmp_path) as team:
        team.hello()
        process = team._processes["toy"]
    assert not process.alive
