"""Failure-free cost: throughput against plain DDP and torchft, interleaved in one run."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from typing import Any

from bench.data_parallel.contestants import Workload, racing
from bench.race_report import Bar, Say
from bench.running import BENCH, time_turns
from holdfast.measuring import spread

COLUMNS = {"samples_per_s": "samples/s: median (range)", "of_ddp": "of DDP in the same round"}
CONTESTANTS = ["ddp", "holdfast-fast", "holdfast-exact", "torchft-all"]


def race(*, workers: int, rounds: int, burst: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let all contestants take turns of ``burst`` steps; return results and bars."""
    workload = Workload(workers=workers)
    folder = BENCH / "overhead"
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        entries = {
            name: stack.enter_context(racing(name, workload, steps=1_000_000, folder=folder / name, burst=burst))
            for name in CONTESTANTS
        }
        times = time_turns(entries, title="overhead", rounds=rounds, burst=burst, say=say)
    samples = workers * workload.micro_batches * workload.micro_batch  # in a step
    speeds = {name: [samples / seconds for seconds in values] for name, values in times.items()}
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
