"""Runs of ``bench sync``, one after another, on worker processes that are started once for each rate."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.replicas.network import Network
from holdfast.errors import HoldfastError

MEMORY = Path("/dev/shm")  # a file system in memory, for weights to be evaluated


@dataclass(frozen=True, kw_only=True)
class SyncRun:
    """One method, trained once."""

    task: str
    split: str
    rate: int | None  # Mbit a second
    seed: int
    method: str
    kind: str
    settings: dict[str, Any]
    lr: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class SyncOutcome:
    """Measurements of a run. Lists have an entry for each evaluation, the last one at the end of training."""

    run: SyncRun
    at: list[int]  # steps that were done
    seconds: list[float]
    sent: list[int]  # bytes, of all workers
    scores: list[float]  # of the averaged weights
    local: list[float]  # of each worker's own, at the end
    synchronised: list[int]  # the steps after which weights, or before which gradients, were averaged
    ended_s: float  # with the last forced average
    sent_end: int
    capped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> SyncOutcome:
        """Return the outcome from its JSON object."""
        return cls(**{**found, "run": SyncRun(**found["run"])})


class WorkerFailed(HoldfastError):
    """A worker process ended, or did not answer in time."""


@dataclass(kw_only=True)
class Workers:
    """Worker processes, each in its namespace."""

    network: Network
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    log: Path = Path(os.devnull)

    def start(self) -> None:
        """Start all processes."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.network.device,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        for rank, prefix in enumerate(self.network.prefixes):
            words = ["--rank", str(rank), "--workers", str(len(self.network.prefixes)), "--device", self.network.device]
            with self.log.open("a") as log:
                process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", "bench.replicas.worker", *words],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self.processes.append(process)

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                _close(pipe)
        self.processes.clear()

    def run(self, run: SyncRun, *, patience: float) -> list[dict[str, Any]]:
        """Train a run; return what each worker measured.

        After ``patience`` seconds, or if a worker ends, all are ended and ``WorkerFailed`` is raised.
        """
        if not self.processes:
            self.start()
        folder = Path(tempfile.mkdtemp(prefix="holdfast-sync-", dir=MEMORY if MEMORY.is_dir() else None))
        try:
            line = json.dumps({**asdict(run), "folder": str(folder)}) + "\n"
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            return self._listen(patience)
        except (WorkerFailed, OSError) as e:
            self.stop()
            raise WorkerFailed(f"{run.method} broke off: {e}", hint=f"see {self.log}") from e
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _listen(self, patience: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + patience
        said: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(said) < len(self.processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise WorkerFailed(f"nothing was heard for {patience:.0f} s")
                for key, _ in ready:
                    line = self.processes[key.data].stdout.readline()
                    if not line:
                        raise WorkerFailed(f"worker {key.data} ended")
                    said[key.data] = json.loads(line)
        return [said[rank] for rank in sorted(said)]


def _close(pipe: IO[str] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:
        pass  # what it still held was for a process that is gone


@contextmanager
def workers(network: Network, log: Path) -> Iterator[Workers]:
    """Give workers in a network, and end them afterwards; ``log`` gets their errors."""
    made = Workers(network=network, log=log)
    try:
        yield made
    finally:
        made.stop()


def gather(run: SyncRun, said: list[dict[str, Any]], *, every: int, counts_all: bool, capped: bool) -> SyncOutcome:
    """Return the outcome from what each worker measured: the slowest sets the time, bytes are added up."""
    began = max(one["began"] for one in said)
    counted = said[:1] if counts_all else said
    scores = {int(n): score for one in said for n, score in one["scores"].items()}
    at = [*range(every, run.steps, every), run.steps]
    return SyncOutcome(
        run=run,
        at=at,
        seconds=[round(max(times) - began, 4) for times in zip(*(one["times"] for one in said), strict=True)],
        sent=[sum(each) for each in zip(*(one["sent"] for one in counted), strict=True)],
        scores=[scores[n] for n in range(len(at))],
        local=[one["local"] for one in said],
        synchronised=said[0]["synchronised"],
        ended_s=round(max(one["ended"] for one in said) - began, 4),
        sent_end=sum(one["sent_end"] for one in counted),
        capped=capped,
    )
