"""Who trains how fast when nothing happens: all contestants of a contest are there at once and take turns."""

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
from bench.report import Say
from bench.running import Running
from holdfast.measuring import spread
from holdfast.plan.costs import Chain, Costs
from holdfast.plan.layout import Layout, lay_out
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.plan.timeline import simulate


@dataclass(frozen=True, kw_only=True)
class SpeedContest:
    """Contestants by name on one shape; ratios are to one of them."""

    title: str
    shape: PipelineShape
    contestants: Mapping[str, Contestant]
    against: Mapping[str, str]  # the ratio's name: whose speed is 1
    burst: int = 4


def take_turns(contest: SpeedContest, *, rounds: int, folder: Path, say: Say) -> dict[str, list[float]]:
    """Seconds a step in each round. Only neighbours in time can be compared: the machine's speed changes."""
    names, burst = list(contest.contestants), contest.burst
    times: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        running: dict[str, Running] = {
            name: stack.enter_context(started(each, contest.shape, folder=folder / str(number), burst=burst))
            for number, (name, each) in enumerate(contest.contestants.items())
        }
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds = running[name].take_turn((number + 1) * burst) / burst
                if number:  # the first turn is a warm-up
                    times[name].append(seconds)
            if number:
                row = ", ".join(f"{name} {1000 * values[-1]:.0f}" for name, values in times.items())
                say(f"{contest.title}, round {number}/{rounds}, ms a step: {row}")
    return times


def rows(contest: SpeedContest, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Every contestant's row: ms a step, and its speed as a multiple of others' in the same round."""
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
    """How many times as fast as the other, round by round.

    >>> ratios({"a": [2.0, 3.0], "b": [1.0, 3.0]}, "a", "b")
    [2.0, 1.0]
    """
    return [theirs / ours for theirs, ours in zip(times[other], times[mine], strict=True)]


def ratio(times: Mapping[str, Sequence[float]], other: str, mine: str) -> float:
    return statistics.median(ratios(times, other, mine))


# --- what the planner promises ---------------------------------------------------------------------


def measured_costs(folder: Path, link: Link) -> list[list[Profile]]:
    """Round by round, the profile that each of the workers measured beside the other; without the warm-up."""
    files = sorted(folder.glob("*/progress.jsonl.costs-*"))
    by_worker = [[_profile(json.loads(line), link) for line in file.read_text().splitlines()] for file in files]
    return [list(profiles) for profiles in zip(*by_worker, strict=True)][1:]


def _profile(costs: list[dict[str, Any]], link: Link) -> Profile:
    layers = tuple(LayerCost(**cost) for cost in costs)
    return Profile(model="", device="", micro_batch=1, layers=layers, inside=link, between=link)


def estimate_cut(profile: Profile, stages: Sequence[int], micro_batches: int) -> float:
    """Seconds a step of one pipeline that is cut so, as the planner reckons.

    >>> from holdfast.plan.profile import uniform
    >>> round(estimate_cut(uniform(4, forward=0.01, backward=0.02), [2, 2], 4), 2)
    0.3
    """
    bounds = (0, *itertools.accumulate(stages))
    chain = Chain(stages=len(stages), per_node=1, lanes=1, micro_batches=micro_batches)
    costs = Costs(profile)
    ends = [0.0] * len(stages)
    for span in simulate(costs.times(chain, bounds), micro_batches):
        ends[span.stage] = max(ends[span.stage], span.end)
    return max(
        float(end + costs.update[stop] - costs.update[first])
        for end, first, stop in zip(ends, bounds, bounds[1:], strict=False)
    )


def estimate(profile: Profile, *, workers: int, micro_batches: int, tolerate: int) -> tuple[float, Layout]:
    """Seconds a step of the pipelines that the planner chooses: its slowest one's.

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
    alone = len(layout.lines) == 1
    seconds = [
        line.template.seconds(len(share), alone=alone)
        for line, share in zip(layout.lines, layout.shares(micro_batches), strict=True)
        if line.template is not None and len(share)
    ]
    return max(seconds), layout
