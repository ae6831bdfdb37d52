"""Contestants of a race as processes: started, given their turns, watched and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

BENCH = Path(".bench")  # results, peers' environments and contestants' folders, below the current folder
ROOT = Path(__file__).parents[1]  # of the repository: contestants import holdfast and bench from it
TURN_SECONDS = 120.0  # limit for a turn; the first one includes the start of all workers
POLL_SECONDS = 0.003  # between two looks at progress: short beside a step
END_SECONDS = 8.0  # for a process that was asked to end


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
    """Return the environment of a contestant: one thread, loopback only, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}


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
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the session that it was started in
                process.wait()
        self.processes.clear()

    def stop(self) -> None:
        for turn in self._turns:
            os.close(turn)
        self._turns.clear()
        self.end()
