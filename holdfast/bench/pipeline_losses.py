"""Workers lost one after the other: pipelines that are planned anew, against a restart with another grid.

The restart is Varuna's way: pipelines of equal depth, which divides the layers, as many as fit into the workers
that are left; all processes end, fresh ones load the last checkpoint and do the lost steps again. It is told of a
loss at once, its checkpoints are not synced to disk, and starting its interpreters can be taken off.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.bench.pipeline_start import Contestant, Running, Shape, started, started_by_hand
from holdfast.cluster.events import read_events
from holdfast.errors import HoldfastError

RESTART_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Losses:
    """After which steps a worker is lost, and the last step."""

    after: tuple[int, ...]
    last: int
    every: int = 6  # steps from checkpoint to checkpoint; a loss in the middle loses what it does on average


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Pipelines of equal depth side by side."""

    stages: tuple[int, ...]  # layers of each
    pipelines: int

    @property
    def workers(self) -> int:
        return len(self.stages) * self.pipelines


def choose_grid(*, layers: int, workers: int, minimum: int, micro_batches: int) -> Grid:
    """The fastest grid of at least ``minimum`` stages, each with as many of the equal layers.

    >>> choose_grid(layers=12, workers=5, minimum=2, micro_batches=12)
    Grid(stages=(6, 6), pipelines=2)
    >>> choose_grid(layers=12, workers=3, minimum=2, micro_batches=12)
    Grid(stages=(4, 4, 4), pipelines=1)
    """
    grids = [
        Grid(stages=(layers // depth,) * depth, pipelines=workers // depth)
        for depth in range(minimum, workers + 1)
        if layers % depth == 0 and micro_batches // (workers // depth) >= depth
    ]
    if not grids:
        raise HoldfastError(f"no grid of {workers} workers holds {layers} layers", hint="fewer layers a stage")

    def seconds(grid: Grid) -> float:
        """Of 1F1B: every micro-batch, and one for each further stage, passes through a stage."""
        share = -(-micro_batches // grid.pipelines)
        return (share + len(grid.stages) - 1) * grid.stages[0]

    return min(grids, key=seconds)


@dataclass(kw_only=True)
class Course:
    """What was measured while workers were lost: by the number of workers that were left."""

    step_s: dict[int, float] = field(default_factory=dict)
    back_s: dict[int, float] = field(default_factory=dict)  # from the loss to the next new step of all
    starting_s: dict[int, float] = field(default_factory=dict)  # of which until the last interpreter has its imports
    received: dict[int, int] = field(default_factory=dict)  # bytes, of the worker that got the most


def finished(lines: Sequence[dict[str, Any]], step: int, workers: int, *, after: float) -> float | None:
    """When the last of so many workers had finished this step, if all have.

    >>> lines = [{"pid": 1, "step": 3, "t": 5.0}, {"pid": 2, "step": 3, "t": 6.0}]
    >>> finished(lines, 3, 2, after=0.0), finished(lines, 3, 3, after=0.0)
    (6.0, None)
    """
    times = {line["pid"]: line["t"] for line in lines if line.get("step") == step and line["t"] > after}
    return float(max(times.values())) if len(times) >= workers else None


def wait_until(running: Running, step: int, workers: int, *, after: float = 0.0) -> float:
    deadline = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < deadline:
        when = finished(running.update(), step, workers, after=after)
        if when is not None:
            return when
        time.sleep(0.005)
    raise HoldfastError(f"step {step} never came on {workers} workers", hint=f"see {running.folder}/output.log")


def step_seconds(lines: Sequence[dict[str, Any]], *, after: float) -> float:
    """The median time between two steps, of the workers that have written since then."""
    by_pid: dict[int, list[float]] = {}
    for line in lines:
        if "step" in line and line["t"] >= after:
            by_pid.setdefault(line["pid"], []).append(line["t"])
    gaps = [b - a for times in by_pid.values() for a, b in itertools.pairwise(times)]
    return statistics.median(gaps)


def lose(
    running: Running, losses: Losses, *, workers: int, training: int, react: Callable[[int, int], int], seed: int
) -> Course:
    """Kills one of the workers after each of the steps; ``react(pid, left)`` does so, and says how many train on."""
    course, begin, left, rng = Course(), 0.0, workers, random.Random(seed)
    for stop in [*losses.after, losses.last]:
        wait_until(running, stop, training, after=begin)
        course.step_s[left] = step_seconds(running.lines, after=begin or _second_step(running))
        if stop == losses.last:
            break
        left -= 1
        before = max(line["step"] for line in running.update() if "step" in line)
        pids = sorted({line["pid"] for line in running.lines if line["t"] >= begin and "step" in line})
        killed = time.time()
        training = react(rng.choice(pids), left)
        begin = wait_until(running, before + 1, training, after=killed)
        course.back_s[left] = begin - killed
    return course


def _second_step(running: Running) -> float:
    """The first takes longer for everybody: it makes the optimizer's slots."""
    return min(line["t"] for line in running.lines if line.get("step") == 2)


# --- holdfast ----------------------------------------------------------------------------------------


def replanned(contestant: Contestant, shape: Shape, *, losses: Losses, folder: Path, seed: int) -> Course:
    """Holdfast: whoever is left goes on."""

    def react(pid: int, left: int) -> int:
        os.kill(pid, signal.SIGKILL)
        return left

    workers = contestant.workers
    with started(contestant, shape, folder=folder) as running:
        course = lose(running, losses, workers=workers, training=workers, react=react, seed=seed)
    course.received = received_bytes(folder / "logs" / "events.jsonl", workers)
    return course


def received_bytes(events: Path, workers: int) -> dict[int, int]:
    """By the number of workers in a generation, what the one that was sent the most was sent."""
    sizes: dict[int, int] = {}
    received: dict[int, int] = {}
    for event in read_events(events):
        if event["event"] == "generation":
            sizes[event["number"]] = len(event["workers"])
        if event["event"] == "entered" and sizes.get(event["generation"], workers) < workers:
            left = sizes[event["generation"]]
            received[left] = max(received.get(left, 0), int(event["received"]))
    return received


# --- Varuna's way ------------------------------------------------------------------------------------


def restarted(shape: Shape, *, workers: int, minimum: int, losses: Losses, folder: Path, seed: int) -> Course:
    """All processes end, and fresh ones go on from the last checkpoint with the best grid for those left."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--steps", "1000000", "--progress", str(folder / "progress.jsonl")]
    options += ["--checkpoint", str(folder / "checkpoint"), "--checkpoint-every", str(losses.every)]
    starts: list[tuple[int, int, float]] = []

    def begin(left: int) -> int:
        grid = choose_grid(layers=shape.layers, workers=left, minimum=minimum, micro_batches=shape.micro_batches)
        contestant = Contestant(system="torch", workers=grid.workers, stages=grid.stages)
        started_by_hand(running, contestant, shape, options)
        return grid.workers

    def react(pid: int, left: int) -> int:
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        running.stop(at_once=True)
        used = begin(left)
        starts.append((left, used, killed))
        return used

    running = Running(folder=folder, workers=workers)
    try:
        course = lose(running, losses, workers=workers, training=begin(workers), react=react, seed=seed)
    finally:
        running.stop(at_once=True)
    for left, used, killed in starts:
        course.starting_s[left] = _imported(folder / "output.log", used, after=killed) - killed
    return course


def _imported(log: Path, workers: int, *, after: float) -> float:
    """When the last of so many processes that were started after this had its imports."""
    said = [json.loads(line)["imported"] for line in log.read_text().splitlines() if line.startswith('{"imported"')]
    return float(sorted(when for when in said if when > after)[workers - 1])
