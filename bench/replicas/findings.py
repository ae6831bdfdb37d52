"""Findings of ``bench sync``: a row for each method, and the bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.race_report import Bar
from bench.replicas.processes import SyncOutcome
from bench.replicas.schedule import BSP, WORKERS, exchange_bytes
from bench.replicas.tasks import TASKS, LearningTask
from holdfast.measuring import spread

COLUMNS = {
    "target_s": "s to target: median (range)",
    "speed": "times BSP's speed",
    "target_mb": "MB to target",
    "samples": "1,000 samples to target",
    "total_mb": "MB in all",
    "synchronised": "synchronised",
    "final": "score at the end",
    "even": "after as many samples as BSP",
    "local": "local models'",
    "seeds": "seeds",
}
FASTER_BAR = 5.0  # times BSP's speed to the target
ALWAYS_EQUAL = ("BSP", "PowerSGD")  # replicas always hold the averaged weights
Setting = tuple[str, str, int | None]  # task, split, rate


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Seconds, bytes and samples until the target was reached."""

    seconds: float
    sent: float
    samples: float


def reach(outcome: SyncOutcome) -> Reach | None:
    """Return when the target was reached, or None.

    Between two evaluations it is interpolated. Replicas that were apart have to average first: that is added.
    """
    task = TASKS[outcome.run.task]
    hit = next((n for n, score in enumerate(outcome.scores) if task.reached(score)), None)
    if hit is None:
        return None
    part = 1.0
    if hit > 0 and outcome.scores[hit] != outcome.scores[hit - 1]:
        before = outcome.scores[hit - 1]
        part = (task.target - before) / (outcome.scores[hit] - before)

    def at(values: Sequence[float]) -> float:
        before = values[hit - 1] if hit else 0
        return before + part * (values[hit] - before)

    sent, seconds = at(outcome.sent), at(outcome.seconds)
    if outcome.run.kind not in ALWAYS_EQUAL:
        sent += WORKERS * exchange_bytes(task)
        seconds += exchange_bytes(task) * 8 / (outcome.run.rate * 1e6) if outcome.run.rate else 0.0
    return Reach(seconds=seconds, sent=sent, samples=at(outcome.at) * task.batch * WORKERS)


def place_of(outcome: SyncOutcome) -> Setting:
    """Return the setting that a run was made in."""
    return outcome.run.task, outcome.run.split, outcome.run.rate


def title(place: Setting) -> str:
    """Return a setting in words.

    >>> title(("gpt", "iid", 20)), title(("gpt", "iid", None))
    ('gpt, iid, 20 Mbit', 'gpt, iid, loopback without limit')
    """
    task, split, rate = place
    return f"{task}, {split}, {'loopback without limit' if rate is None else f'{rate} Mbit'}"


def grouped(outcomes: Sequence[SyncOutcome]) -> dict[Setting, dict[str, list[SyncOutcome]]]:
    """Return outcomes by setting, then by method, with seeds in order."""
    found: dict[Setting, dict[str, list[SyncOutcome]]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.run.seed):
        found.setdefault(place_of(outcome), {}).setdefault(outcome.run.method, []).append(outcome)
    return found


def rows(outcomes: Sequence[SyncOutcome]) -> dict[str, Any]:
    """Return a row for each method in each setting, the fastest to the target first."""
    table: dict[str, Any] = {}
    for place, methods in sorted(grouped(outcomes).items(), key=lambda each: _rank(each[0])):
        bsp = {each.run.seed: each for each in methods.get(BSP.name, [])}
        for name in sorted(methods, key=lambda name: _median_seconds(methods[name])):
            table[f"{title(place)}: {name}"] = row(methods[name], bsp)
    return table


def _rank(place: Setting) -> tuple[int, int, str]:
    task, split, rate = place
    return rate or 0, list(TASKS).index(task), split


def _median_seconds(runs: Sequence[SyncOutcome]) -> float:
    found = [reach(each) for each in runs]
    return statistics.median(each.seconds if each is not None else math.inf for each in found)


def row(runs: Sequence[SyncOutcome], bsp: dict[int, SyncOutcome]) -> dict[str, Any]:
    """Return a method's numbers over all seeds; ``bsp`` has BSP's outcomes by seed."""
    task = TASKS[runs[0].run.task]
    found = [(each, reach(each)) for each in runs]
    there = [(each, when) for each, when in found if when is not None]
    speeds = [_ratio(bsp.get(each.run.seed), when.seconds) for each, when in there]
    shown: dict[str, Any] = {
        "total_s": spread([each.seconds[-1] for each in runs]),
        "total_mb": spread([each.sent[-1] / 1e6 for each in runs]),
        "synchronised": spread([float(len(each.synchronised)) for each in runs]),
        "final": spread([each.scores[-1] for each in runs]),
        "even": spread(even) if (even := [score for each in runs if (score := score_at(each, task.steps))]) else None,
        "local": spread([statistics.mean(each.local) for each in runs]),
        "seeds": len(runs),
        "measure": task.measure,
        "target": task.target,
        "lr": runs[0].run.lr,
    }
    if len(there) < len(runs):
        cap = f" in {runs[0].run.steps} steps, all that there was time for" if runs[0].capped else ""
        shown["target_s"] = f"reached with {len(there)} of {len(runs)} seeds{cap}"
        return shown
    shown["target_s"] = spread([when.seconds for _, when in there])
    shown["target_mb"] = spread([when.sent / 1e6 for _, when in there])
    shown["samples"] = spread([when.samples / 1000 for _, when in there])
    known = [speed for speed in speeds if speed is not None]
    shown["speed"] = spread(known) if known else None
    return shown


def score_at(outcome: SyncOutcome, step: int) -> float | None:
    """Return the score after so many steps, or None."""
    return next((score for at, score in zip(outcome.at, outcome.scores, strict=True) if at == step), None)


def _ratio(bsp: SyncOutcome | None, seconds: float) -> float | None:
    """Return how many times as fast as BSP it was with the same seed; BSP that never arrived counts to its end."""
    if bsp is None:
        return None
    when = reach(bsp)
    return (bsp.seconds[-1] if when is None else when.seconds) / seconds


# --- the bars ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MethodMedians:
    """Medians of a method over seeds, each compared with another method's of the same seed."""

    name: str
    seconds: float
    worse_by: float  # than BSP, at the end
    of_bsp: float  # how many times as fast
    of_local: tuple[float, float] = (math.inf, math.inf)  # seconds and bytes to target, of the best Local SGD's


def bars_of(outcomes: Sequence[SyncOutcome], rate: int = 20) -> dict[str, Bar]:
    """Return the bars of each task, at the slow link and on data that all can read."""
    bars: dict[str, Bar] = {}
    for (task, split, at), methods in grouped(outcomes).items():
        if split == "iid" and at == rate and BSP.name in methods:
            bars |= _bars(TASKS[task], methods)
    return bars


def _bars(task: LearningTask, methods: dict[str, list[SyncOutcome]]) -> dict[str, Bar]:
    seeds = len(methods[BSP.name])  # what has run with one of them is no match
    kinds = {name: runs[0].run.kind for name, runs in methods.items() if len(runs) == seeds}
    plain = [n for n, kind in kinds.items() if kind == "LocalSGD" and "matched" not in n and "overlap" not in n]
    local = best([standing(task, methods, name) for name in plain], task)
    against = local.name if local else None
    selective = [n for n, kind in kinds.items() if kind == "SelSync"]
    ours = best([standing(task, methods, name, against) for name in selective], task)
    where = f"{task.name}, 20 Mbit"
    if ours is None:
        return {f"{where}: no SelSync reached the target": Bar(value=0.0, bar=FASTER_BAR)}
    bars = {
        f"{where}: {ours.name}: times as fast to the target as BSP": Bar(value=ours.of_bsp, bar=FASTER_BAR),
        f"{where}: {ours.name}: {task.measure} at the end, worse than BSP's by": Bar(
            value=ours.worse_by, bar=task.same, at_most=True
        ),
    }
    if local is not None:
        seconds, sent = ours.of_local
        bars[f"{where}: {ours.name}: time to the target, of {local.name}'s"] = Bar(value=seconds, bar=1, at_most=True)
        bars[f"{where}: {ours.name}: bytes to the target, of {local.name}'s"] = Bar(value=sent, bar=1, at_most=True)
    return bars


def best(standings: Sequence[MethodMedians], task: LearningTask) -> MethodMedians | None:
    """Return the fastest method of those that end as well as BSP; one that beats Local SGD in both goes first."""
    there = [each for each in standings if each.seconds < math.inf]
    as_good = [each for each in there if each.worse_by <= task.same] or there
    both = [each for each in as_good if max(each.of_local) <= 1] or as_good
    return min(both, key=lambda each: each.seconds, default=None)


def standing(
    task: LearningTask, methods: dict[str, list[SyncOutcome]], name: str, against: str | None = None
) -> MethodMedians:
    """Return a method's medians; ``against`` is the Local SGD to compare with."""
    bsp = {each.run.seed: each for each in methods[BSP.name]}
    rivals = {each.run.seed: reach(each) for each in methods.get(against or "", [])}
    seconds, worse, of_bsp, of_local = [], [], [], []
    for each in methods[name]:
        when, rival = reach(each), rivals.get(each.run.seed)
        same = bsp.get(each.run.seed)
        seconds.append(when.seconds if when else math.inf)
        if same is not None:
            worse.append(task.worse_by(each.scores[-1], than=same.scores[-1]))
            of_bsp.append((_ratio(same, when.seconds) or 0.0) if when else 0.0)
        if when and rival:
            of_local.append((when.seconds / rival.seconds, when.sent / rival.sent))
    middle = (
        statistics.median(a for a, _ in of_local) if of_local else math.inf,
        statistics.median(b for _, b in of_local) if of_local else math.inf,
    )
    return MethodMedians(
        name=name,
        seconds=statistics.median(seconds),
        worse_by=statistics.median(worse) if worse else math.inf,
        of_bsp=statistics.median(of_bsp) if of_bsp else 0.0,
        of_local=middle,
    )
