"""``bench replay``, small: each way does what it is there for, and what is said of it can be false."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.pipelines.entries import PipelineShape
from bench.pipelines.fewer_workers import make_profile
from bench.races import replay
from bench.replays import budget, replay_pictures
from bench.replays.trial import BASE, Ground, KillOutcome, Way, kill_after, make_checkpoint, step_seconds, story
from holdfast.errors import HoldfastError, UsageError
from holdfast.plan.profile import uniform

# Kills with real processes, each of half a minute.
killing = pytest.mark.thorough("tests/faults has kills with a log; what is made of their events is tested below")
# Layers sleep: a step takes long enough for a kill in its middle, on a busy machine too.
SLOW = PipelineShape(
    model="waiting", layers=3, width=32, micro_batch=8, micro_batches=4, forward_ms=20.0, backward_ms=30.0
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("ground")
    profile = replace(make_profile(SLOW, 2, folder / "profile"), memory=None)
    path = folder / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    made = Ground(shape=SLOW, workers=3, profile=path, checkpoint=folder / "checkpoint")
    make_checkpoint(made, folder / "first")
    return made


@killing
def test_a_replay_spares_the_others(ground: Ground, tmp_path: Path) -> None:
    outcome = kill_after(ground, replay.PARALLEL, steps=3, stage=1, folder=tmp_path / "run")
    assert (outcome.layers, outcome.resumed, outcome.steps) == ((1,), None, 3)
    assert outcome.replayed is not None
    assert 0 < outcome.replayed < outcome.seconds
    crossing = 2 * 2 * SLOW.micro_batches * SLOW.micro_batch * SLOW.width * 4  # two boundaries, there and back
    assert outcome.predicted_bytes == crossing
    assert outcome.measured_bytes >= crossing
    assert outcome.step_seconds > 0


@killing
def test_without_a_log_everyone_goes_back(ground: Ground, tmp_path: Path) -> None:
    outcome = kill_after(ground, replay.RETURN, steps=2, stage=1, folder=tmp_path / "run")
    assert (outcome.layers, outcome.replayed, outcome.predicted_bytes) == ((), None, 0)
    assert outcome.resumed is not None
    assert outcome.resumed < outcome.seconds
    assert not (tmp_path / "run" / "checkpoints").exists()


@killing
def test_a_budget_that_holds_nothing(ground: Ground, tmp_path: Path) -> None:
    """Nothing is logged, so nothing can be spared: as without a log."""
    way = Way(name="none", options=("--log", *budget.budget_options(1000, 0)))
    outcome = kill_after(ground, way, steps=2, stage=0, folder=tmp_path / "run")
    assert (outcome.layers, outcome.replayed, outcome.predicted_bytes, outcome.measured_bytes) == ((), None, 0, 0)
    assert outcome.resumed is not None


@killing
def test_a_checkpoint_that_cannot_be_made(ground: Ground, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="no checkpoint to begin from"):
        make_checkpoint(replace(ground, profile=tmp_path / "nowhere.json", checkpoint=tmp_path / "c"), tmp_path / "f")


def test_what_events_say() -> None:
    told = [
        {"event": "failure", "t": 1.1},
        {"event": "replay", "t": 3.0, "seconds": 1.5, "layers": [[1, 3], [4, 5]]},
        {"event": "replay", "t": 3.0, "seconds": 1.7, "layers": [[1, 3], [4, 5]]},
    ]
    assert story(told, 1.0) == {"replayed": 1.7, "resumed": None, "layers": (1, 2, 4)}
    assert story([{"event": "resumed", "t": 3.5}], 1.0) == {"replayed": None, "resumed": 2.5, "layers": ()}


def test_the_usual_time_of_a_step_is_that_of_later_ones() -> None:
    ends = [0.0, 9.0, 10.0, 11.0, 12.0]  # the first one took long
    lines = [{"step": BASE + 1 + number, "t": end} for number, end in enumerate(ends)]
    assert step_seconds(lines) == 1.0
    assert step_seconds(lines[:1]) == 0.0


# --- what is said of it ------------------------------------------------------------------------------


def outcome(seconds: float, *, replayed: float | None = 1.0, steps: int = 5) -> KillOutcome:
    return KillOutcome(
        seconds=seconds,
        replayed=replayed,
        resumed=None if replayed is not None else 1.0,
        layers=(2,) if replayed is not None else (),
        steps=steps,
        step_seconds=0.5,
        predicted_bytes=100,
        measured_bytes=101.0,
    )


def outcomes(parallel: Sequence[float], back: Sequence[float]) -> replay.Outcomes:
    steps = (5, 10, 50)[: len(parallel)]
    return {
        replay.PARALLEL.name: {n: [outcome(s)] * 3 for n, s in zip(steps, parallel, strict=True)},
        replay.ALONE.name: {n: [outcome(2 * s)] * 3 for n, s in zip(steps, parallel, strict=True)},
        replay.RETURN.name: {n: [outcome(s, replayed=None)] * 3 for n, s in zip(steps, back, strict=True)},
    }


def missed(found: replay.Outcomes) -> list[str]:
    return [name for name, bar in replay.bars_of(found).items() if not bar.ok]


def test_bars_can_be_missed() -> None:
    good = outcomes([1.0, 2.0, 4.0], [2.0, 5.0, 12.0])
    assert missed(good) == []
    assert [name[:8] for name in missed(outcomes([1.0, 2.0, 4.0], [2.0, 5.0, 11.9]))] == ["50 steps"]
    assert [name[:8] for name in missed(outcomes([1.0, 2.0, 4.0], [9.0, 9.0, 12.0]))] == ["the more"]
    good[replay.PARALLEL.name][10][1] = outcome(5.0, replayed=None)  # it fell back, and would be measured as a replay
    assert [name[:10] for name in missed(good)] == ["everyone's"]


def test_rows_have_ratios_of_the_same_round() -> None:
    found = outcomes([1.0, 2.0], [2.0, 5.0])
    results = replay.rows(found)
    assert results[f"10 steps: {replay.RETURN.name}"]["of_parallel"]["median"] == 2.5
    assert results[f"10 steps: {replay.PARALLEL.name}"]["of_parallel"] is None
    assert results[f"5 steps: {replay.RETURN.name}"]["replay_s"] is None


@pytest.mark.parametrize("text", ["", "5,x", "0,5"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        replay.parse_steps(text)


# --- budgets -----------------------------------------------------------------------------------------

FIXED = budget.Fixed(replay=0.5, back=2.0)


def estimate(workers: int = 4, cores: int = 2) -> budget.Estimate:
    profile = uniform(8, forward=0.01, backward=0.02)
    return budget.Estimate(profile=profile, micro_batches=10, workers=workers, cores=cores, fixed=FIXED)


@given(st.sets(st.integers(0, 7), min_size=1), st.integers(0, 7), st.integers(1, 50), st.integers(2, 8))
def test_more_work_is_never_sooner_done(layers: set[int], more: int, steps: int, cores: int) -> None:
    made = estimate(cores=cores)
    assert made.seconds(sorted(layers | {more}), steps=steps) >= made.seconds(sorted(layers), steps=steps)
    assert made.seconds(sorted(layers), steps=steps + 1) > made.seconds(sorted(layers), steps=steps)
    assert estimate(cores=cores - 1).seconds(sorted(layers), steps=steps) >= made.seconds(sorted(layers), steps=steps)
    assert made.seconds(sorted(layers), steps=0) == FIXED.replay


@pytest.mark.parametrize(("cores", "seconds"), [(1, 3.5), (2, 2.0), (100, 1.5)])
def test_neither_cores_nor_workers_that_are_not_there_help(cores: int, seconds: float) -> None:
    """Three survivors have 5 steps of 10 micro-batches of 2 layers to compute, 30 ms each."""
    assert estimate(cores=cores).seconds([2, 3], steps=5) == pytest.approx(seconds)


def test_fixed_costs_are_what_is_left() -> None:
    replays = [outcome(3.0, replayed=2.0), outcome(9.0, replayed=8.5), outcome(4.0, replayed=2.0)]
    back = [outcome(3.0, replayed=None)]
    assert budget.fixed_costs(replays, back) == budget.Fixed(replay=1.0, back=1.5)


def points() -> list[budget.Point]:
    made = [(0, 0, 0.0, (4, 4)), (1, 50, 51.0, (3, 3)), (2, 50, 50.0, (3, 1)), (3, 150, 151.0, (1, 1))]
    return [
        budget.Point(
            parts=parts,
            budget=50 * parts,
            predicted_bytes=predicted,
            measured_bytes=measured,
            predicted_s=(2.0, 3.0),
            measured_s=(2.5, 3.0),
            layers=layers,
        )
        for parts, predicted, measured, layers in made
    ]


def test_budget_bars_can_be_missed() -> None:
    def missed(found: list[budget.Point]) -> list[str]:
        return [name[:7] for name, bar in budget.bars_of(found).items() if not bar.ok]

    good = points()
    assert missed(good) == []
    assert missed([*good[:3], replace(good[3], measured_bytes=158.0)]) == ["bytes b"]
    assert missed([replace(good[0], measured_bytes=10.0), *good[1:]]) == ["bytes b"]  # nothing was to be logged
    assert missed([*good[:2], replace(good[2], predicted_bytes=101, measured_bytes=101.0), good[3]]) == ["budgets"]
    assert missed([*good[:3], replace(good[3], layers=(3, 3))]) == ["budgets"]
    assert missed([*good[:3], replace(good[3], layers=(1, 4))]) == ["budgets"]  # everyone went back


def test_pictures(tmp_path: Path) -> None:
    seconds = {"one": {5: [1.0, 2.0], 10: [2.0, 3.0]}, "other": {5: [4.0, 5.0], 10: [6.0, 7.0]}}
    replay_pictures.draw_steps(tmp_path / "steps.png", seconds)
    replay_pictures.draw_budgets(tmp_path / "budgets.png", points(), steps=10)
    assert all((tmp_path / name).read_bytes()[1:4] == b"PNG" for name in ("steps.png", "budgets.png"))
