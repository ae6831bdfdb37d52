"""Seeded soaks of policies: ``--soak N`` scenarios of kills, hangs, joins and leaves, in random phases and policies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults.judge import scenarios
from tests.faults.sync_judge import (
    POLICIES,
    SCRIPT,
    Rules,
    Trial,
    assert_good_end,
    assert_nothing_lost,
    assert_nothing_lost_by_a_server,
    read,
    train,
)
from tests.faults.test_pipeline_soak import kill_coordinator
from tests.harness import Hosts, launch_hosts, until
from tests.injected import note

PHASES = ["data", "forward", "backward", "update", "ballot", "average", "averaged", "vote", "voted", "regroup", "copy"]
STEPS = 18


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", scenarios(metafunc.config))


def assert_as_it_should(trial: Trial, name: str, *, steps: int) -> None:
    assert_good_end(trial, steps=steps)
    if trial.result.of("resumed"):  # what came from a checkpoint was done before by others
        return
    if name == "ssp":
        assert_nothing_lost_by_a_server(trial)
    else:
        assert_nothing_lost(trial.lives, Rules.of(name), steps=steps)


def test_random_kills_in_random_phases(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    name, workers = rng.choice(list(POLICIES)), rng.randint(2, 4)
    doomed = [f"0.{n}" for n in range(2 * workers) if rng.random() < 0.3]
    faults = "; ".join(
        f"{rng.choice(['kill', 'kill', 'kill', 'stop'])} worker={worker} step={rng.randint(0, STEPS - 1)} "
        f"phase={rng.choice(PHASES)}"
        for worker in doomed
    )
    more: dict[str, object] = {"SLOW": f"0.{rng.randrange(workers)}:{rng.choice(['0', '0.01', '0.05'])}"}
    more["EVALUATE"] = rng.choice([0, 5])
    more |= {"CHECKPOINT": tmp_path / "saved", "EVERY": rng.choice([2, 5])}
    print(f"{name}, {workers} workers, {faults}, {more}")
    trial = train(tmp_path / "a", name, workers=workers, steps=STEPS, faults=faults, heartbeat_timeout=2.0, **more)
    assert_as_it_should(trial, name, steps=STEPS)


def test_random_hosts_come_go_and_are_struck(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    name = rng.choice(list(POLICIES))
    steps = 60

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: sum(e["event"] == "commit" for e in hosts.events()) > 3)
        await disturb(hosts, rng)

    settings = {"POLICY": POLICIES[name], "MODEL": "count", "STEPS": str(steps), "WANTED": "99"}
    settings |= {"CHECKPOINT": str(tmp_path / "saved"), "EVERY": "10"}
    workers = [rng.randint(2, 3), 1]
    print(name, workers)
    result = launch_hosts(
        tmp_path, script=SCRIPT, workers=workers, meddle=meddle, environment=settings, heartbeat_timeout=3.0
    )
    assert_as_it_should(read(tmp_path, result), name, steps=steps)


async def disturb(hosts: Hosts, rng: random.Random) -> None:
    """One thing after the other, sometimes in the middle of the recovery from the one before."""
    struck: set[str] = set()
    left: set[int] = set()
    for _ in range(rng.randint(3, 5)):
        await asyncio.sleep(rng.choice([0.0, 0.1, 0.3]) * rng.random())
        staying = [n for n in range(1, len(hosts.agents)) if n not in left and not hosts.jobs[n].done()]
        alive = [worker for name, worker in hosts.workers.items() if name not in struck and worker.pid]
        what = rng.choice(["kill", "kill", "hang", "join", "join", "leave", "coordinator"])
        print(what)
        if what == "join" and len(alive) < 5:
            hosts.start(1)
            note(what)
        elif what == "leave" and staying and len(alive) > 3:
            left.add(rng.choice(staying))
            hosts.leave(max(left & set(staying)))
            note(what)
        elif what == "coordinator":
            kill_coordinator(hosts)
        elif what in ("kill", "hang") and len(alive) > 2:
            known = {e["worker"] for e in hosts.events() if e["event"] == "entered"}
            exposed = [worker for worker in alive if worker.name in known]
            for worker in rng.sample(exposed, min(len(exposed), 1)):
                struck.add(worker.name)
                os.kill(worker.pid or 0, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
                note("hang" if what == "hang" else "kill")
