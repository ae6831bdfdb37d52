"""Failure-free cost: throughput against plain DDP and torchft, interleaved in one run."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from typing import Any

from bench.data_parallel.contestants import Workload, racing
from bench.report import Bar, Say
from bench.running import BENCH
from holdfast.measuring import spread

COLUMNS = {"samples_per_s": "samples/s: median (range)", "of_ddp": "of DDP in the same round"}
CONTESTANTS = ["ddp", "holdfast-fast", "holdfast-exact", "torchft-all"]


def race(*, workers: int, rounds: int, burst: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let all contestants take turns of ``burst`` steps, in an order that rotates; return results and bars.

    Shared machines speed up and slow down by tens of per cent within seconds: only neighbours in time
    can be compared, so ratios are taken within a round, and their median over many rounds.
    """
    workload = Workload(workers=workers)
    speeds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    samples = burst * workers * workload.micro_batches * workload.micro_batch
    shutil.rmtree(BENCH / "overhead", ignore_errors=True)
    with ExitStack() as stack:
        entries = {
            name: stack.enter_context(
                racing(name, workload, steps=1_000_000, folder=BENCH / "overhead" / name, burst=burst)
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
