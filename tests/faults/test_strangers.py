"""Strangers at every port that a run has, from before it starts until after its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.events import read_events
from tests.faults.test_sweep import assert_nothing_lost
from tests.harness import TRAIN, Result, collect, wait_until
from tests.namespaces import Machines, machines

FLOOD = Path(__file__).with_name("flood.py")
HELD = 1100  # connections of strangers to each port at a time: more than the usual limit of a process's descriptors
STEPS = 60
SETTINGS = {"OMP_NUM_THREADS": "1", "HOLDFAST_TRACE": "1", "STEPS": str(STEPS), "WANTED": "99", "PATIENT": "2"}


@pytest.fixture
def machine() -> Iterator[Machines]:
    """A namespace in which nothing listens but the run."""
    with machines(1) as made:
        yield made


@contextmanager
def flood(machine: Machines, report: Path) -> Iterator[None]:
    command = ["ip", "netns", "exec", machine.names[0], sys.executable, str(FLOOD), str(HELD), str(report)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        try:
            yield
        finally:
            process.communicate()  # closes its input, which ends it


def start(machine: Machines, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """``holdfast run`` in an interpreter of its own, with the soft limit of 1,024 descriptors that users have."""
    logs = folder / "0" / "logs"
    words = [sys.executable, "-m", "holdfast.cli", "run", "-n", "3", "--heartbeat-timeout", "3", "--log-dir", str(logs)]
    limited = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh", *words, str(TRAIN)]
    return subprocess.Popen(
        ["ip", "netns", "exec", machine.names[0], *limited],
        env={**os.environ, **SETTINGS, "RESULTS": str(folder / "results.jsonl"), **environment},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def coordinator_of(machine: Machines) -> int:
    """The process id of the coordinator."""
    for pid in machine.processes(0):
        if b"holdfast: coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no coordinator runs")


def test_strangers_at_every_port_before_during_and_after_forming(
    machine: Machines, tmp_path: Path, undisturbed: Any
) -> None:
    """Among them a worker is killed, another one hangs, and the coordinator is killed: all have to get in again."""
    faults = "stop worker=0.1 step=12 phase=forward; kill worker=0.2 step=45 phase=vote"
    with flood(machine, tmp_path / "flood.json"):
        run = start(machine, tmp_path, HOLDFAST_FAULTS=faults, HURRY=str(tmp_path / "hurry"), PAUSE="0.1")
        events = tmp_path / "0" / "logs" / "events.jsonl"

        def of(event: str, **fields: Any) -> list[dict[str, Any]]:
            found = read_events(events) if events.exists() else []
            return [e for e in found if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

        wait_until("the hung worker is noticed", lambda: of("failure", worker="0.1") or run.poll() is not None)
        wait_until("training goes on", lambda: of("commit", step=20) or run.poll() is not None)
        os.kill(coordinator_of(machine), signal.SIGKILL)
        wait_until("training goes on", lambda: of("commit", step=30) or run.poll() is not None)
        (tmp_path / "hurry").touch()
        _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    result = collect(tmp_path)
    assert_nothing_lost(Result(code=0, events=result.events, said=[], results=result.results), undisturbed(STEPS))
    assert [e["worker"] for e in result.of("failure")] == ["0.1", "0.2"], "nobody fell but who was pushed"
    assert result.of("coordinator-restart")
    assert_flooded(json.loads((tmp_path / "flood.json").read_text()))


def assert_flooded(report: dict[str, dict[str, int]]) -> None:
    """The strangers did what they could: they were at the coordinator and at each worker's port."""
    connected = sorted(report["connected"].values())
    assert len(connected) >= 1 + 3 + 2, f"the coordinator, the first workers, and those that replaced some: {report}"
    assert connected[-3] > HELD, f"each accepts, drops, and is asked again: {report}"
