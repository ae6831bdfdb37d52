"""Starting the pipeline race's contestants, letting them take turns, and reading what they did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.bench.race import free_port
from holdfast.errors import HoldfastError

TURN_SECONDS = 120.0
POLL_SECONDS = 0.003
PEER = "holdfast.bench.peers.pipelining"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batch.

    >>> Shape(model="wide", layers=8).arguments()[:4]
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
        return [word for name, value in vars(self).items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Who trains a shape: ``stages`` has the layers of each stage, ``options`` are the script's own."""

    system: str  # holdfast, torch, or measuring: what the model costs
    workers: int
    stages: Sequence[int]
    options: Sequence[str] = ()
    rate: str = ""  # of a link of its own, as tc writes it; none: this machine's loopback

    def commands(self, shape: Shape, folder: Path, more: Sequence[str]) -> list[list[str]]:
        """What to start: holdfast's and torch's own agents start all workers; who only measures needs none."""
        arguments = [*shape.arguments(), "--stages", ",".join(map(str, self.stages)), *self.options, *more]
        if self.system == "measuring":
            script = [sys.executable, "-m", "holdfast.bench.pipeline_profile", *arguments]
            return [[*script, "--worker", str(worker)] for worker in range(self.workers)]
        if self.system == "holdfast":
            logs = ["--log-dir", str(folder / "logs"), "--max-restarts", "0"]  # a new worker would take others' cores
            agent = ["-m", "holdfast.cli", "run", "-n", str(self.workers), *logs]
            script = ["-m", "holdfast.bench.pipeline_train", *arguments]
        else:
            agent = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            script = ["--nproc-per-node", str(self.workers), "-m", PEER, *arguments]
        return [limited([sys.executable, *agent, *script], self.rate)]


def limited(command: Sequence[str], rate: str) -> list[str]:
    """The command in a network of its own, whose loopback has this rate: all its workers share the link."""
    if not rate:
        return list(command)
    script = f'ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 512kb latency 100ms && exec "$@"'
    return ["unshare", "-rn", "sh", "-c", script, "sh", *command]


def can_limit() -> bool:
    """Whether this machine lets us have a slow link."""
    try:
        tried = subprocess.run(limited(["true"], "1gbit"), capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


def environment(**more: str) -> dict[str, str]:
    here = str(Path(__file__).parents[2])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": here, "GLOO_SOCKET_IFNAME": "lo", **more}


@dataclass(kw_only=True)
class Running:
    """A contestant that has been started: its processes, and the progress that they have written."""

    folder: Path
    workers: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    _turns: list[int] = field(default_factory=list)

    @property
    def progress(self) -> Path:
        return self.folder / "progress.jsonl"

    def start(self, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "output.log").open("ab")
        process = subprocess.Popen(
            command, env=environment(**more), stdout=log, stderr=log, start_new_session=True, cwd=self.folder
        )
        log.close()
        self.processes.append(process)
        return process

    def make_turns(self) -> None:
        """A FIFO per worker, on which it waits for its turn."""
        for worker in range(self.workers):
            path = f"{self.progress}.turn-{worker}"
            os.mkfifo(path)
            self._turns.append(os.open(path, os.O_RDWR))

    def update(self) -> list[dict[str, Any]]:
        """Reads only what is new: whoever watches a race must not take the racers' cores."""
        if self.progress.exists():
            with self.progress.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self.lines.append(json.loads(line))
        return self.lines

    def wait_for(self, step: int, workers: int, *, seconds: float = TURN_SECONDS) -> None:
        """Until so many workers have finished this step."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len({line["pid"] for line in self.update() if line.get("step", -1) >= step}) >= workers:
                return
            time.sleep(POLL_SECONDS)
        raise HoldfastError(f"step {step} never came on {workers} workers", hint=f"see {self.folder}/output.log")

    def take_turn(self, last_step: int) -> float:
        """Lets all run until ``last_step``; the seconds from when the last has begun until the last has ended."""
        self.allow(1)
        self.wait_for(last_step, self.workers)
        began = max(sorted(line["t"] for line in self.lines if "go" in line)[-self.workers :])
        return float(max(line["t"] for line in self.lines if line.get("step") == last_step) - began)

    def allow(self, turns: int) -> None:
        """Lets every worker take so many turns."""
        for turn in self._turns:
            os.write(turn, b"." * turns)

    def forbid(self) -> None:
        """Takes back the turns that nobody has taken."""
        for turn in self._turns:
            os.set_blocking(turn, False)
            try:
                os.read(turn, 4096)
            except BlockingIOError:
                pass  # there are none
            os.set_blocking(turn, True)

    def end(self, *, at_once: bool = False) -> None:
        """Ends all processes."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the session that it was started in
                process.wait()
        self.processes.clear()

    def stop(self) -> None:
        for turn in self._turns:
            os.close(turn)
        self._turns.clear()
        self.end()


@contextmanager
def started(
    contestant: Contestant, shape: Shape, *, folder: Path, burst: int = 0, steps: int = 1_000_000
) -> Iterator[Running]:
    """The contestant at work, or waiting for its first turn."""
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
    running: Running, contestant: Contestant, shape: Shape, options: Sequence[str]
) -> list[subprocess.Popen[bytes]]:
    """Torch's processes one by one, as a scheduler starts them; one that ends takes nobody along."""
    arguments = [*shape.arguments(), "--stages", ",".join(map(str, contestant.stages)), *options]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(contestant.workers)}
    command = [sys.executable, "-m", PEER, *arguments]
    return [running.start(command, **shared, RANK=str(rank)) for rank in range(contestant.workers)]
