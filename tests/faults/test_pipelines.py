"""Pipelines of every shape, and kills in every phase and stage: the weights must be those of one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.faults.judge import (
    PIPELINE,
    STEPS,
    assert_only_what_is_missing_moves,
    assert_same,
    assert_went_on,
    covered,
    generations,
    kill,
    kill_at_once,
    places,
    sweep,
    train,
)
from tests.harness import Result

LAYOUTS = [
    *((workers, "auto", tolerate, {}) for workers in range(1, 9) for tolerate in (0, 1, 2)),
    *((workers, str(stages), 1, {}) for workers in range(1, 9) for stages in range(1, 9)),
    *((workers, "1,5,4", tolerate, {}) for workers in (2, 3, 5, 6, 7) for tolerate in (0, 1)),
    *((workers, "1,1,1,1,1,1,1,1,1,1", 0, {}) for workers in (4, 8)),
    *((workers, "9,1", 2, {}) for workers in (2, 6, 8)),
    *((workers, "auto", tolerate, {"MEMORY": "260kB"}) for workers in range(2, 9) for tolerate in (0, 1, 2)),
    *((workers, "auto", tolerate, {"MEMORY": "200kB"}) for workers in range(4, 9) for tolerate in (0, 1)),
]
# The others' numbers of workers, stages and copies are all among these, and among those of the tests below.
TYPICAL = [
    (6, "auto", 2, {}),
    (3, "2", 1, {}),
    (2, "1,5,4", 0, {}),
    (7, "auto", 1, {"MEMORY": "200kB"}),
]

PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]
STAGES = {"first": "0.0", "middle": "0.1", "last": "0.2"}
KILLS = [(phase, stage) for phase in PHASES for stage in STAGES]
SOME_KILLS = [("forward", "middle"), ("reduce", "last"), ("update", "first")]  # test_sweep.py has every phase
PAIRS = [(f"0.{one}", f"0.{other}") for one in range(6) for other in range(one + 1, 6)]
HANGS = [(phase, stage) for phase in ("forward", "backward", "reduce", "vote") for stage in STAGES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, "layout", LAYOUTS, TYPICAL)
    sweep(metafunc, "strike", KILLS, SOME_KILLS)
    sweep(metafunc, "hang", HANGS, [("forward", "middle")])
    sweep(metafunc, "pair", PAIRS, [("0.2", "0.4")])


def test_the_layout_does_not_matter(tmp_path: Path, whole, layout: tuple[int, str, int, dict[str, str]]) -> None:
    workers, stages, tolerate, more = layout
    result = train(tmp_path, workers=workers, stages=stages, tolerate=tolerate, **more)
    assert_same(result, whole(STEPS))
    assert not result.of("failure")
    assert len(result.results) == workers
    held = places(result, 1)
    if "," in stages and workers >= len(stages.split(",")):
        assert [len(layers) for layers in held.values() if layers].count(10) == 0, "nobody holds everything"
    if "MEMORY" in more:
        assert all(0 < len(layers) < 10 for layers in held.values() if layers), held
    copies = [sum(layer in layers for layers in held.values()) for layer in range(10)]
    assert min(copies) >= 1
    if workers >= 2 * (tolerate + 1) and stages == "auto" and not more:
        assert min(copies) > tolerate, copies


def test_one_process_without_an_agent_is_the_same(tmp_path: Path, whole) -> None:
    results = tmp_path / "results.jsonl"
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(STEPS), "STAGES": "3", "RESULTS": str(results)}
    command = [sys.executable, "-m", "tests.faults.pipeline"]
    subprocess.run(command, env=settings, cwd=PIPELINE.parents[2], check=True, timeout=60)
    assert whole(STEPS).sha256 in results.read_text()


SIX = {"workers": 6, "stages": "3,4,3", "max_restarts": 0}  # 0.0, 0.1, 0.2 and 0.3, 0.4, 0.5


def test_kill(tmp_path: Path, whole, strike: tuple[str, str]) -> None:
    phase, stage = strike
    result = train(tmp_path, faults=kill([STAGES[stage]], phase=phase), **SIX)
    assert_same(result, whole(STEPS))
    assert_went_on(result, {STAGES[stage]}, first=6)
    assert len(result.of("recovery")) == 1


def test_hang(tmp_path: Path, whole, hang: tuple[str, str]) -> None:
    phase, stage = hang
    faults = f"stop worker={STAGES[stage]} step=4 phase={phase}"
    result = train(tmp_path, faults=faults, heartbeat_timeout=1.5, **SIX)
    assert_same(result, whole(STEPS))
    assert_went_on(result, {STAGES[stage]}, first=6)
    assert "heartbeat" in result.of("failure")[0]["cause"]


def test_two_at_once(tmp_path: Path, whole, pair: tuple[str, str]) -> None:
    """Three pipelines of two stages: any two may go, the two holders of the same layers among them."""
    result = train(tmp_path, workers=6, stages="4,6", tolerate=2, max_restarts=0, faults=kill_at_once(pair))
    assert_same(result, whole(STEPS))
    assert_went_on(result, set(pair), first=6)


def test_a_whole_pipeline_is_killed(tmp_path: Path, whole) -> None:
    """More than were to be tolerated, but every layer has a copy left: training goes on without a checkpoint."""
    result = train(tmp_path, faults=kill_at_once(["0.0", "0.1", "0.2"]), **SIX)
    assert_same(result, whole(STEPS))
    assert_went_on(result, {"0.0", "0.1", "0.2"}, first=6)
    assert places(result, generations(result)[-1]) == {"0.3": range(3), "0.4": range(3, 7), "0.5": range(7, 10)}


def test_one_after_the_other_until_one_is_left(tmp_path: Path, whole) -> None:
    """Each time those who are left form other pipelines; in the end one of them has all layers."""
    faults = "; ".join(f"kill worker=0.{number} step={number + 1} phase=backward" for number in range(5))
    result = train(tmp_path, workers=6, stages="auto", tolerate=1, max_restarts=0, faults=faults)
    assert_same(result, whole(STEPS))
    assert [line["worker"] for line in result.results] == ["0.5"]


def test_who_has_nothing_to_do_is_lost(tmp_path: Path, whole) -> None:
    result = train(tmp_path, workers=4, stages="3,4,3", tolerate=0, max_restarts=0, faults=kill(["0.3"], phase="vote"))
    assert_same(result, whole(STEPS))
    assert_went_on(result, {"0.3"}, first=4)
    assert not sum(assert_only_what_is_missing_moves(result, 1, 2).values()), "nobody lacks anything"


@pytest.mark.thorough("test_errors.py has the error of one")
def test_an_error_of_one_worker_is_survived(tmp_path: Path, whole) -> None:
    result = train(tmp_path, faults="raise worker=0.1 step=4 phase=forward", **SIX)
    assert_same(result, whole(STEPS))
    assert_went_on(result, {"0.1"}, first=6)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Undisturbed, on one worker, with a layer whose messages are large."""
    return train(tmp_path_factory.mktemp("wide"), workers=1, stages="1", steps=4, HIDDEN="60000")


@pytest.mark.parametrize(
    ("worker", "count"),
    [("0.3", 5), *(covered("another one dies sending", *case) for case in (("0.0", 1), ("0.1", 2)))],
)
def test_kill_in_the_middle_of_a_large_message(tmp_path: Path, wide: Result, worker: str, count: int) -> None:
    """Of the first values; of gradients. Gloo tells nobody of a receive whose message breaks off."""
    meddle = f"sending {worker} {count}"
    result = train(tmp_path / "a", workers=4, stages="4,6", steps=4, max_restarts=0, HIDDEN="60000", MEDDLE=meddle)
    assert result.sha256 == wide.sha256
    assert result.losses == wide.losses
    assert [e["worker"] for e in result.of("failure")] == [worker]


def test_layers_that_each_worker_makes(tmp_path: Path) -> None:
    """Functions instead of layers: nobody is sent first values, and nobody ever has all layers."""
    one = train(tmp_path / "one", workers=1, stages="1", LATER="1")
    result = train(tmp_path / "six", faults=kill(["0.0"], phase="reduce"), LATER="1", **SIX)
    assert_same(result, one)
    assert_went_on(result, {"0.0"}, first=6)
    assert not any(e["received"] for e in result.of("entered") if e["generation"] == 1)


def test_fast_numerics_survives_too(tmp_path: Path, whole) -> None:
    result = train(tmp_path, faults=kill(["0.1"], phase="reduce"), NUMERICS="fast", **SIX)
    assert result.code == 0
    assert result.sha256, "all workers agree"
    assert result.losses == pytest.approx(whole(STEPS).losses, rel=1e-3)
    assert_went_on(result, {"0.1"}, first=6)


# --- votes that only some have heard -------------------------------------------------------------------


@pytest.mark.parametrize(
    "count",
    [*(covered("an evaluation is voted on as this is", count) for count in (1, 3, 11, 13)), 5],
    ids=["first step", "step", "hash", "end", "evaluation"],
)
def test_who_has_not_heard_the_vote_rolls_forward(tmp_path: Path, whole, count: int) -> None:
    """0.0 votes and hears nobody; 0.1 commits and dies; the others commit."""
    votes = f"deaf 0.0 {count}; die 0.1 {count}"
    result = train(tmp_path, workers=4, stages="5,5", max_restarts=0, MEDDLE=votes)
    assert_same(result, whole(STEPS))
    assert_went_on(result, {"0.1"}, first=4)


@pytest.mark.parametrize("saves", [False, covered("the same without saving", True)])
def test_what_was_not_updated_does_not_pass_for_a_copy(tmp_path: Path, whole, saves: bool) -> None:
    """0.0 has the initial values of all layers, and rolls forward with its own: the others are no copies of it."""
    faults = "kill worker=0.3 step=1 phase=backward; kill worker=0.1 step=1 phase=regroup"
    more = {"CHECKPOINT": str(tmp_path / "saved")} if saves else {}
    result = train(tmp_path / "a", workers=4, stages="5,5", MEDDLE="deaf 0.0 1", faults=faults, **more)
    if saves:  # there is no checkpoint yet: all begin again
        assert_same(result, whole(STEPS))
    else:
        assert result.code == 3
        assert not [e for e in result.of("commit") if e["step"] > 0]


# --- what is saved -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "stages"),
    [(3, "2"), *(covered("other stages save theirs as well", *case) for case in ((6, "auto"), (4, "4")))],
)
def test_the_model_file_is_the_same(tmp_path: Path, whole, workers: int, stages: str) -> None:
    expected = whole(STEPS)
    model = tmp_path / "model.safetensors"
    train(tmp_path, workers=workers, stages=stages, MODEL=str(model))
    assert_same_file(model, model_of(expected))


def test_the_writer_of_the_model_is_killed(tmp_path: Path, whole) -> None:
    model = tmp_path / "model.safetensors"
    result = train(tmp_path, workers=4, stages="5,5", MODEL=str(model), MEDDLE="die 0.0 11", max_restarts=0)
    assert_same(result, whole(STEPS))
    assert_same_file(model, model_of(whole(STEPS)))


def model_of(result: Result) -> Path:
    return Path(result.results[0]["model"])


def assert_same_file(one: Path, other: Path) -> None:
    assert one.read_bytes() == other.read_bytes()
    assert len(load_file(one)) == len(load_file(other)) > 20


# --- controls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sabotage",
    ["skip-gradient", "repeat-sample", covered("test_controls.py has it", "double-update")],
)
def test_control_the_hash_notices(tmp_path: Path, whole, sabotage: str) -> None:
    """All workers do it, so that copies still agree with each other: only the hash can tell."""
    faults = "; ".join(f"{sabotage} worker=0.{number} step=4" for number in range(4))
    result = train(tmp_path, workers=4, stages="4,6", faults=faults)
    assert result.code == 0
    assert result.sha256 != whole(STEPS).sha256
    assert result.losses[:4] == whole(STEPS).losses[:4]
    assert result.losses != whole(STEPS).losses


def test_control_copies_that_differ_are_noticed(tmp_path: Path) -> None:
    result = train(tmp_path, workers=4, stages="4,6", faults="double-update worker=0.1 step=4")
    assert result.code == 1
    assert result.of("stop")
    assert not result.results, "nobody ends with a hash"
