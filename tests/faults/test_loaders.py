"""Runs whose data come from loaders: the bits of a run without them, through kills, and no process is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.agent import Agent
from holdfast.processes import facts_of
from tests.faults import hang, sync_judge
from tests.faults.judge import covered
from tests.harness import Result, count_events, launch, until, wait_until

STEPS = 10


def train(folder: Path, *, faults: str = "", **settings: Any) -> Result:
    readers = folder / "readers"
    readers.mkdir(parents=True)
    environment = {name: str(settings.pop(name)) for name in list(settings) if name.isupper()}
    environment |= {"STEPS": str(STEPS), "READERS": str(readers)}
    result = launch(folder, faults=faults, environment=environment, **settings)
    wait_until("no loader is left", lambda: all(is_over(int(path.name)) for path in readers.iterdir()))
    workers = {line["pid"] for line in result.results}
    assert workers.isdisjoint({int(path.name) for path in readers.iterdir()}), "workers themselves read nothing"
    return result


def is_over(pid: int) -> bool:
    facts = facts_of(pid)
    return facts is None or facts.is_over


@pytest.mark.parametrize(
    ("stages", "loaders", "phase"),
    [
        ("1", 2, "backward"),
        ("2", 1, "data"),
        covered("the other cases", "1", 4, "voted"),
    ],
)
def test_loaders_change_no_bit(tmp_path: Path, undisturbed: Any, stages: str, loaders: int, phase: str) -> None:
    """A worker is killed in the middle of a step, and replaced. Evaluations have loaders too."""
    faults = f"kill worker=0.1 step=4 phase={phase}"
    result = train(tmp_path, faults=faults, workers=3, STAGES=stages, TOLERATE=1, LOADERS=loaders)
    assert result.code == 0
    assert result.losses == undisturbed(STEPS).losses
    assert result.sha256 == undisturbed(STEPS).sha256
    assert [event["worker"] for event in result.of("failure")] == ["0.1"]


def test_killed_loaders_are_no_loss(tmp_path: Path, undisturbed: Any) -> None:
    """All of them, while the run goes on: workers stay, and the bits do."""
    killed: set[int] = set()

    async def kill_loaders(agent: Agent) -> None:
        await until(lambda: count_events(agent, "commit", step=2) > 0)
        for path in (tmp_path / "readers").iterdir():
            if not is_over(int(path.name)):
                killed.add(int(path.name))
                os.kill(int(path.name), signal.SIGKILL)
        (tmp_path / "hurry").touch()

    result = train(tmp_path, workers=2, meddle=kill_loaders, LOADERS=2, WANTED=9, PAUSE=0.05)
    assert killed
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    assert not result.of("failure")


def test_a_loader_that_hangs_is_seen_as_a_hung_worker(tmp_path: Path, undisturbed: Any) -> None:
    """Its own stacks say where. The others are slow until it is replaced: a run that ends first kills it as it is."""
    environment = {"STEPS": str(STEPS), "HANG": "block 0.1 data", "LOADERS": "1", "WANTED": "3", "PAUSE": "1"}
    result = launch(tmp_path, script=Path(hang.__file__), environment=environment, step_timeout="4:4")
    assert result.sha256 == undisturbed(STEPS).sha256
    (event,) = result.of("stuck")
    assert event["worker"] == "0.1"
    assert " in block_forever\n" in (tmp_path / "logs" / event["log"]).read_text()


def test_replicas_that_train_apart_have_loaders(tmp_path: Path) -> None:
    hashes = [
        sync_judge.train(tmp_path / str(n), "LocalSGD(every=3)", model="waves", workers=2, LOADERS=n).result.sha256
        for n in (0, 2)
    ]
    assert hashes[0] == hashes[1]
