"""Contestants of a race as processes: started, given their turns, watched and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

BENCH = Path(".bench")  # results, peers' environments and contestants' folders, below the current folder
ROOT = Path(__file__).parents[1]  # of the repository: contestants import holdfast and bench from it
TURN_SECONDS = 120.0  # limit for a turn; the first one includes the start of all workers
POLL_SECONDS = 0.003  # between two looks at progress: short beside a step
PATIENCE_SECONDS = 300.0  # for what takes seconds, on a machine that does other things, too
END_SECONDS = 8.0  # for a process that was asked to end


def limited(command: Sequence[str], rate: str) -> list[str]:
    """Return the command in a network of its own, whose loopback has this rate; all its workers share it."""
    if not rate:
        return list(command)
    script = f'ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 512kb latency 100ms && exec "$@"'
    return ["unshare", "-rn", "sh", "-c", script, "sh", *command]


def can_limit() -> bool:
    """Tell whether this machine allows slow links: network namespaces and tc."""
    try:
        tried = subprocess.run(limited(["true"], "1gbit"), capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a contestant: one thread, loopback only, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}


def send_signal(pid: int, number: int) -> None:
    """Send a process a signal, if it has not ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_for(condition: Callable[[], object], folder: Path) -> None:
    """Wait until the condition holds. Raises ``HoldfastError`` after minutes, for what takes seconds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise HoldfastError("the training does not go on", hint=f"see {folder}")
        time.sleep(0.02)


class NewLines:
    """A file of JSON lines that grows; ``read`` returns what is new in it. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come since the last time, whole ones only."""
        found: list[dict[str, Any]] = []
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._size)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._size += len(line)
                    found.append(json.loads(line))
        return found


@dataclass(kw_only=True)
class Running:
    """Started contestant: its processes, and the progress lines that they have written."""

    folder: Path
    workers: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    _new: NewLines = field(init=False)
    _turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._new = NewLines(self.progress)

    @property
    def progress(self) -> Path:
        """File of the progress lines."""
        return self.folder / "progress.jsonl"

    def start(self, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        """Start a process in the contestant's folder, with ``more`` in its environment."""
        log = (self.folder / "output.log").open("ab")
        process = subprocess.Popen(
            command, env=environment(**more), stdout=log, stderr=log, start_new_session=True, cwd=self.folder
        )
        log.close()
        self.processes.append(process)
        return process

    def make_turns(self) -> None:
        """Make a FIFO for each worker, on which it waits for its turn."""
        for worker in range(self.workers):
            path = f"{self.progress}.turn-{worker}"
            os.mkfifo(path)
            self._turns.append(os.open(path, os.O_RDWR))

    def update(self) -> list[dict[str, Any]]:
        """Read new progress lines and return all; only new ones, so that watching costs the contestants little."""
        self.lines += self._new.read()
        return self.lines

    def wait_for(self, step: int, workers: int, *, seconds: float = TURN_SECONDS) -> None:
        """Wait until so many workers have finished this step; raise ``HoldfastError`` after ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len({line["pid"] for line in self.update() if line.get("step", -1) >= step}) >= workers:
                return
            time.sleep(POLL_SECONDS)
        raise HoldfastError(f"step {step} never came on {workers} workers", hint=f"see {self.folder}/output.log")

    def take_turn(self, last_step: int) -> float:
        """Let all run until ``last_step``; return the seconds from the last worker's begin to the last one's end."""
        self.allow(1)
        self.wait_for(last_step, self.workers)
        began = max(sorted(line["t"] for line in self.lines if "go" in line)[-self.workers :])
        return float(max(line["t"] for line in self.lines if line.get("step") == last_step) - began)

    def allow(self, turns: int) -> None:
        """Let every worker take so many turns."""
        for turn in self._turns:
            os.write(turn, b"." * turns)

    def forbid(self) -> None:
        """Take back the turns that no worker has taken."""
        for turn in self._turns:
            os.set_blocking(turn, False)
            try:
                os.read(turn, 4096)
            except BlockingIOError:
                pass  # there are none
            os.set_blocking(turn, True)

    def end(self, *, at_once: bool = False) -> None:
        """End all processes, with SIGKILL if ``at_once``."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the session that it was started in
                process.wait()
        self.processes.clear()

    def stop(self) -> None:
        """End all processes and close the FIFOs."""
        for turn in self._turns:
            os.close(turn)
        self._turns.clear()
        self.end()


def time_turns(
    running: Mapping[str, Running], *, title: str, rounds: int, burst: int, say: Callable[[str], None], warm: int = 1
) -> dict[str, list[float]]:
    """Let contestants take turns of ``burst`` steps; return seconds a step in each round, by name.

    Each round begins with another contestant; ``warm`` rounds come before those that count. Shared machines speed up
    and slow down by tens of per cent within seconds: only times of the same round can be compared.
    """
    names = list(running)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1 - warm, rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = running[name].take_turn((number + warm) * burst) / burst
            if number > 0:
                times[name].append(seconds)
        if number > 0:
            row = ", ".join(f"{name} {1000 * values[-1]:.0f}" for name, values in times.items())
            say(f"{title}, round {number}/{rounds}, ms a step: {row}")
    return times


def cpu_of_turns(lines: Sequence[Mapping[str, Any]], burst: int) -> list[float]:
    """Return CPU seconds of a step in each turn, of all workers and all their threads together.

    >>> lines = [{"pid": 1, "cpu": 1.0, "go": 0}, {"pid": 1, "cpu": 1.5, "step": 1}, {"pid": 1, "cpu": 2.0, "step": 2}]
    >>> cpu_of_turns(lines, 2)
    [0.5]
    """
    spent: dict[int, float] = {}
    for line in lines:
        if "go" in line:
            spent[line["go"]] = spent.get(line["go"], 0.0) - line["cpu"]
        elif line["step"] % burst == 0:
            spent[line["step"] - burst] += line["cpu"]
    last = max((line["step"] for line in lines if "step" in line), default=0)
    return [spent[first] / burst for first in sorted(spent) if first + burst <= last]
