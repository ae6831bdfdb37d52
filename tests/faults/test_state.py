"""State beside weights, through kills, joins and resumes: the same bits everywhere, or refused by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults import state_train
from tests.faults.judge import covered
from tests.harness import Result, launch

SCRIPT = Path(state_train.__file__)
STEPS = 10


def train(folder: Path, *, workers: int = 3, faults: str = "", steps: int = STEPS, **settings: str) -> Result:
    environment = {"STEPS": str(steps), **settings}
    folder.mkdir(exist_ok=True)
    return launch(folder, script=SCRIPT, workers=workers, faults=faults, environment=environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The hash of an undisturbed run on one worker."""

    @cache
    def found(optimizer: str, layer: str = "plain") -> str:
        return train(tmp_path_factory.mktemp("alone"), workers=1, OPTIMIZER=optimizer, LAYER=layer).sha256

    return found


# --- optimizers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        ("InGroup", "2"),
        ("TensorInGroup", "1"),
        covered("the other layout", "InGroup", "1"),
        covered("the other layout", "TensorInGroup", "2"),
    ],
)
def test_a_counter_in_the_groups_reaches_joiners(tmp_path: Path, alone: Any, optimizer: str, stages: str) -> None:
    """A replacement that began to count at zero would take larger steps."""
    faults = "kill worker=0.1 step=3 phase=backward"
    result = train(tmp_path, workers=4, faults=faults, OPTIMIZER=optimizer, STAGES=stages, WANTED="4", steps=STEPS)
    assert result.code == 0
    assert result.sha256 == alone(optimizer)
    assert any(e["worker"] == "0.4" for e in result.of("commit")), "the replacement has trained"


def test_a_counter_in_the_groups_is_resumed(tmp_path: Path, alone: Any) -> None:
    kept = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "2", "OPTIMIZER": "TensorInGroup"}
    assert train(tmp_path / "first", steps=4, **kept).code == 0
    second = train(tmp_path / "second", workers=2, **kept)
    assert second.code == 0
    assert [e["step"] for e in second.of("resumed")] == [4]
    assert second.sha256 == alone("TensorInGroup")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"OPTIMIZER": "InAttribute"}, "optimizer InAttribute keeps 'k' outside its parameters' state"),
        ({"OPTIMIZER": "UnderText", "STAGES": "3"}, "optimizer UnderText keeps 'k' in its state"),
        ({"OPTIMIZER": "GradientsInGroup", "STAGES": "3"}, "has different values in param_groups[0]['d']"),
        ({"OPTIMIZER": "GradientsInGroup", "POLICY": "LocalSGD(every=2)"}, "different values in param_groups[0]['d']"),
        ({"LAYER": "frozen"}, "the forward pass changes frozen parameter '1.kept'"),
        ({"LAYER": "frozen", "NUMERICS": "fast", "STAGES": "3"}, "the forward pass changes frozen parameter '1.kept'"),
        ({"LAYER": "late"}, "the forward pass changes buffer '1.kept'"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_what_is_not_carried_ends_the_run_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], said: str
) -> None:
    result = train(tmp_path, **settings)
    shown = capsys.readouterr().err.strip()
    assert result.code == 2
    assert said in shown
    assert len(shown.splitlines()) == 1, shown
    assert not result.results


# --- buffers in fast mode -----------------------------------------------------------------------------

FAST = {"LAYER": "counts", "NUMERICS": "fast"}
PHASES = ["forward", "backward", "reduce", "vote", "voted", "update"]


def differing(result: Result) -> set[str]:
    """Names of weights and buffers of which workers hold different copies at the end."""
    copies: dict[str, set[str]] = {}
    for line in result.results:
        for name, digest in line["own"].items():
            copies.setdefault(name, set()).add(digest)
    assert len(copies) > 2
    return {name for name, found in copies.items() if len(found) > 1}


@pytest.mark.parametrize(
    "phase", ["backward", "voted", *(covered("in the middle and after the vote", p) for p in PHASES)]
)
def test_any_buffer_is_equal_on_all_workers_after_a_kill_and_a_join(tmp_path: Path, phase: str) -> None:
    result = train(tmp_path, faults=f"kill worker=0.1 step=3 phase={phase}", WANTED="3", **FAST)
    assert result.code == 0
    assert {line["worker"] for line in result.results} == {"0.0", "0.2", "0.3"}
    assert differing(result) == set()


def test_buffers_that_are_not_restored_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control of the test above: no later step, and no average of its changes, hides a difference."""
    result = train(tmp_path, SABOTAGE="trace", steps=4, **FAST)
    assert result.code == 1
    assert "workers disagree on 1.average" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "step"), [("SelSync(delta=0.0001, warmup=2, aggregate='gradients')", 4), ("LocalSGD(every=3)", 5)]
)
def test_replicas_that_train_apart_end_with_equal_buffers(tmp_path: Path, policy: str, step: int) -> None:
    faults = f"kill worker=0.1 step={step} phase=average"
    result = train(tmp_path, faults=faults, POLICY=policy, WANTED="3", **FAST)
    assert result.code == 0
    assert len(result.of("failure")) == 1
    assert differing(result) == set()


# --- running statistics -------------------------------------------------------------------------------

NORM = {"LAYER": "norm"}


@pytest.mark.parametrize(
    ("phase", "stages"),
    [
        ("voted", "1"),
        ("backward", "2"),
        *(covered("in the middle and after the vote", phase, stages) for phase in PHASES for stages in ("1", "2")),
    ],
)
def test_running_statistics_are_those_of_one_worker(tmp_path: Path, alone: Any, phase: str, stages: str) -> None:
    """On four workers, one of which is killed and replaced."""
    faults = f"kill worker=0.1 step=3 phase={phase}"
    result = train(tmp_path, workers=4, faults=faults, STAGES=stages, WANTED="4", **NORM)
    assert result.code == 0
    assert len(result.results) == 4
    assert result.sha256 == alone("", "norm")
    assert differing(result) == set()


def test_running_statistics_are_resumed_on_another_layout(tmp_path: Path, alone: Any) -> None:
    kept = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "2", **NORM}
    assert train(tmp_path / "first", steps=4, **kept).code == 0
    second = train(tmp_path / "second", workers=2, STAGES="2", **kept)
    assert second.code == 0
    assert [e["step"] for e in second.of("resumed")] == [4]
    assert second.sha256 == alone("", "norm")


def test_control_running_statistics_that_are_not_exchanged_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, SABOTAGE="alone", steps=3, NUMERICS="fast", **NORM)
    assert result.code == 1
    assert "workers disagree on 1.0.running_mean" in capsys.readouterr().err


@pytest.mark.parametrize("numerics", ["exact", covered("the other mode", "fast")])
def test_replicas_that_train_apart_end_with_equal_running_statistics(tmp_path: Path, numerics: str) -> None:
    result = train(tmp_path, workers=2, POLICY="LocalSGD(every=3)", NUMERICS=numerics, **NORM)
    assert result.code == 0
    assert len(result.results) == 2
    assert differing(result) == set()
