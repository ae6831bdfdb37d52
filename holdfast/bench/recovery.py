"""Time to the next step after a SIGKILL, against torchft and against torchrun with a checkpoint."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from holdfast.bench.race import BENCH, Entry, Shape, started
from holdfast.bench.report import Bar, spread
from holdfast.errors import HoldfastError

CONTESTANTS = ["holdfast-exact", "torchft", "torchft-tuned", "restart"]
KILL_AFTER = 14  # steps; the restarting peer saves every 10, so it has some to do again
GIVE_UP_SECONDS = 120.0


def race(*, shape: Shape, rounds: int, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Each round kills one worker of every contestant, early in a step."""
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    beyond: list[float] = []
    shutil.rmtree(BENCH / "recovery", ignore_errors=True)
    for number in range(rounds):
        for name in CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]:
            recovery, redone = kill_one(name, shape, number)
            times[name].append(1000 * recovery)
            if name == "holdfast-exact":
                beyond.append(1000 * (recovery - redone))
            say(f"round {number + 1}/{rounds}: {name}: {1000 * recovery:.0f} ms to the next step")
    ours = times["holdfast-exact"]
    results: dict[str, Any] = {
        name: {
            "recovery_ms": spread(values),
            "of_holdfast": spread([theirs / mine for theirs, mine in zip(values, ours, strict=True)]),
        }
        for name, values in times.items()
    }
    results["holdfast-exact"]["beyond_redone_step_ms"] = spread(beyond)
    bars = {
        "ms beyond the redone step": Bar(value=statistics.median(beyond), bar=100.0, at_most=True),
        "torchft tuned, of holdfast": Bar(value=results["torchft-tuned"]["of_holdfast"]["median"], bar=1.0),
        "torchrun restart, of holdfast": Bar(value=results["restart"]["of_holdfast"]["median"], bar=1.0),
    }
    return results, bars


def kill_one(name: str, shape: Shape, number: int) -> tuple[float, float]:
    """Seconds from the kill to the survivors' next step, and the usual time of a step after it."""
    rng = random.Random(number)
    folder = BENCH / "recovery" / f"{name}-{number}"
    with started(name, shape, steps=10_000, folder=folder) as entry:
        # Everybody has just begun the next step, so nobody can finish it without the victim.
        entry.wait_for(KILL_AFTER, shape.workers)
        step = step_seconds(entry)
        before = max(line["step"] for line in entry.lines())
        victim = rng.choice(sorted({line["pid"] for line in entry.lines()}))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        first = next_step(entry, after=killed, beyond=before, victim=victim)
        time.sleep(6 * step)
        return first - killed, step_seconds(entry, after=first)


def next_step(entry: Entry, *, after: float, beyond: int, victim: int) -> float:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        for line in entry.lines():
            if line["t"] > after and line["step"] > beyond and line["pid"] != victim:
                return float(line["t"])
        time.sleep(0.002)
    raise HoldfastError(f"no step for {GIVE_UP_SECONDS:g} s after the kill", hint=f"see {entry.progress.parent}")


def step_seconds(entry: Entry, *, after: float = 0.0) -> float:
    """The median time of a step, over one worker's steps since then."""
    lines = [line for line in entry.lines() if line["t"] >= after]
    pid = lines[-1]["pid"]
    times = sorted(line["t"] for line in lines if line["pid"] == pid)[-6:]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0
