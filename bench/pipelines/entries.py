"""Contestants of the races with pipelines: holdfast, torch, and one that only measures what the model costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.running import Running, limited
from holdfast.measuring import free_port

PEER = "bench.peers.pipelining"


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """Size of a model and of its batch.

    >>> PipelineShape(model="wide", layers=8).arguments()[:4]
    ['--model', 'wide', '--layers', '8']
    """

    model: str
    layers: int
    width: int = 256
    seq: int = 64
    micro_batch: int = 4
    micro_batches: int = 8  # in a step, of all workers together
    forward_ms: float = 3.0
    backward_ms: float = 6.0

    def arguments(self) -> list[str]:
        """Return the arguments of a contestant's script."""
        return [word for name, value in vars(self).items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """System that trains a shape.

    ``stages`` has the number of layers of each stage; ``options`` are more arguments of its script.
    """

    system: str  # holdfast, torch, or measuring: what the model costs
    workers: int
    stages: Sequence[int]
    options: Sequence[str] = ()
    rate: str = ""  # of a link of its own, as tc writes it; none: this machine's loopback

    def commands(self, shape: PipelineShape, folder: Path, more: Sequence[str]) -> list[list[str]]:
        """Return the commands to start.

        Holdfast's and torch's own agents start all workers with one command; the measuring contestant needs one for
        each.
        """
        arguments = [*shape.arguments(), "--stages", ",".join(map(str, self.stages)), *self.options, *more]
        if self.system == "measuring":
            script = [sys.executable, "-m", "bench.pipelines.cost_entry", *arguments]
            return [[*script, "--worker", str(worker)] for worker in range(self.workers)]
        if self.system == "holdfast":
            logs = ["--log-dir", str(folder / "logs"), "--max-restarts", "0"]  # a new worker would take others' cores
            agent = ["-m", "holdfast.cli", "run", "-n", str(self.workers), *logs]
            script = ["-m", "bench.pipelines.pipeline_entry", *arguments]
        else:
            agent = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            script = ["--nproc-per-node", str(self.workers), "-m", PEER, *arguments]
        return [limited([sys.executable, *agent, *script], self.rate)]


@contextmanager
def started(
    contestant: Contestant, shape: PipelineShape, *, folder: Path, burst: int = 0, steps: int = 1_000_000
) -> Iterator[Running]:
    """Start a contestant, and end it afterwards. With ``burst`` it waits for a turn before every so many steps."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    running = Running(folder=folder, workers=contestant.workers)
    options = ["--steps", str(steps), "--progress", str(running.progress), "--burst", str(burst)]
    if burst:
        running.make_turns()
    try:
        for command in contestant.commands(shape, folder, options):
            running.start(command)
        yield running
    finally:
        running.stop()


def started_by_hand(
    running: Running, contestant: Contestant, shape: PipelineShape, options: Sequence[str]
) -> list[subprocess.Popen[bytes]]:
    """Start torch's processes one by one, as a scheduler does: one that ends does not end the others."""
    arguments = [*shape.arguments(), "--stages", ",".join(map(str, contestant.stages)), *options]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(contestant.workers)}
    command = [sys.executable, "-m", PEER, *arguments]
    return [running.start(command, **shared, RANK=str(rank)) for rank in range(contestant.workers)]
