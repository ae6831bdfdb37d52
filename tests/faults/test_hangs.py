"""Workers that hang while their heartbeats come: they are found, their stacks are kept, and they are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import hang, judge
from tests.faults.judge import covered
from tests.faults.test_sweep import assert_nothing_lost
from tests.harness import Result, launch

SCRIPT = Path(hang.__file__)
STEPS = 10
HEARTBEAT = 3.0
PATIENT = {"WANTED": "3", "PATIENT": "8", "PAUSE": "0.1"}  # the last steps are slow, so that replacements take part


def train(folder: Path, plan: str = "", *, limit: str, **settings: Any) -> Result:
    environment = {"STEPS": str(STEPS), "HANG": plan, **settings.pop("environment", {})}
    settings = {"heartbeat_timeout": HEARTBEAT, **settings}
    return launch(folder, script=SCRIPT, environment=environment, step_timeout=limit, **settings)


def assert_found(result: Result, folder: Path, found: dict[str, str]) -> dict[str, dict[str, Any]]:
    """These workers were found stuck, nobody else was lost, and the stacks of each show the function it hung in."""
    events = {e["worker"]: e for e in result.of("stuck")}
    assert events.keys() == found.keys(), result.said
    assert {e["worker"] for e in result.of("failure")} == found.keys()
    for worker, function in found.items():
        log = (folder / "logs" / events[worker]["log"]).read_text()
        assert f" in {function}\n" in log
        (line,) = [said for said in result.said if said.startswith(f"holdfast: worker {worker} ")]
        assert "is killed: stuck" in line
        assert f"worker-{worker}.log" in line
        assert not [said for said in result.said if "most recent call first" in said], "stacks are for the log"
    return events


def test_hangs_in_steps(tmp_path: Path, undisturbed) -> None:
    """A read that never ends, a deadlock, and an endless loop, each on another worker."""
    faults = "lock worker=0.2 step=4 phase=update; spin worker=0.3 step=6 phase=backward"
    result = train(tmp_path, "block 0.1 data 2", limit="2.5:30", faults=faults, workers=4)
    assert_nothing_lost(result, undisturbed(STEPS))
    events = assert_found(result, tmp_path, {"0.1": "block_forever", "0.2": "point", "0.3": "point"})
    assert events["0.1"]["at"].endswith(" in block_forever")
    assert "tests/faults/hang.py:" in events["0.1"]["at"]
    for event in events.values():
        assert (event["kind"], event["limit"]) == ("step", 2.5)
        assert event["seconds"] > event["limit"]
        assert event["operation"] >= 2
    assert "0.0" in {line["worker"] for line in result.results}
    assert len(result.of("started")) >= 5, "they were replaced"


def test_hangs_outside_of_steps(tmp_path: Path, undisturbed) -> None:
    plan = "block 0.1 script 2; block 0.2 evaluation 7"
    result = train(tmp_path, plan, limit="4:4", environment=PATIENT)
    assert_nothing_lost(result, undisturbed(STEPS))
    events = assert_found(result, tmp_path, dict.fromkeys(("0.1", "0.2"), "block_forever"))
    assert [events[name]["kind"] for name in ("0.1", "0.2")] == ["script", "evaluation"]


def test_hangs_before_training(tmp_path: Path, undisturbed) -> None:
    """One never connects, and one has connected but never begins. Each replacement is a restart."""
    plan = "block 0.1 start; block 0.2 ready"
    result = train(tmp_path, plan, limit="5:5", max_restarts=2)
    assert_nothing_lost(result, undisturbed(STEPS))
    events = assert_found(result, tmp_path, dict.fromkeys(("0.1", "0.2"), "block_forever"))
    assert [events[name]["kind"] for name in ("0.1", "0.2")] == ["start", "script"]
    assert {line["worker"] for line in result.results} == {"0.0", "0.3", "0.4"}


def test_a_worker_that_never_connects_uses_up_restarts(tmp_path: Path) -> None:
    """Nobody has made a ``Run``: that ends as scripts without one do."""
    result = train(tmp_path, "block 0.0 start; block 0.1 start", limit="1:1", workers=1, max_restarts=1)
    assert result.code == 1
    assert [e["worker"] for e in result.of("stuck")] == ["0.0", "0.1"]


def test_the_stacks_of_a_worker_that_keeps_the_interpreters_lock(tmp_path: Path, undisturbed) -> None:
    """Its heartbeats stay away, and yet it can say where it is."""
    result = train(tmp_path, "greedy 0.1 data 3", limit="off", heartbeat_timeout=1.5)
    assert_nothing_lost(result, undisturbed(STEPS))
    (event,) = result.of("stuck")
    assert event["worker"] == "0.1"
    assert event["cause"].startswith("no heartbeat")
    assert event["at"].endswith(" in keep_the_lock")


@pytest.mark.parametrize("phase", ["regroup", covered("one hangs in another part of a recovery", "copy")])
def test_a_hang_while_another_loss_is_recovered_from(tmp_path: Path, undisturbed, phase: str) -> None:
    faults = f"kill worker=0.2 step=4 phase=forward; lock worker=0.1 phase={phase}"
    result = train(tmp_path, limit="5:5", faults=faults, environment={**PATIENT, "PATIENT": "3", "PAUSE": "0.3"})
    assert_nothing_lost(result, undisturbed(STEPS))
    assert [e["worker"] for e in result.of("stuck")] == ["0.1"]


@pytest.mark.parametrize(
    ("worker", "phase"),
    [
        ("0.1", "write"),
        covered("another worker hangs", "0.0", "write"),
        covered("it hangs later", "0.0", "snapshot"),
        covered("it hangs earlier", "0.0", "commit"),
    ],
)
def test_a_hang_in_a_checkpoint(tmp_path: Path, undisturbed, worker: str, phase: str) -> None:
    """A thread writes it: training goes on until the end waits for that thread."""
    environment = {"CHECKPOINT": str(tmp_path / "checkpoints"), "EVERY": "3"}
    faults = f"lock worker={worker} step=6 phase={phase}"
    result = train(tmp_path, limit="5:5", faults=faults, environment=environment)
    assert_nothing_lost(result, undisturbed(STEPS))
    assert [(e["worker"], e["kind"]) for e in result.of("stuck")] == [(worker, "checkpoint")]
    assert STEPS in {e["step"] for e in result.of("checkpoint")}


@pytest.mark.parametrize("phase", ["forward", covered("it hangs before that", "reduce")])
def test_a_hang_in_a_pipeline(tmp_path: Path, whole, phase: str) -> None:
    """The other stages wait for it, each in its own way, and are not taken for hung."""
    faults = f"spin worker=0.2 step=4 phase={phase}"
    result = judge.train(tmp_path, workers=4, stages="2", faults=faults, step_timeout="2.5:30")
    judge.assert_same(result, whole(judge.STEPS))
    judge.assert_went_on(result, {"0.2"}, first=4)
    assert [e["worker"] for e in result.of("stuck")] == ["0.2"]


def test_slow_is_not_stuck(tmp_path: Path, undisturbed) -> None:
    """A first step, an evaluation and a script that take longer than a step may."""
    plan = "slow 0.0 data 0; slow 0.1 script 3; slow 0.2 evaluation 7"
    result = train(tmp_path, plan, limit="2:60", environment={"SLOW": "3.5"})
    assert_nothing_lost(result, undisturbed(STEPS))
    assert not result.of("stuck")
    assert not result.of("failure")


def test_without_a_limit_nobody_is_judged(tmp_path: Path, undisturbed) -> None:
    """The negative control of the tests above: a step that would be too slow for them."""
    plan = "slow 0.1 data 3"
    assert train(tmp_path / "off", plan, limit="off", environment={"SLOW": "4"}).of("failure") == []
    result = train(tmp_path / "limited", plan, limit="2:60", environment={"SLOW": "60"})
    assert_nothing_lost(result, undisturbed(STEPS))
    assert [e["worker"] for e in result.of("stuck")] == ["0.1"]
