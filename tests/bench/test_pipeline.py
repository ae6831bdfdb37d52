"""``bench pipeline``, small: contestants do the same work, and what is said of it can be false."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.pipelines import fewer_workers, speed_contest
from bench.pipelines import race_models as model
from bench.pipelines.entries import Contestant, PipelineShape
from bench.pipelines.losses import (
    Course,
    LossPlan,
    choose_grid,
    received_bytes,
    replanned,
    restarted,
    run_course,
)
from bench.race_report import publish
from bench.races import pipeline
from bench.running import Running, environment
from holdfast.errors import HoldfastError
from holdfast.plan.profile import uniform

TINY = PipelineShape(model="gpt", layers=4, width=16, seq=8, micro_batch=2, micro_batches=5)
WAITING = PipelineShape(
    model="waiting", layers=4, width=8, micro_batch=1, micro_batches=4, forward_ms=1.0, backward_ms=2.0
)


def losses_of(contestant: Contestant, shape: PipelineShape, folder: Path, steps: int) -> list[float]:
    """What the contestant's workers say that their losses were; those of pipelines are parts of a sum."""
    (command,) = contestant.commands(shape, folder, ["--steps", str(steps)])
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(found)["losses"] for found in re.findall(r'\{"losses".*\}', done.stdout)]
    return [sum(parts) for parts in zip(*said, strict=True)]


def alone(shape: PipelineShape, steps: int) -> list[float]:
    """The same training in a plain loop."""
    args = model.argument_parser(None).parse_args(shape.arguments())
    module = torch.nn.Sequential(*model.build_layers(args))
    optimizer = model.build_optimizer(module.parameters())
    samples = model.Samples(args)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [samples.batch(step=step, micro_batches=range(n, n + 1)) for n in range(shape.micro_batches)]
        each = [model.loss_fn(module(source), target) / shape.micro_batches for source, target in parts]
        sum(each).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in each))
    return losses


@pytest.mark.parametrize(
    ("system", "workers", "stages"),
    [
        ("holdfast", 2, (1, 3)),
        pytest.param(
            "torch", 4, (1, 3), marks=pytest.mark.thorough("what holdfast is compared with; its code changes rarely")
        ),
        pytest.param(
            "torch", 2, (4,), marks=pytest.mark.thorough("what holdfast is compared with; its code changes rarely")
        ),
        pytest.param("torch", 2, (1, 3), marks=pytest.mark.thorough("two pipelines of these stages do the same")),
        pytest.param("torch", 4, (2, 2), marks=pytest.mark.thorough("two pipelines of unequal stages do the same")),
        pytest.param("holdfast", 2, (1,), marks=pytest.mark.thorough("tests/faults has that stages change nothing")),
    ],
)
def test_all_train_the_same(system: str, workers: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    """Torch's pipelines with uneven shares, DDP and holdfast have the losses of a plain loop."""
    contestant = Contestant(system=system, workers=workers, stages=stages)
    assert losses_of(contestant, TINY, tmp_path, 4) == pytest.approx(alone(TINY, 4), rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt", "wide", "waiting"])
def test_models_are_equal_wherever_they_are_built_and_have_the_layers_asked_for(kind: str) -> None:
    args = model.argument_parser(None).parse_args(["--model", kind, "--layers", "5", "--width", "8", "--seq", "4"])
    one, other = model.build_layers(args), model.build_layers(args)
    assert len(one) == 5
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    source, target = model.Samples(args).batch(step=0, micro_batches=range(1))
    assert model.loss_fn(torch.nn.Sequential(*one)(source), target).isfinite()


def test_a_waiting_layer_waits_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(model.time, "sleep", waited.append)
    layer = model.WaitingLayer(4, 0.02, 0.05)
    output = layer(torch.ones(2, 4, requires_grad=True))
    assert waited == [0.02]
    output.sum().backward()
    assert waited == [0.02, 0.05]
    assert layer.inner.weight.grad is not None


# --- the restart ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "stages", "pipelines"), [(6, (6, 6), 3), (5, (6, 6), 2), (4, (6, 6), 2), (3, (4, 4, 4), 1)]
)
def test_grids_are_of_equal_depth(workers: int, stages: tuple[int, ...], pipelines: int) -> None:
    grid = choose_grid(layers=12, workers=workers, minimum=2, micro_batches=12)
    assert (grid.stages, grid.pipelines) == (stages, pipelines)


def test_a_grid_that_cannot_be() -> None:
    with pytest.raises(HoldfastError, match="no grid of 1 workers"):
        choose_grid(layers=12, workers=1, minimum=2, micro_batches=12)
    with pytest.raises(HoldfastError, match="no grid of 5 workers"):  # no depth of 4 or 5 divides 7 layers
        choose_grid(layers=7, workers=5, minimum=4, micro_batches=12)


@pytest.mark.thorough("tests/faults loses workers of pipelines; grids and bars are tested beside this")
def test_both_sides_lose_a_worker(tmp_path: Path) -> None:
    """Holdfast goes on with those left; the restart goes on from its checkpoint with another grid."""
    profile = fewer_workers.make_profile(WAITING, 2, tmp_path / "profile")
    options = fewer_workers._options(profile, tmp_path / "ours")
    ours = Contestant(system="holdfast", workers=3, stages=(1,), options=options)
    with (
        replanned(ours, WAITING, folder=tmp_path / "ours") as mine,
        restarted(WAITING, workers=3, minimum=2, every=3, folder=tmp_path / "theirs") as theirs,
    ):
        sides = {"ours": mine, "theirs": theirs}
        courses = run_course(sides, LossPlan(turns=(1, 2), every=3), workers=3, seed=0)
        starting = theirs.starting_s()
    for course in courses.values():
        assert {left: len(steps) for left, steps in course.step_s.items()} == {3: 1, 2: 2}
        assert course.back_s.keys() == {2}
    assert 0 < starting[2] < courses["theirs"].back_s[2]
    mine_did, theirs_did = (steps_by_pid(tmp_path / name / "progress.jsonl") for name in sides)
    # The loss comes after step 5. Nobody does a step twice here, ...
    assert sorted(mine_did.values())[0] == [1, 2, 3, 4, 5]
    assert [steps[:12] for steps in mine_did.values() if len(steps) > 5] == [list(range(1, 13))] * 2
    # ... and there, fresh processes begin behind step 3, which was saved.
    assert {tuple(steps) for steps in theirs_did.values()} == {(1, 2, 3, 4, 5), tuple(range(4, 13))}


def steps_by_pid(progress: Path) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for line in map(json.loads, progress.read_text().splitlines()):
        if "step" in line:
            steps.setdefault(line["pid"], []).append(line["step"])
    return steps


def test_what_the_one_that_was_sent_the_most_was_sent(tmp_path: Path) -> None:
    events = [
        {"event": "generation", "number": 1, "workers": ["a", "b", "c"]},
        {"event": "entered", "generation": 1, "received": 900},
        {"event": "generation", "number": 2, "workers": ["a", "b"]},
        {"event": "entered", "generation": 2, "received": 30},
        {"event": "entered", "generation": 2, "received": 70},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert received_bytes(tmp_path / "events.jsonl", 3) == {2: 70}


# --- bars -----------------------------------------------------------------------------------------


def courses(**ours: Any) -> fewer_workers.Courses:
    good = Course(
        step_s={6: [0.3], 5: [0.4], 4: [0.5]},
        back_s={5: 0.6, 4: 0.7},
        starting_s={5: 4.0, 4: 4.0},
        received={5: 10, 4: 10},
    )
    theirs = replace(good, step_s={6: [0.3], 5: [0.5], 4: [0.5]}, back_s={5: 8.0, 4: 8.0})
    return {fewer_workers.OURS: [replace(good, **ours)], fewer_workers.THEIRS: [theirs]}


def test_bars_are_missed_by_slow_recoveries_and_idle_workers() -> None:
    sizes = fewer_workers.LossSizes()
    assert all(bar.ok for bar in fewer_workers._bars(sizes, courses()).values())
    idle = fewer_workers._bars(sizes, courses(step_s={6: [0.3], 5: [0.6], 4: [0.5]}))
    assert [bar.ok for bar in idle.values()] == [False, True]
    slow = fewer_workers._bars(sizes, courses(back_s={5: 5.0, 4: 5.0}))
    assert [bar.ok for bar in slow.values()] == [True, False]


def test_what_a_recovery_takes_beside_the_step_and_the_transfer() -> None:
    course = Course(step_s={5: [0.2]}, back_s={5: 0.5}, received={5: 70_000_000})
    assert fewer_workers.beyond_ms(course, bandwidth=1e9) == [200.0]
    assert not fewer_workers._at_most([200.0]).ok
    assert fewer_workers._at_most([100.0]).ok


@pytest.mark.parametrize("minimum", [2, 3, 4])
def test_memory_takes_so_many_workers(minimum: int) -> None:
    profile = uniform(12, saved_bytes=1 << 20)
    limited = replace(profile, memory=fewer_workers.memory_for(profile, minimum))
    _, layout = speed_contest.estimate(limited, workers=12, micro_batches=24, tolerate=1)
    assert layout.minimum == minimum


# --- contests -------------------------------------------------------------------------------------


def test_a_turn_lasts_from_the_last_begin_to_the_last_end(tmp_path: Path) -> None:
    running = Running(folder=tmp_path, workers=2)
    lines = [
        {"t": 1.0, "go": 0, "worker": 0, "pid": 1},
        {"t": 1.5, "go": 0, "worker": 1, "pid": 2},
        {"t": 3.0, "step": 4, "worker": 1, "pid": 2},
        {"t": 4.0, "step": 4, "worker": 0, "pid": 1},
    ]
    running.progress.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert running.take_turn(4) == 2.5
    with pytest.raises(HoldfastError, match="step 5 never came on 2 workers"):
        running.wait_for(5, 2, seconds=0.01)


@pytest.mark.thorough("six contestants at once; turns, ratios and bars are tested beside this")
def test_a_small_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sizes = pipeline.PipelineSizes(computing=TINY, burst=2)
    results, bars = pipeline._computing(sizes, 2, tmp_path / "race", said.append)
    publish("pipeline", results, bars, columns=pipeline.COLUMNS, as_json=True)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(said) == 2
    assert len(printed["bars"]) == 2
    ours = printed["results"]["2 stages: holdfast, exact"]
    assert ours["of_pipelining"]["low"] <= ours["of_pipelining"]["median"] <= ours["of_pipelining"]["high"]
    assert ours["of_estimate"]["median"] > 0
    assert "of_pipelining" not in printed["results"]["2 stages: torch pipelining"]


def test_ratios_are_taken_within_a_round() -> None:
    times = {"theirs": [1.0, 10.0, 2.0], "ours": [2.0, 20.0, 1.0]}
    assert speed_contest.ratio(times, "theirs", "ours") == 0.5
