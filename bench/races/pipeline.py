"""Race of pipelines: torch.distributed.pipelining, data parallelism, the planner's estimate, Varuna-style restarts.

Two cores compute for two workers. Contests with more workers train a model whose layers sleep instead of computing, so
that each worker behaves as if it had a machine of its own; their rows say "waiting".
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.pipelines import fewer_workers
from bench.pipelines.entries import Contestant, PipelineShape
from bench.pipelines.speed_contest import SpeedContest, estimate_cut, measured_costs, ratio, rows, take_turns
from bench.race_report import Bar, Say
from bench.running import BENCH, can_limit
from holdfast.engine.profile.links import measure_inside
from holdfast.measuring import spread

COLUMNS = {
    "step_ms": "ms a step: median (range)",
    "of_pipelining": "speed, of torch pipelining's",
    "of_ddp": "of torch DDP's",
    "of_estimate": "of the planner's estimate",
    "back_s": "s from a loss to the next step",
}
PIPELINING, DDP, MEASURING = "torch pipelining", "torch DDP", "measuring"
EXACT, FAST, SIDE_BY_SIDE = "holdfast, exact", "holdfast, fast", "holdfast, data parallel"
AGAINST = {"of_pipelining": PIPELINING, "of_ddp": DDP}
Part = tuple[dict[str, Any], dict[str, Bar]]
SLOW = "1gbit"  # rate of a slow link, as tc writes it
WAITS = "waiting: layers sleep instead of computing, so that each worker is like a machine of its own"
COMPUTING = PipelineShape(model="gpt", layers=6)
WIDE = PipelineShape(model="wide", layers=8, width=1024, micro_batch=16)
WAITING = PipelineShape(model="waiting", layers=12, micro_batches=12)
LOSING = fewer_workers.LossSizes()


@dataclass(frozen=True, kw_only=True)
class PipelineSizes:
    """Shapes of the contests, rates of their links, and the steps in a turn."""

    computing: PipelineShape = COMPUTING
    wide: PipelineShape = WIDE
    waiting: PipelineShape = WAITING
    losing: fewer_workers.LossSizes = LOSING
    links: tuple[str, ...] = ("", SLOW)
    burst: int = 2


def race(*, rounds: int, say: Say, sizes: PipelineSizes | None = None) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Run the contests one after the other; return results and bars."""
    sizes = sizes or PipelineSizes()
    folder = BENCH / "pipeline"
    shutil.rmtree(folder, ignore_errors=True)
    results: dict[str, Any] = {}
    bars: dict[str, Bar] = {}
    for part in (_computing, _wide, _waiting, _fewer_workers):
        more, held = part(sizes, rounds, folder / part.__name__.strip("_"), say)
        results |= more
        bars |= held
    return results, bars


def _halves(layers: int) -> tuple[int, int]:
    return layers // 2, layers - layers // 2


def _entries(shape: PipelineShape, workers: int, *, rate: str = "", systems: Sequence[str]) -> dict[str, Contestant]:
    """Return contestants by name; all pipelines are cut in the same place."""
    cut, whole = _halves(shape.layers), (shape.layers,)
    known = {
        PIPELINING: Contestant(system="torch", workers=workers, stages=cut, rate=rate),
        EXACT: Contestant(system="holdfast", workers=workers, stages=cut, rate=rate),
        FAST: Contestant(system="holdfast", workers=workers, stages=cut, rate=rate, options=["--numerics", "fast"]),
        DDP: Contestant(system="torch", workers=workers, stages=whole, rate=rate),
        SIDE_BY_SIDE: Contestant(system="holdfast", workers=workers, stages=(1,), rate=rate),
        MEASURING: Contestant(system="measuring", workers=workers, stages=cut),
    }
    return {name: known[name] for name in systems}


def _computing(sizes: PipelineSizes, rounds: int, folder: Path, say: Say) -> Part:
    """Race two stages on two cores, against all others and against the planner's estimate from costs of that moment."""
    shape = sizes.computing
    systems = [PIPELINING, EXACT, FAST, DDP, SIDE_BY_SIDE, MEASURING]
    contest = SpeedContest(
        title="2 stages",
        shape=shape,
        contestants=_entries(shape, 2, systems=systems),
        against=AGAINST,
        burst=sizes.burst,
    )
    link = measure_inside().link
    times = take_turns(contest, rounds=rounds, folder=folder, say=say)
    del times[MEASURING]
    results = rows(contest, times)
    cut = _halves(shape.layers)
    promised = [
        statistics.mean(estimate_cut(profile, cut, shape.micro_batches) for profile in profiles)
        for profiles in measured_costs(folder, link)
    ]
    for name in (PIPELINING, EXACT, FAST):
        shares = [a / b for a, b in zip(promised, times[name], strict=True)]
        results[f"2 stages: {name}"]["of_estimate"] = spread(shares)
    bars = {
        f"2 stages, {name.split(', ')[1]}, of torch's pipelining": Bar(value=ratio(times, PIPELINING, name), bar=1.0)
        for name in (EXACT, FAST)
    }
    return results, bars


def _wide(sizes: PipelineSizes, rounds: int, folder: Path, say: Say) -> Part:
    """Race with large weights and small activations, where a pipeline sends less than data parallelism."""
    results: dict[str, Any] = {}
    bars: dict[str, Bar] = {}
    for rate in sizes.links:
        title = f"wide, {rate}" if rate else "wide"
        if rate and not can_limit():
            say(f"no link of {rate}: this machine has no network namespaces for us, or no tc")
            continue
        contest = SpeedContest(
            title=title,
            shape=sizes.wide,
            contestants=_entries(sizes.wide, 2, rate=rate, systems=[PIPELINING, EXACT, DDP, SIDE_BY_SIDE]),
            against=AGAINST,
            burst=sizes.burst,
        )
        times = take_turns(contest, rounds=_fewer(rounds, 2), folder=folder / title.replace(", ", "-"), say=say)
        results |= rows(contest, times)
        if rate:  # where a pipeline has to pay
            bars[f"{title}: a pipeline, of torch's DDP"] = Bar(value=ratio(times, DDP, EXACT), bar=1.0)
    return results, bars


def _waiting(sizes: PipelineSizes, rounds: int, folder: Path, say: Say) -> Part:
    """Race two pipelines of two stages; torch's sum their gradients by DDP around each stage."""
    say(WAITS)
    title = "2 x 2 stages, waiting"
    contest = SpeedContest(
        title=title,
        shape=sizes.waiting,
        contestants=_entries(sizes.waiting, 4, systems=[PIPELINING, EXACT, FAST, DDP]),
        against=AGAINST,
        burst=sizes.burst,
    )
    times = take_turns(contest, rounds=_fewer(rounds, 2), folder=folder, say=say)
    return rows(contest, times), {
        f"{title}, of torch's pipelining": Bar(value=ratio(times, PIPELINING, EXACT), bar=1.0)
    }


def _fewer(rounds: int, divisor: int) -> int:
    return max(1, rounds // divisor)


def _fewer_workers(sizes: PipelineSizes, rounds: int, folder: Path, say: Say) -> Part:
    """Race while workers are lost."""
    return fewer_workers.race(sizes.losing, rounds=_fewer(rounds, 4), folder=folder, say=say)
