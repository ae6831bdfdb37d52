"""Workers lost one after the other: pipelines that are planned anew, against a restart with another grid.

The restart is Varuna's way. Its pipelines have equal depth, which divides the layers, and there are as many as fit
into the workers that are left. All processes end; new ones load the last checkpoint and do the lost steps again. It
gets some advantages: it is told of a loss at once, its checkpoints are not synced to disk, and the start of its
interpreters can be subtracted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.pipelines.entries import Contestant, PipelineShape, started, started_by_hand
from bench.running import POLL_SECONDS, Running
from holdfast.cluster.events import read_events
from holdfast.errors import HoldfastError

PATIENCE_SECONDS = 90.0  # limit for a step; after a loss it includes the start of new processes
TURN_STEPS = 2  # few, so that both sides meet the same load of the machine


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """Number of turns with all workers, with one less, and so on.

    With the defaults losses come after steps 15 and 25: a restart loses five steps, as it does on average.
    """

    turns: tuple[int, ...] = (6, 3, 3)
    every: int = 10  # steps from checkpoint to checkpoint, as published


@dataclass(kw_only=True)
class Course:
    """Measurements while workers were lost, by the number of workers that were left."""

    step_s: dict[int, list[float]] = field(default_factory=dict)  # of each turn
    back_s: dict[int, float] = field(default_factory=dict)  # from the loss to the next new step of all
    starting_s: dict[int, float] = field(default_factory=dict)  # of which until the last interpreter has its imports
    received: dict[int, int] = field(default_factory=dict)  # bytes, of the worker that got the most


def run_course(sides: Mapping[str, Side], losses: LossPlan, *, workers: int, seed: int) -> dict[str, Course]:
    """Let all sides lose workers after the same steps, and take turns in between; return a course for each."""
    courses = {name: Course() for name in sides}
    dice = {name: random.Random(seed) for name in sides}
    names = list(sides)
    for number, turns in enumerate(losses.turns):
        left = workers - number
        for name, side in sides.items():
            if number:
                courses[name].back_s[left] = side.lose(left, dice[name])
            side.go(1 if number else 2)  # the first steps take longer for everybody
            courses[name].step_s[left] = []
        for turn in range(turns):
            for name in names if turn % 2 else reversed(names):
                courses[name].step_s[left].append(sides[name].go(TURN_STEPS))
    return courses


def finished(lines: Sequence[dict[str, Any]], step: int, workers: int, *, after: float) -> float | None:
    """Return when the last of so many workers finished this step, or None if not all have.

    >>> lines = [{"pid": 1, "step": 3, "t": 5.0}, {"pid": 2, "step": 3, "t": 6.0}]
    >>> finished(lines, 3, 2, after=0.0), finished(lines, 3, 3, after=0.0)
    (6.0, None)
    """
    times = {line["pid"]: line["t"] for line in lines if line.get("step") == step and line["t"] > after}
    return float(max(times.values())) if len(times) >= workers else None


@dataclass(kw_only=True)
class Side:
    """System whose workers take a step only when they are told to; ``regroup`` says what it does about a loss."""

    running: Running
    training: int  # workers, at the moment
    step: int = 0
    since: float = 0.0  # what was written before does not count: of steps that are done again

    def go(self, steps: int) -> float:
        """Let all take so many steps; return the seconds of one."""
        first, self.step = self.step, self.step + steps
        self.running.allow(steps)
        end = self.wait_for(self.step)
        began = max(line["t"] for line in self.running.lines if line.get("go") == first and line["t"] > self.since)
        return float((end - began) / steps)

    def lose(self, left: int, dice: random.Random) -> float:
        """Kill a worker early in a step; return the seconds until all that are left have finished that step."""
        self.running.allow(3)
        self.wait_for(self.step + 1)
        lines = [line for line in self.running.lines if line["t"] > self.since]
        pids = sorted({line["pid"] for line in lines if line.get("step") == self.step + 1})
        killed = time.time()
        os.kill(dice.choice(pids), signal.SIGKILL)
        self.step += 3
        self.since = killed
        self.training = self.regroup(left)
        back = self.wait_for(self.step - 1) - killed
        self.wait_for(self.step)
        return back

    def regroup(self, left: int) -> int:
        """Return how many train on: here all, by themselves."""
        return left

    def wait_for(self, step: int) -> float:
        """Wait until all have finished this step; return when the last did."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            when = finished(self.running.update(), step, self.training, after=self.since)
            if when is not None:
                return when
            time.sleep(POLL_SECONDS)
        where = self.running.folder / "output.log"
        raise HoldfastError(f"step {step} never came on {self.training} workers", hint=f"see {where}")


# --- holdfast ----------------------------------------------------------------------------------------


@contextmanager
def replanned(contestant: Contestant, shape: PipelineShape, *, folder: Path) -> Iterator[Side]:
    """Start holdfast, whose survivors go on by themselves."""
    with started(contestant, shape, folder=folder, burst=1) as running:
        yield Side(running=running, training=contestant.workers)


def received_bytes(events: Path, workers: int) -> dict[int, int]:
    """Return, by the number of workers in a generation, the most bytes that one of them was sent."""
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


@dataclass(frozen=True, kw_only=True)
class EqualGrid:
    """Pipelines of equal depth side by side."""

    stages: tuple[int, ...]  # layers of each
    pipelines: int

    @property
    def workers(self) -> int:
        """Number of workers that the grid takes."""
        return len(self.stages) * self.pipelines


def choose_grid(*, layers: int, workers: int, minimum: int, micro_batches: int) -> EqualGrid:
    """Return the fastest grid of at least ``minimum`` stages with equally many layers.

    >>> choose_grid(layers=12, workers=5, minimum=2, micro_batches=12)
    EqualGrid(stages=(6, 6), pipelines=2)
    >>> choose_grid(layers=12, workers=3, minimum=2, micro_batches=12)
    EqualGrid(stages=(4, 4, 4), pipelines=1)
    """
    grids = [
        EqualGrid(stages=(layers // depth,) * depth, pipelines=workers // depth)
        for depth in range(minimum, workers + 1)
        if layers % depth == 0 and micro_batches // (workers // depth) >= depth
    ]
    if not grids:
        raise HoldfastError(f"no grid of {workers} workers holds {layers} layers", hint="fewer layers a stage")

    def seconds(grid: EqualGrid) -> float:
        """Relative time of 1F1B: all micro-batches, and one for each further stage, pass through a stage."""
        share = -(-micro_batches // grid.pipelines)
        return (share + len(grid.stages) - 1) * grid.stages[0]

    return min(grids, key=seconds)


@dataclass(kw_only=True)
class Restarted(Side):
    """Varuna's way: all processes end, and new ones load the last checkpoint with the best grid for those left."""

    shape: PipelineShape
    minimum: int  # stages that hold the model
    every: int
    starts: list[tuple[int, int, float]] = field(
        default_factory=list
    )  # (workers left, workers that train, time of the loss)

    def begin(self, workers: int) -> int:
        """Start the processes of the best grid; return how many they are."""
        grid = choose_grid(
            layers=self.shape.layers, workers=workers, minimum=self.minimum, micro_batches=self.shape.micro_batches
        )
        folder = self.running.folder
        options = ["--steps", "1000000", "--progress", str(self.running.progress), "--burst", "1"]
        options += ["--checkpoint", str(folder / "checkpoint"), "--checkpoint-every", str(self.every)]
        contestant = Contestant(system="torch", workers=grid.workers, stages=grid.stages)
        started_by_hand(self.running, contestant, self.shape, options)
        return grid.workers

    def regroup(self, left: int) -> int:
        """End all processes and start new ones; return how many they are."""
        self.running.end(at_once=True)
        self.running.forbid()
        latest = self.running.folder / "checkpoint" / "latest"
        self.running.allow(self.step - (int(latest.read_text()) if latest.exists() else 0))
        training = self.begin(left)
        self.starts.append((left, training, self.since))
        return training

    def starting_s(self) -> dict[int, float]:
        """Return, by the workers left, the seconds from the loss until the last new process had its imports."""
        said = (self.running.folder / "output.log").read_text().splitlines()
        imported = sorted(json.loads(line)["imported"] for line in said if line.startswith('{"imported"'))
        return {
            left: [when for when in imported if when > killed][training - 1] - killed
            for left, training, killed in self.starts
        }


@contextmanager
def restarted(shape: PipelineShape, *, workers: int, minimum: int, every: int, folder: Path) -> Iterator[Restarted]:
    """Start torch's pipelining with checkpoints, and end it afterwards."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    running = Running(folder=folder, workers=workers)
    side = Restarted(running=running, training=0, shape=shape, minimum=minimum, every=every)
    try:
        running.make_turns()
        side.training = side.begin(workers)
        yield side
    finally:
        running.end(at_once=True)
        running.stop()
