"""Contests of speed while nothing fails: all contestants are started at once and take turns."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.pipelines.entries import Contestant, PipelineShape, started
from bench.race_report import Say
from bench.running import time_turns
from holdfast.measuring import spread
from holdfast.plan.lay_out import lay_out
from holdfast.plan.layout import Layout
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.timeline import simulate


@dataclass(frozen=True, kw_only=True)
class SpeedContest:
    """Contestants by name on one shape, and whose speed ratios are to."""

    title: str
    shape: PipelineShape
    contestants: Mapping[str, Contestant]
    against: Mapping[str, str]  # the ratio's name: whose speed is 1
    burst: int = 4


def take_turns(contest: SpeedContest, *, rounds: int, folder: Path, say: Say) -> dict[str, list[float]]:
    """Start all contestants and let them take turns; return seconds a step in each round."""
    burst = contest.burst
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(started(each, contest.shape, folder=folder / str(number), burst=burst))
            for number, (name, each) in enumerate(contest.contestants.items())
        }
        return time_turns(running, title=contest.title, rounds=rounds, burst=burst, say=say)


def rows(contest: SpeedContest, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return a row for each contestant: ms a step, and its speed as a multiple of others' in the same round."""
    return {
        f"{contest.title}: {name}": {
            "step_ms": spread([1000 * each for each in mine]),
            **{
                key: spread(ratios(times, other, name))
                for key, other in contest.against.items()
                if other != name and other in times
            },
        }
        for name, mine in times.items()
    }


def ratios(times: Mapping[str, Sequence[float]], other: str, mine: str) -> list[float]:
    """Return how many times as fast as the other it was, round by round.

    >>> ratios({"a": [2.0, 3.0], "b": [1.0, 3.0]}, "a", "b")
    [2.0, 1.0]
    """
    return [theirs / ours for theirs, ours in zip(times[other], times[mine], strict=True)]


def ratio(times: Mapping[str, Sequence[float]], other: str, mine: str) -> float:
    """Return the median of ``ratios``."""
    return statistics.median(ratios(times, other, mine))


# --- what the planner promises ---------------------------------------------------------------------


def measured_costs(folder: Path, link: Link) -> list[list[Profile]]:
    """Return, round by round, the profiles that the workers measured beside each other; without the warm-up."""
    files = sorted(folder.glob("*/progress.jsonl.costs-*"))
    by_worker = [[_profile(json.loads(line), link) for line in file.read_text().splitlines()] for file in files]
    return [list(profiles) for profiles in zip(*by_worker, strict=True)][1:]


def _profile(costs: list[dict[str, Any]], link: Link) -> Profile:
    layers = tuple(LayerCost(**cost) for cost in costs)
    return Profile(model="", device="", micro_batch=1, layers=layers, inside=link, between=link)


def estimate_cut(profile: Profile, stages: Sequence[int], micro_batches: int) -> float:
    """Return the seconds a step of one pipeline with these stages, as the planner estimates.

    >>> from holdfast.plan.profile import uniform
    >>> round(estimate_cut(uniform(4, forward=0.01, backward=0.02), [2, 2], 4), 2)
    0.3
    """
    bounds = (0, *itertools.accumulate(stages))
    chain = Chain(stages=len(stages), per_node=1, lanes=1, micro_batches=micro_batches)
    costs = StageCosts(profile)
    ends = [0.0] * len(stages)
    for span in simulate(costs.times(chain, bounds), micro_batches):
        ends[span.stage] = max(ends[span.stage], span.end)
    return max(
        float(end + costs.update[stop] - costs.update[first])
        for end, first, stop in zip(ends, bounds, bounds[1:], strict=False)
    )


def estimate(profile: Profile, *, workers: int, micro_batches: int, tolerate: int) -> tuple[float, Layout]:
    """Return the seconds a step of the planner's slowest pipeline, and its layout.

    >>> from holdfast.plan.profile import uniform
    >>> seconds, layout = estimate(uniform(4), workers=3, micro_batches=6, tolerate=0)
    >>> round(seconds, 2), layout.reason
    (0.28, '3 pipelines of 1 worker')
    """
    layout = lay_out(
        layers=len(profile.layers),
        workers=[f"0.{number}" for number in range(workers)],
        held={},
        leaving=(),
        micro_batches=micro_batches,
        tolerate=tolerate,
        stages=None,
        profile=profile,
        hosts={},
    )
    assert isinstance(layout, Layout), "the shapes of this race fit"
    alone = len(layout.pipelines) == 1
    seconds = [
        line.template.seconds(len(share), alone=alone)
        for line, share in zip(layout.pipelines, layout.shares(micro_batches), strict=True)
        if line.template is not None and len(share)
    ]
    return max(seconds), layout
