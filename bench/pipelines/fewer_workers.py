"""Contest on fewer and fewer workers: step times against a restart's and the planner's estimate, and time per loss."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from bench.pipelines.speed_contest import estimate
from bench.race_report import Bar, Say
from bench.running import can_limit, environment
from holdfast.engine.profile.links import measure_inside
from holdfast.errors import HoldfastError
from holdfast.measuring import spread
from holdfast.plan.profile import Profile
from holdfast.words import size_text

BEYOND_MS = 150.0  # bar: ms that a recovery may take beyond the redone step and the transfer
LINK_SHARE = 0.7  # share of the bandwidth that a transfer is expected to reach
OURS, THEIRS = "holdfast", "restart"
LIGHT = PipelineShape(model="waiting", layers=12, micro_batches=12)
HEAVY = PipelineShape(model="waiting", layers=12, micro_batches=8, width=1024)  # 12.6 MB to send for a layer
TWO_LOSSES = LossPlan()
ONE_LOSS = LossPlan(turns=(1, 2))
Courses = dict[str, list[Course]]


@dataclass(frozen=True, kw_only=True)
class LossSizes:
    """Sizes of the contest: a pipeline takes at least ``minimum`` of the ``workers``."""

    shape: PipelineShape = LIGHT
    workers: int = 6
    minimum: int = 2
    losses: LossPlan = TWO_LOSSES
    heavy: PipelineShape = HEAVY
    heavy_workers: int = 4
    heavy_losses: LossPlan = ONE_LOSS
    gigabits: int = 2  # of the link that the heavy ones share


def race(sizes: LossSizes, *, rounds: int, folder: Path, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let both systems lose workers, beside each other, then send layers over a slow link; return results and bars."""
    profile = make_profile(sizes.shape, sizes.minimum, folder / "profile")
    courses: Courses = {OURS: [], THEIRS: []}
    for number in range(rounds):
        for name, course in _both(sizes, profile, folder / str(number), number).items():
            courses[name].append(course)
            say(f"fewer workers, round {number + 1}/{rounds}: {name}: {told(course)}")
    bandwidth = measure_inside().link.bandwidth
    beyond = [each for course in courses[OURS] for each in beyond_ms(course, bandwidth)]
    results = _rows(sizes, courses, profile)
    bars = {**_bars(sizes, courses), "ms beyond the redone step and the transfer": _at_most(beyond)}
    if can_limit():
        more, beyond = _heavy(sizes, rounds, folder / "heavy", say)
        results |= more
        bars[f"the same on {sizes.gigabits} Gbit/s"] = _at_most(beyond)
    return results, bars


def _both(sizes: LossSizes, profile: Profile, folder: Path, seed: int) -> dict[str, Course]:
    workers, every = sizes.workers, sizes.losses.every
    ours = Contestant(system="holdfast", workers=workers, stages=(1,), options=_options(profile, folder / OURS))
    restart = restarted(sizes.shape, workers=workers, minimum=sizes.minimum, every=every, folder=folder / THEIRS)
    with replanned(ours, sizes.shape, folder=folder / OURS) as mine, restart as theirs:
        courses = run_course({OURS: mine, THEIRS: theirs}, sizes.losses, workers=workers, seed=seed)
    courses[THEIRS].starting_s = theirs.starting_s()
    courses[OURS].received = received_bytes(folder / OURS / "logs" / "events.jsonl", workers)
    return courses


def _heavy(sizes: LossSizes, rounds: int, folder: Path, say: Say) -> tuple[dict[str, Any], list[float]]:
    """Lose a worker where layers are large and the link is slow, so that sending takes time."""
    profile = make_profile(sizes.heavy, sizes.minimum, folder / "profile")
    workers, rate = sizes.heavy_workers, f"{sizes.gigabits}gbit"
    courses = []
    for number in range(rounds):
        at = folder / str(number)
        ours = Contestant(system="holdfast", workers=workers, stages=(1,), options=_options(profile, at), rate=rate)
        with replanned(ours, sizes.heavy, folder=at) as side:
            course = run_course({OURS: side}, sizes.heavy_losses, workers=workers, seed=number)[OURS]
        course.received = received_bytes(at / "logs" / "events.jsonl", workers)
        courses.append(course)
        say(f"large layers, round {number + 1}/{rounds}: {told(course)}")
    left = workers - 1
    sent = max(course.received.get(left, 0) for course in courses)
    row = {
        "step_ms": _ms([step for course in courses for step in course.step_s[left]]),
        **_back(courses, left),
        "note": f"up to {size_text(sent)} sent to a worker",
    }
    title = f"{left} workers, waiting, {sizes.gigabits} Gbit/s: holdfast"
    return {title: row}, [each for course in courses for each in beyond_ms(course, sizes.gigabits * 1e9 / 8)]


# --- the plan ----------------------------------------------------------------------------------------


def make_profile(shape: PipelineShape, minimum: int, folder: Path) -> Profile:
    """Return what ``holdfast profile`` measures, with the memory that makes a pipeline take ``minimum`` workers."""
    folder.mkdir(parents=True, exist_ok=True)
    target = (folder / "profile.json").absolute()
    script = ["-m", "bench.pipelines.pipeline_entry", *shape.arguments()]
    command = [sys.executable, "-m", "holdfast.cli", "profile", "--fresh", "-o", str(target), *script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise HoldfastError(f"the model could not be profiled: {done.stderr[-2000:]}")
    profile = Profile.from_json(json.loads(target.read_text()))
    return replace(profile, memory=memory_for(profile, minimum))


def memory_for(profile: Profile, minimum: int) -> int:
    """Return bytes of a worker so that fewer than ``minimum`` of them cannot hold all layers.

    >>> from holdfast.plan.profile import uniform
    >>> memory_for(uniform(12, weight_bytes=10, saved_bytes=0), 2)
    440
    """
    largest = max(layer.resident_bytes + 2 * minimum * layer.saved_bytes for layer in profile.layers)
    return largest * (len(profile.layers) // (minimum - 1) - 1)


def _options(profile: Profile, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    return ["--profile", str(path), "--memory", str(profile.memory), "--tolerate", "1"]


# --- results -----------------------------------------------------------------------------------------


def told(course: Course) -> str:
    """Return a course in words.

    >>> told(Course(step_s={3: [0.1], 2: [0.2, 0.3, 0.2]}, back_s={2: 0.5}))
    '3 workers 100 ms a step, 2 workers 200 ms a step after 500 ms'
    """
    return ", ".join(
        f"{left} workers {1000 * statistics.median(steps):.0f} ms a step"
        + (f" after {1000 * course.back_s[left]:.0f} ms" if left in course.back_s else "")
        for left, steps in course.step_s.items()
    )


def beyond_ms(course: Course, bandwidth: float) -> list[float]:
    """Return the ms of each recovery beyond the redone step and the transfer, at ``LINK_SHARE`` of the bandwidth.

    >>> beyond_ms(Course(step_s={3: [0.1], 2: [0.2]}, back_s={2: 0.5}, received={2: 700}), bandwidth=10_000.0)
    [200.0]
    """
    return [
        round(1000 * (back - statistics.median(course.step_s[left]) - _transfer(course, left, bandwidth)), 3)
        for left, back in course.back_s.items()
    ]


def _transfer(course: Course, left: int, bandwidth: float) -> float:
    return course.received.get(left, 0) / (LINK_SHARE * bandwidth)


def _rows(sizes: LossSizes, courses: Courses, profile: Profile) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for left in courses[OURS][0].step_s:
        ours, theirs = ([step for course in courses[name] for step in course.step_s[left]] for name in (OURS, THEIRS))
        promised, layout = estimate(profile, workers=left, micro_batches=sizes.shape.micro_batches, tolerate=1)
        grid = choose_grid(
            layers=sizes.shape.layers, workers=left, minimum=sizes.minimum, micro_batches=sizes.shape.micro_batches
        )
        results[f"{left} workers, waiting: {OURS}"] = {
            "step_ms": _ms(ours),
            "of_pipelining": spread([a / b for a, b in zip(theirs, ours, strict=True)]),
            "of_estimate": spread([promised / each for each in ours]),
            **_back(courses[OURS], left),
            "note": layout.reason,
        }
        note = f"{grid.pipelines} x {len(grid.stages)}"
        if left in courses[THEIRS][0].starting_s:
            starting = statistics.median(course.starting_s[left] for course in courses[THEIRS])
            note += f"; {starting:.1f} s until interpreters and imports are there"
        results[f"{left} workers, waiting: {THEIRS}"] = {
            "step_ms": _ms(theirs),
            **_back(courses[THEIRS], left),
            "note": note,
        }
    return results


def _back(courses: Sequence[Course], left: int) -> dict[str, Any]:
    return {"back_s": spread([course.back_s[left] for course in courses])} if left in courses[0].back_s else {}


def _bars(sizes: LossSizes, courses: Mapping[str, Sequence[Course]]) -> dict[str, Bar]:
    """Return the bars: speed with one worker less, where a grid leaves one idle, and the time back after a loss."""
    left = sizes.workers - 1
    pairs = list(zip(courses[THEIRS], courses[OURS], strict=True))
    steps = [a / b for theirs, ours in pairs for a, b in zip(theirs.step_s[left], ours.step_s[left], strict=True)]
    backs = [(theirs.back_s[n] - theirs.starting_s[n]) / ours.back_s[n] for theirs, ours in pairs for n in ours.back_s]
    return {
        f"speed on {left} workers, of the restart's": Bar(value=statistics.median(steps), bar=1.0),
        "back after a loss: the restart without its imports, of holdfast": Bar(value=statistics.median(backs), bar=1.0),
    }


def _at_most(beyond: Sequence[float]) -> Bar:
    return Bar(value=statistics.median(beyond), bar=BEYOND_MS, at_most=True)


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return spread([1000 * each for each in seconds])
