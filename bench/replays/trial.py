"""One trial of ``bench replay``: train from a checkpoint, kill a worker of one stage, and time the way back.

All ways begin from copies of the same checkpoint, with the same profile and so the same stages. A worker is killed from
outside as soon as all have finished the last step before the loss. It dies early in the next step, which nobody can
finish without it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.pipelines.entries import PipelineShape
from bench.races.log import bytes_per_step, read_lines
from bench.running import POLL_SECONDS, Running, environment
from holdfast.checkpoint.series import newest
from holdfast.cluster.events import read_events
from holdfast.errors import HoldfastError

BASE = 2  # steps before the common checkpoint, so that the optimizer has its slots
EVERY = 1000  # steps from checkpoint to checkpoint: more than ever come
PATIENCE_SECONDS = 120.0  # limit for the way back


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Settings that all trials share."""

    shape: PipelineShape
    workers: int
    profile: Path
    checkpoint: Path  # a folder with the checkpoint that all begin from

    def command(self, folder: Path, options: Sequence[str]) -> list[str]:
        """Return the command of a run. Lost workers are replaced, as a return to the checkpoint needs it."""
        agent = ["-m", "holdfast.cli", "run", "-n", str(self.workers), "--log-dir", str(folder / "logs")]
        script = ["-m", "bench.pipelines.pipeline_entry", *self.shape.arguments(), "--stages", str(self.workers)]
        return [sys.executable, *agent, *script, "--profile", str(self.profile), *options]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Way back from a loss: options of the script, and its environment."""

    name: str
    options: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KillOutcome:
    """Cost of a kill."""

    seconds: float  # from the kill until the step that was running is committed
    replayed: float | None  # of which, until the slowest worker had computed the lost layers again
    resumed: float | None  # from the kill until all were back at the checkpoint
    layers: tuple[int, ...]  # that were computed again
    steps: int  # from the checkpoint
    step_seconds: float  # of an undisturbed step before
    predicted_bytes: int  # of the log in a step, by the plan; of all workers
    measured_bytes: float


def make_checkpoint(ground: Ground, folder: Path) -> None:
    """Train the first steps and leave their checkpoint in ``ground.checkpoint``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--steps", str(BASE), "--checkpoint", str(ground.checkpoint), "--every", str(EVERY)]
    command = ground.command(folder, options)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode or newest(ground.checkpoint) is None:
        raise HoldfastError(f"no checkpoint to begin from: {(done.stdout + done.stderr)[-2000:]}")


def kill_after(ground: Ground, way: Way, *, steps: int, stage: int, folder: Path) -> KillOutcome:
    """Start a run, kill its worker of this stage so many steps after the checkpoint, and return the cost."""
    with _started(ground, way, folder.absolute()) as running:
        running.wait_for(BASE + steps, ground.workers, seconds=PATIENCE_SECONDS)
        events = running.folder / "logs" / "events.jsonl"
        worker = worker_of(read_events(events), stage)
        pid = next(line["pid"] for line in running.lines if line["worker"] == int(worker.split(".")[1]))
        before = list(running.lines)
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        committed = _wait_for_commit(running, BASE + steps + 1, after=killed)
    told = [event for event in read_events(events) if killed < event["t"] <= committed]
    planned = [event["bytes_per_step"] for event in read_events(events) if event["event"] == "logging"]
    outcome = KillOutcome(
        seconds=committed - killed,
        **story(told, killed),
        steps=steps,
        step_seconds=step_seconds(before),
        predicted_bytes=planned[0] if planned else 0,  # of the layout that was lost
        measured_bytes=bytes_per_step(read_lines(file) for file in running.folder.glob("progress.jsonl.log-*")),
    )
    if outcome.replayed is None and outcome.resumed is None:
        raise HoldfastError(f"the step was over before its worker was killed: {folder}", hint="a larger model")
    return outcome


def worker_of(events: Iterable[Mapping[str, Any]], stage: int) -> str:
    """Return the worker that had this stage in the first layout.

    >>> worker_of([{"event": "layout", "worker": "0.3", "stage": 1}], 1)
    '0.3'
    """
    return next(str(event["worker"]) for event in events if event["event"] == "layout" and event["stage"] == stage)


def step_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the usual seconds of a step: those of the second half, as the first steps take longer."""
    ends = {line["step"]: line["t"] for line in lines if "step" in line}
    first, last = min(ends) + (max(ends) - min(ends)) // 2, max(ends)
    return float(ends[last] - ends[first]) / (last - first) if last > first else 0.0


def story(told: Sequence[Mapping[str, Any]], killed: float) -> dict[str, Any]:
    """Return how a run came back, from its events between the kill and the commit."""
    replays = [event for event in told if event["event"] == "replay"]
    resumed = [event["t"] - killed for event in told if event["event"] == "resumed"]
    spans = replays[0]["layers"] if replays else []
    return {
        "replayed": max((event["seconds"] for event in replays), default=None),
        "resumed": max(resumed, default=None),
        "layers": tuple(layer for first, stop in spans for layer in range(first, stop)),
    }


def _wait_for_commit(running: Running, step: int, *, after: float) -> float:
    """Wait until the first worker has committed the step; return when. Nobody can take it back from then on."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        times = [line["t"] for line in running.update() if line.get("step") == step and line["t"] > after]
        if times:
            return float(min(times))
        time.sleep(POLL_SECONDS)
    raise HoldfastError(f"step {step} never came back", hint=f"see {running.folder}")


@contextmanager
def _started(ground: Ground, way: Way, folder: Path) -> Iterator[Running]:
    folder.mkdir(parents=True)
    shutil.copytree(ground.checkpoint, folder / "checkpoints")
    running = Running(folder=folder, workers=ground.workers)
    options = ["--steps", "1000000", "--progress", str(running.progress), "--every", str(EVERY)]
    options += ["--checkpoint", str(folder / "checkpoints"), *way.options]
    try:
        agent = running.start(ground.command(folder, options), **way.settings)
        yield running
        agent.send_signal(signal.SIGTERM)  # the second one, of stop(), ends it at once
        time.sleep(0.1)
    finally:
        running.stop()
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
