"""Seeded soaks of pipelines: ``--soak N`` scenarios each, of kills, hangs, joins and leaves on random layouts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults.judge import PIPELINE, assert_nothing_twice, assert_same, scenarios, train
from tests.faults.test_pipeline_changes import trains
from tests.harness import Hosts, Result, launch_hosts, until
from tests.injected import note

PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update", "regroup", "copy", "snapshot", "write"]
SHAPES: list[dict[str, str]] = [
    {"STAGES": "auto"},
    {"STAGES": "auto", "MEMORY": "260kB"},
    {"STAGES": "2"},
    {"STAGES": "3,4,3"},
    {"STAGES": "1,9"},
    {"STAGES": "1"},
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", scenarios(metafunc.config))


def assert_as_if_nothing_had_happened(result: Result, whole: Result) -> None:
    assert result.code == 0, result.said
    assert result.sha256 == whole.sha256
    assert result.losses == whole.losses
    if not any("begin again" in event["reason"] for event in result.of("generation")):
        assert_same(result, whole)
        assert_nothing_twice(result)


def test_random_kills_in_random_phases(tmp_path: Path, whole, seed: int) -> None:
    """Any number of workers, their replacements too, often all that hold some layers."""
    steps = 18
    rng = random.Random(seed)
    shape, workers = dict(rng.choice(SHAPES)), rng.randint(2, 6)
    doomed = [f"0.{n}" for n in range(2 * workers) if rng.random() < 0.4]
    faults = "; ".join(
        f"{rng.choice(['kill', 'kill', 'kill', 'stop'])} worker={worker} step={rng.randint(0, steps - 1)} "
        f"phase={rng.choice(PHASES)}"
        for worker in doomed
    )
    print(f"{workers} workers, {shape}, {faults}")
    saved = {"CHECKPOINT": str(tmp_path / "saved"), "EVERY": str(rng.choice([2, 5]))}
    settings = {"stages": shape.pop("STAGES"), "tolerate": rng.randint(0, 2), "steps": steps, **shape, **saved}
    result = train(tmp_path / "a", workers=workers, faults=faults, heartbeat_timeout=2.0, **settings)
    assert_as_if_nothing_had_happened(result, whole(steps))


STEPS = 40


def test_random_hosts_come_go_and_are_struck(tmp_path: Path, whole, seed: int) -> None:
    rng = random.Random(1000 + seed)

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: trains(hosts) > 1)
        await disturb(hosts, rng)
        (tmp_path / "hurry").touch()

    settings = {**rng.choice(SHAPES), "TOLERATE": str(rng.randint(0, 2)), "STEPS": str(STEPS)}
    settings |= {"WANTED": "99", "PAUSE": "0.1", "HURRY": str(tmp_path / "hurry")}
    settings |= {"CHECKPOINT": str(tmp_path / "saved"), "EVERY": "10"}
    workers = [rng.randint(2, 3), rng.randint(1, 2)]
    print(settings, workers)
    result = launch_hosts(
        tmp_path, script=PIPELINE, workers=workers, meddle=meddle, environment=settings, heartbeat_timeout=3.0
    )
    assert_as_if_nothing_had_happened(result, whole(STEPS))


async def disturb(hosts: Hosts, rng: random.Random) -> None:
    """One thing after the other, sometimes in the middle of the recovery from the one before."""
    struck: set[str] = set()
    left: set[int] = set()
    for _ in range(rng.randint(4, 8)):
        await asyncio.sleep(rng.choice([0.0, 0.1, 0.3, 1.0]) * rng.random())
        staying = [n for n in range(1, len(hosts.agents)) if n not in left and not hosts.jobs[n].done()]
        alive = [worker for name, worker in hosts.workers.items() if name not in struck and worker.pid]
        what = rng.choice(["kill", "kill", "kill two", "hang", "join", "join", "leave", "coordinator"])
        print(what)
        if what == "join" and len(alive) < 7:
            hosts.start(rng.randint(1, 2))
            note(what)
        elif what == "leave" and staying and len(alive) > 4:
            left.add(rng.choice(staying))
            hosts.leave(max(left & set(staying)))
            note(what)
        elif what == "coordinator":
            kill_coordinator(hosts)
        elif what in ("kill", "kill two", "hang") and len(alive) > 2:
            # Nobody can tell a worker that hangs before it has come from one whose script takes its time.
            known = {e["worker"] for e in hosts.events() if e["event"] == "entered"}
            exposed = [worker for worker in alive if worker.name in known or what != "hang"]
            for worker in rng.sample(exposed, min(len(exposed), 2 if what == "kill two" else 1)):
                struck.add(worker.name)
                os.kill(worker.pid or 0, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
                note("hang" if what == "hang" else "kill")


def kill_coordinator(hosts: Hosts) -> None:
    process = hosts.agents[0].coordinator
    if process is not None and process.returncode is None:
        process.kill()
        note("kill the coordinator")
