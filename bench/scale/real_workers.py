"""A run of real workers on this machine that loses some, one after the other."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.running import ROOT, environment
from bench.scale.tiny_training import COUNTED_VOTE, GATE
from holdfast.errors import HoldfastError

PATIENCE_SECONDS = 300.0  # for a hundred workers to start on two cores
POLL_SECONDS = 0.05  # between two looks at the events: little work beside the workers'
COMMITS = COUNTED_VOTE + 2  # of each worker before the next loss
WORKER_BYTES = 75 << 20  # of memory that a worker may add: an estimate, to leave sizes out that would not fit


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one loss has cost. ``workers``: those that are left."""

    workers: int
    ms: float  # from the kill to the next commit
    coordinator_ms: float  # processor time of the coordinator
    coordinator_messages: int
    coordinator_bytes: int


@dataclass(kw_only=True)
class Measured:
    """What the begin of a run and its losses have cost, and its workers' counts in the last generation."""

    forming_ms: float  # processor time of the coordinator, from the first worker's word to the first commit
    forming_bytes: float  # that have formed the first group, a worker
    losses: list[Loss] = field(default_factory=list)
    counts: list[dict[str, Any]] = field(default_factory=list)  # a line of each worker

    def per_worker(self, name: str) -> float:
        """Return the mean of a count over the workers."""
        return statistics.mean(line[name] for line in self.counts)

    def most(self, name: str) -> float:
        """Return the largest count of a worker."""
        return float(max(line[name] for line in self.counts))


class Journal:
    """The events of a run, read as they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.events: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Read what is new; return all that was read."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at += len(line)
                    self.events.append(json.loads(line))
        return self.events

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind so far."""
        return [event for event in self.update() if event["event"] == name]


def lose_workers(folder: Path, *, workers: int, losses: int) -> Measured:
    """Start so many workers that ``workers`` are left after the losses; return what was measured."""
    folder.mkdir(parents=True)
    os.mkfifo(folder / GATE)
    journal = Journal(folder / "logs" / "events.jsonl")
    with _running(folder, workers + losses):
        forming_ms = _form(journal, folder, workers + losses)
        _wait(lambda: _has_trained(journal, workers + losses), folder)
        forming = _counts(folder, journal)
        bytes_of = statistics.mean(line["group_bytes"] for line in forming)
        measured = Measured(forming_ms=forming_ms, forming_bytes=bytes_of)
        for left in reversed(range(workers, workers + losses)):
            measured.losses.append(_lose_one(journal, folder, left))
            _wait(lambda n=left: _has_trained(journal, n), folder)  # type: ignore[misc]
        measured.counts += _counts(folder, journal)
    return measured


def _form(journal: Journal, folder: Path, workers: int) -> float:
    """Let all workers in at once; return the coordinator's processor ms until the first commit."""
    _wait(lambda: len(journal.named("started")) == workers and bool(journal.named("host")), folder)
    (coordinator,) = journal.named("coordinator")
    before = processor_seconds(coordinator["pid"])
    # For reading, too, so that it needs not wait for a reader. It stays open: others may come to it late.
    gate = os.open(folder / GATE, os.O_RDWR)
    try:
        _wait(lambda: bool(journal.named("commit")), folder)
    finally:
        os.close(gate)
    return 1000 * (processor_seconds(coordinator["pid"]) - before)


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process so far, by the clock that Linux has for each process."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it


def _counts(folder: Path, journal: Journal) -> list[dict[str, Any]]:
    """Return what the members of the newest generation have counted in it, a line of each."""
    generation = journal.named("generation")[-1]
    counts = []
    for path in folder.glob("counts-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        counts += [line for line in lines if line["generation"] == generation["number"]]
    if len(counts) != len(generation["workers"]):
        text = f"{len(counts)} of {len(generation['workers'])} workers have counted"
        raise HoldfastError(text, hint=f"see {folder}")
    return counts


@contextmanager
def _running(folder: Path, workers: int) -> Iterator[None]:
    script = ROOT / "bench" / "scale" / "tiny_training.py"
    words = ["run", "-n", str(workers), "--max-restarts", "0", "--log-dir", "logs", "--no-progress"]
    words += [str(script), ".", str(2 * workers)]
    with (folder / "output.log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *words],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        agent.send_signal(signal.SIGKILL)  # its workers end with it
        agent.wait()


def _has_trained(journal: Journal, workers: int) -> bool:
    """Whether all of these workers have committed a few steps in the newest generation."""
    generations = journal.named("generation")
    if not generations or len(generations[-1]["workers"]) != workers:
        return False
    commits: dict[str, int] = {}
    for event in reversed(journal.events):
        if event["event"] == "commit":
            if event["generation"] != generations[-1]["number"]:
                break
            commits[event["worker"]] = commits.get(event["worker"], 0) + 1
    return sum(count >= COMMITS for count in commits.values()) == workers


def _lose_one(journal: Journal, folder: Path, left: int) -> Loss:
    """Kill the last worker; wait for the next commit, and for the coordinator's account of it."""
    generation = journal.named("generation")[-1]
    pids = {event["worker"]: event["pid"] for event in journal.named("started")}
    then = time.time()
    os.kill(pids[generation["workers"][-1]], signal.SIGKILL)
    recoveries = len(journal.named("recovery"))
    _wait(lambda: len(journal.named("recovery")) > recoveries, folder)
    (recovery,) = journal.named("recovery")[recoveries:]
    _wait(lambda: any(e["generation"] > generation["number"] for e in journal.named("commit")), folder)
    first = min(e["t"] for e in journal.named("commit") if e["generation"] > generation["number"])
    told = {name: recovery[name] for name in ("coordinator_ms", "coordinator_messages", "coordinator_bytes")}
    return Loss(workers=left, ms=1000 * (first - then), **told)


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise HoldfastError("the training does not go on", hint=f"see {folder}")
        time.sleep(POLL_SECONDS)


def memory_allows(workers: int) -> bool:
    """Whether this machine has the memory for so many workers at the moment."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return workers * WORKER_BYTES < 1024 * int(facts["MemAvailable"].split()[0])
