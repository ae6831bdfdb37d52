"""Streams on real processes: kills in every phase, joins, another number of workers; and what the ledger proves."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.agent import Agent
from holdfast.data.audit import Violation, audit, read_ledgers
from tests.faults.judge import covered, kill_at_once
from tests.harness import Result, assert_every_worker_commits_each_step_once, count_events, hurry, launch, until

SCRIPT = Path(__file__).parent / "stream_train.py"
STEPS = 9
PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]


def train(folder: Path, *, workers: int = 3, steps: int = STEPS, **settings: Any) -> Result:
    environment = {name: settings.pop(name) for name in list(settings) if name.isupper()} | {"STEPS": str(steps)}
    folder.mkdir(exist_ok=True)
    return launch(folder, script=SCRIPT, workers=workers, environment=environment, **settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """The undisturbed run on one worker."""

    @cache
    def run(steps: int, epochs: int = 0) -> Result:
        return train(tmp_path_factory.mktemp("alone"), workers=1, steps=steps, EPOCHS=str(epochs))

    return run


def assert_right(result: Result, whole: Result, ledger: Path) -> None:
    assert result.code == 0, result.said
    assert result.sha256 == whole.sha256
    assert result.losses == whole.losses
    assert audit(read_ledgers([ledger])).steps == len(whole.losses)


@pytest.mark.parametrize(
    ("phase", "worker"),
    [
        (phase, f"0.{number % 3}") if number in (0, 4, 6) else covered("tests/world", phase, f"0.{number % 3}")
        for number, phase in enumerate(PHASES)
    ],
)
def test_kill(tmp_path: Path, alone, phase: str, worker: str) -> None:
    result = train(tmp_path, faults=f"kill worker={worker} step=4 phase={phase}")
    assert_right(result, alone(STEPS), tmp_path / "logs")
    assert_every_worker_commits_each_step_once(result)
    assert [e["worker"] for e in result.of("failure")] == [worker]


def test_a_stream_that_ends_ends_the_run_also_with_kills_and_a_joiner(tmp_path: Path, alone) -> None:
    faults = "kill worker=0.1 step=3 phase=forward; kill worker=0.0 step=9 phase=update"
    result = train(tmp_path, steps=0, EPOCHS="3", WANTED="3", PAUSE="0.1", faults=faults)
    assert_right(result, alone(0, 3), tmp_path / "logs")
    assert "0.3" in {line["worker"] for line in result.results}, "a replacement has joined"
    found = audit(read_ledgers([tmp_path / "logs"]))
    assert found.epochs == 3
    assert found.lost >= 2


def test_resume_on_another_number_of_workers(tmp_path: Path, alone) -> None:
    """The first run is lost behind its checkpoint: some steps are trained again, and count once."""
    saved = {"CHECKPOINT": str(tmp_path / "runs"), "EVERY": "3"}
    faults = kill_at_once(["0.0", "0.1"], step=5, phase="vote")
    first = train(tmp_path / "a", workers=2, faults=faults, max_restarts=0, **saved)
    assert first.code != 0
    second = train(tmp_path / "b", workers=3, **saved)
    assert second.code == 0
    assert second.sha256 == alone(STEPS).sha256
    found = audit(read_ledgers([tmp_path / "runs"]))
    assert (found.steps, found.starts) == (STEPS, 2)
    assert found.again > 0


@pytest.mark.timeout(1600)  # a hundred replacements take minutes
@pytest.mark.parametrize(("kills", "steps"), [(4, 40), covered("4 kills, and 100 in tests/world", 100, 900)])
def test_a_killer(tmp_path: Path, alone, kills: int, steps: int) -> None:
    """Workers are killed at any moment, sometimes all that hold the model: then the run goes back to a checkpoint."""
    chance = random.Random(1)

    def killed(agent: Agent) -> int:
        return count_events(agent, "exit", cause="killed by SIGKILL")

    async def kill(agent: Agent) -> None:
        while (done := killed(agent)) < kills:
            before = count_events(agent, "commit")
            await until(lambda before=before: count_events(agent, "commit") > before + 3)
            chance.choice([worker for worker in agent.workers.values() if worker.pid]).kill()
            await until(lambda done=done: killed(agent) > done)
        hurry(agent)

    given = {"CHECKPOINT": str(tmp_path / "runs"), "EVERY": "5", "WANTED": "99", "PAUSE": "0.3"}
    result = train(tmp_path, steps=steps, meddle=kill, max_restarts=999, seconds=1500, **given)
    assert_right(result, alone(steps), tmp_path / "runs")


# --- controls -------------------------------------------------------------------------------------------


def test_control_a_repeated_micro_batch(tmp_path: Path) -> None:
    result = train(tmp_path, faults="repeat-sample worker=0.1 step=3")
    assert result.code == 0
    with pytest.raises(Violation, match=r"step 3: .*(lost|used twice)"):
        audit(read_ledgers([tmp_path / "logs"]))


def test_control_another_order_of_shards_is_refused(tmp_path: Path) -> None:
    """Each worker has listed its folder in another order."""
    result = train(tmp_path, workers=2, ORDER="random")
    assert result.code == 2
