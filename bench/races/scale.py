"""Race of sizes: what the first group, votes, regroups and losses cost with more and more workers.

Real workers train a tiny model on this machine; a few are killed, one after the other. For a thousand workers and more
the coordinator's roster and the agents' desks are real, and connections are simulated.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.running import BENCH, ROOT, environment
from bench.scale.real_workers import Measured, lose_workers, memory_allows
from bench.scale.roster_cost import measure
from holdfast.cluster.talk import DIRECT
from holdfast.errors import HoldfastError
from holdfast.measuring import spread

COLUMNS = {
    "forming_ms": "coordinator's processor ms to form the first group",
    "forming_bytes": "bytes of forming it, a worker",
    "vote_messages": "messages of a vote, a worker",
    "vote_bytes": "its bytes",
    "group_messages": "messages of a regroup, a worker",
    "group_bytes": "its bytes",
    "connections": "connections of a worker",
    "coordinator_ms": "coordinator's processor ms a loss",
    "ms": "ms from a kill to the next commit",
    "ratio": "time by halves, of direct",
}
COUNTS = ("vote_messages", "vote_bytes", "group_messages", "group_bytes", "connections")
SIZES = (4, 8, 16, 32, 64, 96)
SIMULATED = {1_000: 0.3, 10_000: 5.0}  # workers, and the most seconds of the coordinator that a loss may cost
ON_EACH_HOST = 8  # simulated workers
EXCHANGES = [(holders, size) for holders in (4, 8, 16) for size in (1 << 12, 1 << 18, 1 << 21)]  # parameters
EXCHANGE_SECONDS = 300.0  # limit for one size; it takes a few seconds
PICTURE = BENCH / "scale.png"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read numbers of workers, as in ``4,16``. Raises ``ValueError`` on anything else."""
    return tuple(int(word) for word in text.split(","))


def race(*, workers: Sequence[int], rounds: int, exchanges: bool, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Measure all sizes that fit into memory, then simulated ones and both exchanges; return results and bars."""
    folder = BENCH / "scale"
    shutil.rmtree(folder, ignore_errors=True)
    real: dict[int, Measured] = {}
    for count in workers:
        if not memory_allows(count + rounds):
            say(f"scale: {count} workers do not fit into memory")
            continue
        real[count] = found = lose_workers(folder / str(count), workers=count, losses=rounds)
        ms = statistics.median(loss.ms for loss in found.losses)
        votes = f"{found.per_worker('vote_messages'):.3g} messages a vote"
        say(f"scale, {count} workers: formed in {found.forming_ms:.1f} processor ms, {votes}, {ms:.0f} ms to a commit")
    formed, simulated = {}, {}
    for count in SIMULATED:
        begins, losses = measure(count, on_each_host=ON_EACH_HOST, rounds=rounds)
        formed[count], simulated[count] = [[cost.seconds for cost in costs] for costs in (begins, losses)]
        form, lose = statistics.median(formed[count]), statistics.median(simulated[count])
        say(f"scale, {count} simulated workers: {form:.3f} s of the coordinator to form, {lose:.3f} s a loss")
    results = {f"{count} workers": _row(found) for count, found in real.items()}
    results |= {
        f"{count} simulated": {
            "forming_ms": spread([1000 * s for s in formed[count]]),
            "coordinator_ms": spread([1000 * s for s in simulated[count]]),
        }
        for count in simulated
    }
    if exchanges:
        results |= compare_exchanges(folder / "exchanges", say)
    from bench.scale.scale_picture import draw

    draw(PICTURE, real, formed=formed, losses=simulated)
    return results, bars_of({c: {name: f.per_worker(name) for name in COUNTS} for c, f in real.items()}, simulated)


def _row(found: Measured) -> dict[str, Any]:
    counts = {name: round(found.per_worker(name), 1) for name in COUNTS}
    costs = {name: spread([getattr(loss, name) for loss in found.losses]) for name in ("coordinator_ms", "ms")}
    forming = {"forming_ms": round(found.forming_ms, 1), "forming_bytes": round(found.forming_bytes)}
    return {**forming, **counts, **costs, "most_vote_messages": found.most("vote_messages")}


def bars_of(counts: Mapping[int, Mapping[str, float]], simulated: Mapping[int, Sequence[float]]) -> dict[str, Bar]:
    """Return the bars. ``counts``: means over the workers, by their number. ``simulated``: seconds of each loss."""
    bars = {}
    votes = {count: found["vote_messages"] for count, found in counts.items()}
    if len(votes) > 1:
        small, large = min(votes), max(votes)
        growth = (votes[large] / votes[small]) / (math.log2(large) / math.log2(small))
        bars[f"growth of a vote's messages from {small} to {large} workers, of log2's"] = Bar(
            value=growth, bar=1.0, at_most=True
        )
    rounds = [found / math.log2(count) for count, found in votes.items() if count > DIRECT]
    if rounds:  # up to that number everybody tells everybody
        name = f"messages of a vote, of log2(workers), above {DIRECT} workers"
        bars[name] = Bar(value=max(rounds), bar=1.0, at_most=True)
    if 16 in counts and 64 in counts:
        ratio = counts[64]["group_bytes"] / counts[16]["group_bytes"]
        bars["bytes of a regroup at 64 workers, of those at 16"] = Bar(value=ratio, bar=1.5, at_most=True)
    for count, seconds in simulated.items():
        name = f"seconds of the coordinator for a loss at {count} workers"
        bars[name] = Bar(value=statistics.median(seconds), bar=SIMULATED[count], at_most=True)
    return bars


def compare_exchanges(folder: Path, say: Say) -> dict[str, Any]:
    """Let holders of one layer sum it both ways, step by step in turn; return the ratios of the times."""
    rows = {}
    folder.mkdir(parents=True, exist_ok=True)
    for holders, size in EXCHANGES:
        times = _time_both(folder / f"{holders}-{size}.json", holders, size)
        pairs = zip(times["by halves"], times["directly"], strict=False)
        ratio = spread([halves / direct for halves, direct in pairs])
        name = f"{holders} holders, {4 * size / 1e6:.3g} MB"
        rows[name] = {"ratio": ratio, **{way: spread([1000 * s for s in values]) for way, values in times.items()}}
        say(f"scale, {name}: by halves takes {ratio['median']:.2f} of the time of direct")
    return rows


def _time_both(path: Path, holders: int, size: int) -> dict[str, list[float]]:
    script = ROOT / "bench" / "scale" / "exchange_training.py"
    steps = 60 if size < 1 << 20 else 24
    words = ["run", "-n", str(holders), "--log-dir", f"{path.stem}-logs", "--no-progress"]
    words += [str(script), path.name, str(size), str(holders), str(steps)]
    with path.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "holdfast.cli", *words]
        done = subprocess.run(
            command, cwd=path.parent, env=environment(), stdout=log, stderr=log, timeout=EXCHANGE_SECONDS, check=False
        )
    if done.returncode or not path.exists():
        raise HoldfastError("the exchanges were not measured", hint=f"see {path.with_suffix('.log')}")
    times: dict[str, list[float]] = json.loads(path.read_text())
    return times
