"""The folder of checkpoints: seen by some workers only, and not to be written to when it matters most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import series
from holdfast.cluster.agent import Agent
from holdfast.cluster.grace import NOT_SAVED
from holdfast.measuring import free_port
from tests.faults.test_checkpoints import run, steps_of
from tests.harness import TRAIN, collect, count_events, until, wait_until
from tests.warm import Command

STEPS = 14


class TwoAgents:
    """Agents of one run, each in a folder of its own: a relative path means another folder to each."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--heartbeat-timeout", "3", *options)

    def start(self, number: int, *, checkpoint: str, **environment: str) -> Command:
        logs = self.folder / str(number) / "logs"
        logs.mkdir(parents=True)
        settings = {
            "HOLDFAST_TOKEN": "a secret of the test",
            "RESULTS": str(self.folder / "results.jsonl"),
            "EVERY": "3",
        }
        settings |= {"CHECKPOINT": checkpoint, "STEPS": str(STEPS), "HURRY": str(self.folder / "hurry"), **environment}
        words = ("run", "-n", "1", *self._options, "--log-dir", "logs", str(TRAIN))
        return Command(*words, folder=self.folder / str(number), name=f"agent{number}", **settings)

    def commits(self, worker: str) -> int:
        return sum(e["worker"] == worker for e in collect(self.folder).of("commit"))


def test_a_folder_that_is_mounted_on_one_machine_only(tmp_path: Path) -> None:
    """A relative path: the one sees checkpoints, the other an empty folder. Neither begins."""
    run(tmp_path, "before", workers=1, more={"STEPS": "7"})
    pair = tmp_path / "pair"
    agents = TwoAgents(pair, "--nnodes", "2")
    (pair / "0").mkdir(parents=True)
    (pair / "0" / "saved").symlink_to(tmp_path / "saved")
    first = agents.start(0, checkpoint="saved")
    wait_until("it has its number", lambda: collect(pair).of("host") or first.poll() is not None)
    both = [first, agents.start(1, checkpoint="saved")]
    assert [agent.wait(60.0) for agent in both] == [4, 4]
    for agent in both:
        assert "0.0 on " in agent.stderr
        assert f"sees 3 checkpoints, the newest of step 7, in {pair}/0/saved" in agent.stderr
        assert f"sees none in {pair}/1/saved" in agent.stderr
    assert not collect(pair).of("commit")
    assert not (pair / "1" / "saved").exists(), "no folder is made where the first worker's is not"


def test_a_joiner_that_does_not_see_the_folder_is_sent_away(tmp_path: Path, undisturbed) -> None:
    agents = TwoAgents(tmp_path, "--nnodes", "1:2")
    slow = {"WANTED": "99", "PAUSE": "0.1", "STEPS": "40"}
    first = agents.start(0, checkpoint=str(tmp_path / "saved"), **slow)
    wait_until("it trains", lambda: agents.commits("0.0") > 2 or first.poll() is not None)
    second = agents.start(1, checkpoint="saved", **slow)
    wait_until("the second is sent away", lambda: second.poll() is not None or first.poll() is not None)
    assert first.poll() is None, "the first trains on"
    (tmp_path / "hurry").touch()
    assert (first.wait(60.0), second.wait(60.0)) == (0, 3), first.stderr
    assert "worker 1.0 on " in second.stderr + second.stdout
    assert "cannot join, as it could not save: it sees none in" in second.stderr + second.stdout
    result = collect(tmp_path)
    assert result.sha256 == undisturbed(40).sha256
    assert agents.commits("1.0") == 0
    assert series.steps_in(tmp_path / "saved")[-1] == 40


def spoil(folder: Path) -> None:
    folder.rename(folder.with_name("gone"))  # not removed file by file, while others are made in it
    folder.write_text("a file where a folder was")


def test_a_run_whose_last_checkpoint_could_not_be_saved_does_not_end_well(tmp_path: Path, undisturbed, capfd) -> None:
    async def block(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "checkpoint", step=3))
        spoil(tmp_path / "saved")

    result = run(tmp_path, "a", workers=2, more={"WANTED": "99"}, meddle=block)
    assert result.code == 4
    assert result.sha256 == undisturbed(STEPS).sha256, "training itself is not disturbed"
    said = capfd.readouterr().err
    assert f"its last checkpoint, of step {STEPS}, could not be saved: " in said
    assert str(tmp_path / "saved") in said


def test_all_are_asked_to_leave_and_cannot_save(tmp_path: Path, capfd) -> None:
    async def preempt(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "commit", step=4))
        spoil(tmp_path / "saved")
        os.kill(os.getpid(), signal.SIGTERM)

    result = run(tmp_path, "a", workers=2, more={"STEPS": "60", "WANTED": "99", "EVERY": "1000"}, meddle=preempt)
    assert result.code == NOT_SAVED
    last = max(steps_of(result)) + 1
    said = "\n".join(result.said) + capfd.readouterr().err
    assert f"its last checkpoint, of step {last}, could not be saved: " in said


@pytest.mark.parametrize("spoiled", [True, False])
def test_one_process_without_an_agent_tells_it_by_its_exit_code(tmp_path: Path, spoiled: bool) -> None:
    """The script removes the folder after its last step, before the checkpoint of it is written."""
    script = f"""
import shutil, runpy
from pathlib import Path
from holdfast.run import saver
real = saver.Save.write
def write(save, *words, **more):
    if {spoiled}:
        shutil.rmtree(r"{tmp_path}/saved")
        Path(r"{tmp_path}/saved").write_text("")
    return real(save, *words, **more)
saver.Save.write = write
runpy.run_path(r"{TRAIN}", run_name="__main__")
print("the script has come to its end")
"""
    settings = {"CHECKPOINT": str(tmp_path / "saved"), "EVERY": "1000", "STEPS": "2", "RESULTS": str(tmp_path / "r")}
    command, environment = [sys.executable, "-c", script], {**os.environ, **settings}
    done = subprocess.run(command, env=environment, cwd=TRAIN.parents[2], capture_output=True, text=True, check=False)
    assert done.stdout == "the script has come to its end\n"
    assert done.returncode == (4 if spoiled else 0), done.stderr
    assert ("its last checkpoint, of step 2, could not be saved: " in done.stderr) == spoiled
