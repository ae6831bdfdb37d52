"""Failure-free cost: throughput against plain DDP and torchft, interleaved in one run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from holdfast.bench.race import BENCH, Shape, started
from holdfast.bench.report import Bar, spread

CONTESTANTS = ["ddp", "holdfast-fast", "holdfast-exact", "torchft-all"]


def race(*, shape: Shape, rounds: int, burst: int, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Bar]]:
    """All contestants are there at once and take turns of a few steps, in an order that rotates.

    Shared machines speed up and slow down by tens of per cent within seconds: only neighbours in time
    can be compared, so ratios are taken within a round, and their median over many rounds.
    """
    speeds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    samples = burst * shape.workers * shape.micro_batches * shape.micro_batch
    shutil.rmtree(BENCH / "overhead", ignore_errors=True)
    with ExitStack() as stack:
        entries = {
            name: stack.enter_context(
                started(name, shape, steps=1_000_000, folder=BENCH / "overhead" / name, burst=burst)
            )
            for name in CONTESTANTS
        }
        for number in range(rounds + 1):
            for name in CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]:
                seconds = entries[name].take_turn((number + 1) * burst)
                if number:  # the first turn is a warm-up
                    speeds[name].append(samples / seconds)
            if number:
                row = ", ".join(f"{name} {values[-1]:.1f}" for name, values in speeds.items())
                say(f"round {number}/{rounds}, samples/s: {row}")
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
