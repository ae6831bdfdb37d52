"""What all races share: the workload's size, the peers' venv, starting contestants, reading progress."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

BENCH = Path(".bench")
PEER_PACKAGES = [["torch==2.13.0"], ["numpy==2.4.6", "torchft-nightly==2026.10.26"]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of the workload.

    >>> Shape(workers=2).arguments(steps=5)[:4]
    ['--steps', '5', '--micro-batches', '2']
    """

    workers: int = 2
    micro_batches: int = 2  # per worker
    micro_batch: int = 4
    width: int = 256
    depth: int = 4
    seq: int = 64

    def arguments(self, *, steps: int) -> list[str]:
        shown = {
            "steps": steps,
            "micro-batches": self.micro_batches,
            "micro-batch": self.micro_batch,
            "width": self.width,
            "depth": self.depth,
            "seq": self.seq,
        }
        return [word for name, value in shown.items() for word in (f"--{name}", str(value))]


def peer_python() -> Path:
    """The interpreter of the peers' venv, made on first use."""
    python = (BENCH / "venv" / "bin" / "python").absolute()
    done = BENCH / "venv" / "ready"
    if not done.exists():
        print("making the peers' venv under .bench/ (once; about a minute)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(BENCH / "venv")], check=True)
        for packages in PEER_PACKAGES:  # torch first: what depends on it must not choose another build
            try:
                subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
            except subprocess.CalledProcessError as e:
                raise HoldfastError(f"cannot install {packages} for the peers", hint="see pip's output above") from e
        done.touch()
    return python


@dataclass(kw_only=True)
class Entry:
    """A contestant in one round: its processes and the progress they have written."""

    progress: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def make_turns(self, workers: int) -> None:
        """A FIFO per worker, on which it waits for its turn."""
        for worker in range(workers):
            path = f"{self.progress}.turn-{worker}"
            os.mkfifo(path)
            self.turns.append(os.open(path, os.O_RDWR))

    def take_turn(self, last_step: int) -> float:
        """Lets the workers run until ``last_step``; returns the seconds that took."""
        for turn in self.turns:
            os.write(turn, b".")
        self.wait_for(last_step, len(self.turns), seconds=120)
        mine = [line for line in self.lines() if line["worker"] == 0]
        began = max(line["t"] for line in mine if "go" in line)
        return max(line["t"] for line in mine if line.get("step") == last_step) - float(began)

    def lines(self) -> list[dict[str, Any]]:
        if not self.progress.exists():
            return []
        return [json.loads(line) for line in self.progress.read_text().splitlines() if line.endswith("}")]

    def wait_for(self, step: int, workers: int, seconds: float = 60.0) -> None:
        """Until so many workers have finished this step."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len({line["pid"] for line in self.lines() if line.get("step", -1) >= step}) >= workers:
                return
            time.sleep(0.002)
        raise HoldfastError(f"step {step} never came on {workers} workers", hint=f"see {self.progress.parent}")

    def stop(self) -> None:
        for turn in self.turns:
            os.close(turn)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # torchrun would leave orphans behind a SIGKILL
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "GLOO_SOCKET_IFNAME": "lo",
        "NO_PROXY": "127.0.0.1,localhost",
        "RUST_LOG": "error",
        # Without it torchrun's workers talk to the store of their dead predecessors (pytorch #135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _start(entry: Entry, command: list[str], **environment: str) -> None:
    log = (entry.progress.parent / "output.log").open("ab")
    process = subprocess.Popen(
        command, env={**_environment(), **environment}, stdout=log, stderr=log, start_new_session=True
    )
    entry.processes.append(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(name: str, shape: Shape, *, steps: int, folder: Path, burst: int = 0) -> Iterator[Entry]:
    """Starts a contestant by name: ddp, restart, torchft, torchft-tuned, holdfast-fast, holdfast-exact."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = Entry(progress=(folder / "progress.jsonl").absolute())
    arguments = [*shape.arguments(steps=steps), "--progress", str(entry.progress), "--burst", str(burst)]
    if burst:
        entry.make_turns(shape.workers)
    try:
        if name.startswith("holdfast"):
            _start_holdfast(entry, name.removeprefix("holdfast-"), shape, arguments)
        elif name.startswith("torchft"):
            _start_torchft(entry, name, shape, arguments)
        else:
            _start_torchrun(entry, name, shape, arguments)
        yield entry
    finally:
        entry.stop()


def _start_holdfast(entry: Entry, numerics: str, shape: Shape, arguments: list[str]) -> None:
    logs = str(entry.progress.parent / "logs")
    # No replacements, as in torchft's entries: a starting worker would take the survivors' cores.
    agent = ["run", "-n", str(shape.workers), "--log-dir", logs, "--max-restarts", "0"]
    script = ["-m", "holdfast.bench.train", "--numerics", numerics, "--workers", str(shape.workers)]
    _start(entry, [sys.executable, "-m", "holdfast.cli", *agent, *script, *arguments])


def _start_torchrun(entry: Entry, name: str, shape: Shape, arguments: list[str]) -> None:
    torchrun = str(peer_python().parent / "torchrun")
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(shape.workers)]
    if name == "restart":
        options += ["--max-restarts", "3"]
        arguments = [*arguments, "--checkpoint", str(entry.progress.parent / "checkpoint.pt")]
    _start(entry, [torchrun, *options, "-m", f"holdfast.bench.peers.{name}", *arguments])


def _start_torchft(entry: Entry, name: str, shape: Shape, arguments: list[str]) -> None:
    python = peer_python()
    address = f"127.0.0.1:{free_port()}"
    tuned = ["--heartbeat_timeout_ms", "500"] if name == "torchft-tuned" else []
    minimum = str(shape.workers) if name == "torchft-all" else "1"
    lighthouse = str(python.parent / "torchft_lighthouse")
    _start(entry, [lighthouse, "--bind", address, "--min_replicas", minimum, *tuned])
    for worker in range(shape.workers):
        command = [str(python), "-m", "holdfast.bench.peers.torchft_ddp", "--worker", str(worker), *arguments]
        if name == "torchft-tuned":
            # Else two survivors that wait for each other in a half-done reduction wait 60 s.
            command += ["--pg-timeout", "5"]
        _start(entry, command, TORCHFT_LIGHTHOUSE=f"http://{address}")
