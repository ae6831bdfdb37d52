"""Teams of two ranks against torchft with FSDP2: failure-free cost, and the time from a kill to the next commit."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.data_parallel.contestants import Workload, racing
from bench.race_report import Bar, Say
from bench.running import BENCH, time_turns
from holdfast.measuring import spread
from holdfast.simulate.kill import time_kill

COLUMNS = {
    "samples_per_s": "samples/s: median (range)",
    "of_torchft": "of torchft in the same round",
    "recovery_ms": "ms from a kill to the next step: median (range)",
    "of_tuned": "times torchft tuned",
}
WORKLOAD = Workload(workers=4, team=2)
SMALL = Workload(workers=4, team=2, micro_batches=2, micro_batch=2, width=128)  # as in the race of recoveries
FAST = {"holdfast-exact": "holdfast", "torchft-all": "torchft", "hsdp": "plain HSDP"}
SAFE = {"holdfast-exact": "holdfast", "torchft": "torchft", "torchft-tuned": "torchft, tuned"}


def race(*, rounds: int, kills: int, burst: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let all contestants take ``rounds`` turns, then kill a rank of each ``kills`` times; return results and bars."""
    shutil.rmtree(BENCH / "teams", ignore_errors=True)
    return results_of(_cost(rounds, burst, say), _recovery(kills, say))


def results_of(
    speeds: Mapping[str, Sequence[float]], recoveries: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Return results and bars from samples a second and ms, by contestant and round."""
    results: dict[str, Any] = {name: {} for name in (*FAST.values(), *SAFE.values())}
    for name, values in speeds.items():
        of = [mine / theirs for mine, theirs in zip(values, speeds["torchft"], strict=True)]
        results[name] |= {"samples_per_s": spread(values), "of_torchft": spread(of)}
    for name, values in recoveries.items():
        of = [mine / theirs for mine, theirs in zip(values, recoveries["torchft, tuned"], strict=True)]
        results[name] |= {"recovery_ms": spread(values), "of_tuned": spread(of)}
    ours, tuned = (statistics.median(recoveries[name]) for name in ("holdfast", "torchft, tuned"))
    bars = {
        "throughput, of torchft": Bar(value=results["holdfast"]["of_torchft"]["median"], bar=1.0),
        "kill to next commit, of torchft tuned": Bar(value=ours / tuned, bar=0.5, at_most=True),
    }
    return results, bars


def _cost(rounds: int, burst: int, say: Say) -> dict[str, list[float]]:
    with ExitStack() as stack:
        entries = {
            shown: stack.enter_context(
                racing(name, WORKLOAD, steps=1_000_000, folder=BENCH / "teams" / name, burst=burst)
            )
            for name, shown in FAST.items()
        }
        times = time_turns(entries, title="teams", rounds=rounds, burst=burst, say=say)
    samples = WORKLOAD.workers * WORKLOAD.micro_batches * WORKLOAD.micro_batch  # in a step
    return {name: [samples / seconds for seconds in values] for name, values in times.items()}


def _recovery(kills: int, say: Say) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {shown: [] for shown in SAFE.values()}
    names = list(SAFE)
    for number in range(kills):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with racing(name, SMALL, steps=10_000, folder=BENCH / "teams" / f"{name}-{number}") as running:
                seconds, _ = time_kill(running.update, workers=SMALL.workers, seed=number)
            times[SAFE[name]].append(1000 * seconds)
            say(f"teams, kill {number + 1}/{kills}: {SAFE[name]}: {1000 * seconds:.0f} ms to the next step")
    return times
