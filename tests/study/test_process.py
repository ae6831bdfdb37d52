"""A framework's process: answers, errors, ends and hangs, each in words."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.study.process import Failed, Process
from holdfast.study.team import Team

PYTHON = Path(sys.executable)


@pytest.fixture
def process(tmp_path: Path):
    with Process("pytorch", PYTHON, log=tmp_path / "log") as found:
        yield found


def test_it_answers_and_an_error_is_no_end(process: Process) -> None:
    assert process.ask("hello")["versions"]["torch"]
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
    with pytest.raises(Failed, match="did not answer within 1 s"):
        process.ask("hello", within=1.0)
    assert not process.alive


def test_a_framework_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    with Process("chainer", PYTHON, log=tmp_path / "log") as process, pytest.raises(Failed, match="chainer"):
        process.ask("hello")


def test_a_team_starts_a_dead_one_again(tmp_path: Path) -> None:
    shapes = [("weight", (4, 3)), ("bias", (4,))]
    with Team({"pytorch": PYTHON}, tmp_path) as team:
        team.model(shapes, seed=0, together=True)
        folder = str(tmp_path / "save")
        assert team.ask("pytorch", "save", form="torch.save", folder=folder)["bytes"] > 0
        os.kill(team._processes["pytorch"].pid, signal.SIGKILL)
        with pytest.raises(Failed):
            team.ask("pytorch", "save", form="torch.save", folder=folder)
        assert team.ask("pytorch", "save", form="torch.save", folder=folder)["bytes"] > 0


def test_no_process_outlives_its_team(tmp_path: Path) -> None:
    with Team({"pytorch": PYTHON}, tmp_path) as team:
        team.hello()
        process = team._processes["pytorch"]
    assert not process.alive
