"""Time to the next step after a SIGKILL, against torchft and against torchrun with a checkpoint."""

from __future__ import annotations

import shutil
import statistics
from typing import Any

from bench.data_parallel.contestants import Workload, racing
from bench.race_report import Bar, Say
from bench.running import BENCH
from holdfast.measuring import spread
from holdfast.simulate.kill import time_kill

COLUMNS = {
    "recovery_ms": "ms to the next step: median (range)",
    "of_holdfast": "times holdfast's",
    "beyond_redone_step_ms": "ms beyond the redone step",
}
CONTESTANTS = ["holdfast-exact", "torchft", "torchft-tuned", "restart"]


def race(*, workers: int, rounds: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Kill one worker of every contestant in each round, early in a step; return results and bars."""
    workload = Workload(workers=workers, micro_batches=2, micro_batch=2, width=128)
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    beyond: list[float] = []
    shutil.rmtree(BENCH / "recovery", ignore_errors=True)
    for number in range(rounds):
        for name in CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]:
            recovery, redone = kill_one(name, workload, number)
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


def kill_one(name: str, workload: Workload, number: int) -> tuple[float, float]:
    """Return seconds from the kill to the survivors' next step, and those of a usual step after it."""
    folder = BENCH / "recovery" / f"{name}-{number}"
    with racing(name, workload, steps=10_000, folder=folder) as running:
        return time_kill(running.update, workers=workload.workers, seed=number)
