"""Selective logging: with a smaller budget fewer boundaries are logged, and a loss makes more layers compute again.

For each budget a worker of every stage is killed once, as the kill's cost depends on the stage. The planner's bytes
and the profile's time stand beside the measured ones.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.replays import replay_pictures
from bench.replays.trial import EVERY, Ground, KillOutcome, Way, kill_after
from bench.running import BENCH
from holdfast.measuring import spread
from holdfast.plan.profile import Profile
from holdfast.words import size_text

BYTES_BAR = 0.05  # share by which measured bytes may differ from the predicted
PARTS = 3  # budgets are 0, 1, 2 and 3 thirds of the whole log


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Seconds of a recovery that do not depend on what is computed again; with the redone step."""

    replay: float  # noticing, regrouping, new places, the redone step
    back: float  # noticing, fresh workers, reading the checkpoint, the redone step


def fixed_costs(replays: Sequence[KillOutcome], returns: Sequence[KillOutcome]) -> Fixed:
    """Return the fixed costs, measured in runs with (``replays``) and without a log (``returns``)."""
    beside = [each.seconds - each.replayed for each in replays if each.replayed is not None]
    starting = [each.resumed + each.step_seconds for each in returns if each.resumed is not None]
    return Fixed(replay=statistics.median(beside), back=statistics.median(starting))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Recovery time as estimated from a profile.

    Assumptions: beside ``fixed`` only computing takes time, and sending takes none. Micro-batches are shared out so
    that no core waits. A layer costs what was measured with all cores at work. Every worker that replays makes every
    update. After a return to the checkpoint all layers are computed again, in a pipeline without bubbles.

    >>> from holdfast.plan.profile import uniform
    >>> profile = uniform(8, forward=0.01, backward=0.02)
    >>> fixed = Fixed(replay=0.5, back=2.0)
    >>> made = Estimate(profile=profile, micro_batches=10, workers=4, cores=2, fixed=fixed)
    >>> round(made.seconds([2, 3], steps=5), 3), round(made.seconds([], steps=5), 3)
    (2.0, 8.0)
    """

    profile: Profile
    micro_batches: int
    workers: int
    cores: int
    fixed: Fixed

    def seconds(self, layers: Sequence[int], *, steps: int) -> float:
        """Return seconds until these layers are computed again; without any, until all are past the lost steps."""
        costs = [self.profile.layers[layer] for layer in layers or range(len(self.profile.layers))]
        workers = self.workers - 1 if layers else self.workers  # one is lost, and replaced only afterwards
        compute = self.micro_batches * sum(cost.forward + cost.backward for cost in costs)
        updates = sum(cost.update for cost in costs) * (workers if layers else 1)
        fixed = self.fixed.replay if layers else self.fixed.back
        return fixed + steps * (compute + updates) / min(workers, self.cores)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Budget of a log, and the bytes and seconds that it came to."""

    parts: int  # of the whole log, in thirds
    budget: int  # bytes a step
    predicted_bytes: int
    measured_bytes: float
    predicted_s: tuple[float, ...]  # by the stage whose worker was killed
    measured_s: tuple[float, ...]
    layers: tuple[int, ...]  # computed again, by that stage: all of them, where everyone went back


def race(
    ground: Ground, estimate: Estimate, *, steps: int, folder: Path, say: Say
) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Kill a worker of each stage with each budget, budgets in turns; return results and bars."""
    outcomes: dict[int, list[KillOutcome]] = {parts: [] for parts in range(PARTS, -1, -1)}
    whole = 0
    for stage in range(ground.workers):
        for parts, done in outcomes.items():
            way = Way(name=f"{parts} of {PARTS}", options=("--log", *budget_options(whole, parts)))
            done.append(kill_after(ground, way, steps=steps, stage=stage, folder=folder / f"{stage}-{parts}"))
            whole = whole or done[-1].predicted_bytes
        told = ", ".join(f"{each[-1].seconds:.2f} ({len(each[-1].layers) or 'all'})" for each in outcomes.values())
        say(f"stage {stage} lost, budgets of 3, 2, 1, 0 thirds, s (layers replayed): {told}")
    points = [_point(parts, whole, each, estimate, steps) for parts, each in sorted(outcomes.items())]
    replay_pictures.draw_budgets(BENCH / "replay-budget.png", points, steps=steps)
    say(f"written: {BENCH / 'replay-budget.png'}")
    return {title(point): row(point) for point in points}, bars_of(points)


def budget_options(whole: int, parts: int) -> list[str]:
    """Return the options for a part of the bytes that a whole log takes until the next checkpoint.

    >>> budget_options(300, 1), budget_options(300, 0), budget_options(0, 3)
    (['--log-budget', '100000'], ['--log-budget', '1'], [])
    """
    if parts == PARTS:
        return []
    return ["--log-budget", str(max(1, whole * EVERY * parts // PARTS))]  # 0 would be no log at all


def _point(parts: int, whole: int, outcomes: Sequence[KillOutcome], estimate: Estimate, steps: int) -> Point:
    return Point(
        parts=parts,
        budget=whole * parts // PARTS,
        predicted_bytes=outcomes[0].predicted_bytes,
        measured_bytes=statistics.median(each.measured_bytes for each in outcomes),
        predicted_s=tuple(estimate.seconds(each.layers, steps=steps) for each in outcomes),
        measured_s=tuple(each.seconds for each in outcomes),
        layers=tuple(len(each.layers) or len(estimate.profile.layers) for each in outcomes),
    )


def title(point: Point) -> str:
    """Return the name of a point's row."""
    return f"budget {point.parts}/{PARTS} of the log"


def row(point: Point) -> dict[str, Any]:
    """Return a point's numbers."""
    shares = [measured / predicted for measured, predicted in zip(point.measured_s, point.predicted_s, strict=True)]
    return {
        "back_s": spread(point.measured_s),
        "bytes": f"{size_text(point.predicted_bytes)}, {size_text(round(point.measured_bytes))}",
        "of_predicted": spread(shares),
        "predicted_s": spread(point.predicted_s),
        "layers": list(point.layers),
        "predicted_bytes": point.predicted_bytes,
        "measured_bytes": point.measured_bytes,
    }


def bars_of(points: Iterable[Point]) -> dict[str, Bar]:
    """Return the bars: bytes are as predicted and within the budget; a larger one never computes more layers again."""
    points = list(points)
    deviations = [abs(p.measured_bytes - p.predicted_bytes) / max(p.predicted_bytes, 1) for p in points]
    within = all(p.predicted_bytes <= p.budget for p in points)
    fewer = all(sum(a.layers) >= sum(b.layers) for a, b in itertools.pairwise(points))
    return {
        "bytes beside the predicted, the largest of all budgets": Bar(
            value=max(deviations), bar=BYTES_BAR, at_most=True
        ),
        "budgets are kept, and larger ones have fewer layers replayed": Bar(value=float(within and fewer), bar=1.0),
    }
