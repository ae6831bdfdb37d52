"""Time from the loss of a worker to the survivors' next step: measured by killing one on this machine.

Workers append a JSON line to a common file after each step: ``{"t": time.time(), "step": number, "pid": pid}``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

KILL_AFTER = 14  # steps; a peer that saves every 10 has some to do again
POLL_SECONDS = 0.002  # short beside a step, and little work beside the workers'
START_SECONDS = 60.0  # limit for the steps before the kill
GIVE_UP_SECONDS = 120.0  # limit for the first step after it
Line = Mapping[str, Any]
Read = Callable[[], Sequence[Line]]


def time_kill(read: Read, *, workers: int, seed: int) -> tuple[float, float]:
    """Kill one of ``workers`` early in a step.

    ``read`` gives all lines that the workers have written so far; ``seed`` chooses the victim. Returns the seconds
    from the kill to the survivors' next step, and those of a usual step after it. Raises ``HoldfastError`` if
    a step never comes.
    """
    # When all have finished a step, they have just begun the next one, and nobody can finish it without the victim.
    _wait(lambda: len({line["pid"] for line in read() if line["step"] >= KILL_AFTER}) >= workers, START_SECONDS)
    lines = read()
    before, usual = max(line["step"] for line in lines), step_seconds(lines)
    victim = random.Random(seed).choice(sorted({line["pid"] for line in lines}))
    killed = time.time()
    os.kill(victim, signal.SIGKILL)

    def new() -> list[Line]:
        return [line for line in read() if line["t"] > killed and line["step"] > before and line["pid"] != victim]

    _wait(lambda: bool(new()), GIVE_UP_SECONDS)
    first = float(new()[0]["t"])
    time.sleep(6 * usual)
    return first - killed, step_seconds(read(), after=first)


def step_seconds(lines: Sequence[Line], *, after: float = 0.0) -> float:
    """Return the median seconds of one worker's last steps, of those that ended since ``after``.

    >>> step_seconds([{"t": 1.0, "pid": 7}, {"t": 3.0, "pid": 8}, {"t": 4.0, "pid": 7}, {"t": 5.0, "pid": 7}])
    2.0
    """
    lines = [line for line in lines if line["t"] >= after]
    pid = lines[-1]["pid"]
    times = sorted(line["t"] for line in lines if line["pid"] == pid)[-6:]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise HoldfastError(f"no step for {seconds:g} s", hint="see the workers' logs")
        time.sleep(POLL_SECONDS)


def kill_one(folder: Path, *, workers: int, seed: int) -> tuple[float, float]:
    """Train a small GPT on so many workers and kill one; return what ``time_kill`` returns.

    ``folder`` gets the workers' progress and logs.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    progress = folder / "progress.jsonl"

    def read() -> list[Line]:
        text = progress.read_text() if progress.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    # No replacements: a worker that starts would take the survivors' cores.
    agent = ["run", "-n", str(workers), "--log-dir", str(folder / "logs"), "--max-restarts", "0"]
    command = [sys.executable, "-m", "holdfast.cli", *agent, "-m", "holdfast.simulate.small_training", str(progress)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        return time_kill(read, workers=workers, seed=seed)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
