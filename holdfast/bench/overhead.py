"""Failure-free cost: throughput against plain DDP and torchft, interleaved in one run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from holdfast.bench.race import BENCH, Shape, started
from holdfast.bench.report import Bar, spread

CONTESTANTS = ["ddp", "holdfast-fast", "holdfast-exact", "torchft-all"]
WARM_UP = 4  # steps that are not counted


def race(*, shape: Shape, rounds: int, steps: int, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Each round runs every contestant once, in an order that rotates, so that all meet the same noise."""
    speeds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    shutil.rmtree(BENCH / "overhead", ignore_errors=True)
    for number in range(rounds):
        order = CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]
        for name in order:
            speed = samples_per_second(name, shape, steps, number)
            speeds[name].append(speed)
            say(f"round {number + 1}/{rounds}: {name}: {speed:.2f} samples/s")
    results = {
        name: {
            "samples_per_s": spread(values),
            "of_ddp": spread([mine / ddp for mine, ddp in zip(values, speeds["ddp"], strict=True)]),
        }
        for name, values in speeds.items()
    }
    bars = {
        "fast, of DDP": Bar(value=results["holdfast-fast"]["of_ddp"]["median"], bar=0.97),
        "exact, of DDP": Bar(value=results["holdfast-exact"]["of_ddp"]["median"], bar=0.90),
    }
    return results, bars


def samples_per_second(name: str, shape: Shape, steps: int, number: int) -> float:
    """Of the whole group, over the steps after the warm-up, by the first worker's clock."""
    folder = BENCH / "overhead" / f"{name}-{number}"
    with started(name, shape, steps=steps, folder=folder) as entry:
        entry.wait_for(steps, shape.workers, seconds=300)
        times = sorted(line["t"] for line in entry.lines() if line["worker"] == 0)
    seconds = times[-1] - times[WARM_UP - 1]
    return (len(times) - WARM_UP) * shape.workers * shape.micro_batches * shape.micro_batch / seconds
