"""Waits of an agent that had no limit: for its own coordinator, for a stopped worker, for one that has said goodbye."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.cluster import agent as agents
from holdfast.cluster import agent_line, client, keeper
from holdfast.cluster.agent import Agent
from holdfast.measuring import free_port
from tests.faults.test_hosts import collect, start_agent, wait_for_step
from tests.faults.test_outside import SLOW, kill_coordinator, training
from tests.faults.test_sweep import assert_nothing_lost
from tests.harness import launch, wait_until


async def start_hung(listener: int, options: list[str], token: str) -> asyncio.subprocess.Process:
    """Start a coordinator that never serves, as one whose modules are on a dead file server."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")


def test_a_coordinator_that_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent_line, "START_SECONDS", 1.0)
    monkeypatch.setattr(keeper, "start_coordinator", start_hung)
    assert launch(tmp_path, seconds=60.0).code == 1
    assert "coordinator does not answer" in capsys.readouterr().err


def test_a_coordinator_that_hangs_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed
) -> None:
    monkeypatch.setattr(agent_line, "START_SECONDS", 10.0)
    start = keeper.start_coordinator

    async def meddle(agent: Agent) -> None:
        await training(agent)
        monkeypatch.setattr(keeper, "start_coordinator", start_hung)
        before = agent.coordinator
        kill_coordinator(agent)
        while agent.coordinator is before:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(keeper, "start_coordinator", start)
        await agent.coordinator.wait()  # the agent kills it

    result = launch(tmp_path, environment=SLOW, meddle=meddle, patience=60.0)
    assert_nothing_lost(result, undisturbed(60))
    assert len(result.of("coordinator-restart")) == 2


STOPS_AFTER_ITS_BYE = """
import os, signal
from holdfast.cluster.client import Client
if os.environ["HOLDFAST_WORKER"] == "0.1":
    said = Client.bye
    Client.bye = lambda client: (said(client), os.kill(os.getpid(), signal.SIGSTOP))
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_worker_that_has_nothing_left_to_do_and_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed
) -> None:
    monkeypatch.setattr(agents, "ENDING_SECONDS", 2.0)
    script = tmp_path / "script.py"
    script.write_text(STOPS_AFTER_ITS_BYE)
    result = launch(tmp_path, script=script, arguments=[str(Path(__file__).with_name("train.py"))], seconds=60.0)
    assert result.code == 0
    assert result.sha256 == undisturbed(10).sha256
    assert client.ENDING_SECONDS > 1200, "workers that leave may write for 20 minutes"


def pid_of(log: Path) -> int:
    """The process of a worker: it has its log open."""
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if path.readlink() == log:
                return int(path.parts[2])
        except OSError:  # it has ended, or is another user's
            continue
    raise AssertionError(f"nobody writes to {log}")


def test_a_stopped_worker_and_no_coordinator_for_good(tmp_path: Path) -> None:
    options = ("-n", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    options += ("--heartbeat-timeout", "3", "--patience", "3")
    head = start_agent(tmp_path, "head", *options)
    wait_until("the coordinator", lambda: collect(tmp_path).of("host"))
    other = start_agent(tmp_path, "other", *options)
    wait_for_step(tmp_path, 1, 2)
    os.kill(pid_of(tmp_path / "other" / "logs" / "worker-1.0.log"), signal.SIGSTOP)
    os.killpg(head.pid, signal.SIGKILL)  # its coordinator too; its worker ends by itself
    assert other.wait(60) == 1
    assert "the coordinator at" in other.stderr
