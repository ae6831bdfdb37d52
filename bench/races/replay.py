"""Race of ways back from a loss that no replica makes good: replay from the log, or all return to the checkpoint.

There are four stages with one copy of each layer. A worker is killed some steps after the checkpoint. The time ends
when the step that was running is committed. Three ways race: all survivors replay the lost stage's micro-batches
together; one survivor does it alone; without a log all begin again from the checkpoint, with new workers from the
zygote.

The model computes. Layers that sleep would give each worker a core of its own, which this machine does not have, and
time saved would not be work saved. It is a transformer with as many blocks as stages and with batches that are large
for its weights, as in real training: the cost of weights (sums of gradients, updates) then does not hide the cost of
the batch. The gain depends on that choice. Blocks with four times the weights and two thirds of the bytes in a batch
gained 2.3 times at 20 steps, in one try on a busy machine. Twelve micro-batches fill a pipeline of four stages well,
which helps the return to the checkpoint. The killed worker has an inner stage, whose records come from both sides.
With fewer cores than workers, a replayed step gains at most the work of all stages over that of the lost one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.pipelines.entries import Contestant, PipelineShape, started
from bench.pipelines.fewer_workers import make_profile
from bench.pipelines.speed_contest import measured_costs
from bench.race_report import Bar, Say
from bench.replays import budget, replay_pictures
from bench.replays.trial import Ground, KillOutcome, Way, kill_after, make_checkpoint
from bench.running import BENCH
from holdfast.errors import UsageError
from holdfast.measuring import spread
from holdfast.plan.profile import Profile

COLUMNS = {
    "back_s": "s to the step's commit: median (range)",
    "of_parallel": "times all replay's",
    "replay_s": "of it replay, s",
    "bytes": "bytes a step: predicted, measured",
    "of_predicted": "time, of the predicted",
}
PARALLEL = Way(name="all replay", options=("--log",))
ALONE = Way(name="one replays", options=("--log",), settings={"HOLDFAST_REPLAYERS": "1"})
RETURN = Way(name="all go back")
WAYS = (PARALLEL, ALONE, RETURN)
GAIN_BAR = 3.0  # times faster than a return to the checkpoint, at the most steps
STAGE = 1  # the stage whose worker is killed: an inner one
COMPUTING = PipelineShape(model="gpt", layers=6, width=128, seq=128, micro_batch=2, micro_batches=12)
MEASUREMENTS = 3  # of the layers' costs; their mean counts
Outcomes = dict[str, dict[int, list[KillOutcome]]]  # by way, by steps since the checkpoint


@dataclass(frozen=True, kw_only=True)
class ReplaySizes:
    """Sizes of the race: the model, the workers, and the steps from the checkpoint to a loss."""

    shape: PipelineShape = COMPUTING
    workers: int = 4
    steps: tuple[int, ...] = (5, 10, 20, 50)
    budget_steps: int = 10


def parse_steps(text: str) -> tuple[int, ...]:
    """Return the numbers of steps in a user's text; raise ``UsageError`` if it has none.

    >>> parse_steps("5, 10")
    (5, 10)
    """
    try:
        steps = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError as e:
        raise UsageError(f"'{text}' are no numbers of steps", hint="as in 5,10,20,50") from e
    if steps[0] < 1:
        raise UsageError(f"{steps[0]} steps after a checkpoint nothing is lost", hint="1 or more")
    return steps


def race(*, rounds: int, say: Say, sizes: ReplaySizes | None = None) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Kill workers after more and more steps, then in each stage with smaller budgets; return results and bars."""
    sizes = sizes or ReplaySizes()
    folder = (BENCH / "replay").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    cores = len(os.sched_getaffinity(0))
    say("measuring what the layers cost, and making the checkpoint that all begin from")
    profile = measure_beside(sizes.shape, min(cores, sizes.workers), folder / "profile")
    path = folder / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    ground = Ground(shape=sizes.shape, workers=sizes.workers, profile=path, checkpoint=folder / "checkpoint")
    make_checkpoint(ground, folder / "first")
    outcomes = _take_rounds(ground, sizes, rounds=rounds, folder=folder, say=say)
    results, bars = rows(outcomes), bars_of(outcomes)
    replay_pictures.draw_steps(BENCH / "replay.png", _seconds(outcomes))
    say(f"written: {BENCH / 'replay.png'}")
    fixed = budget.fixed_costs(_all(outcomes, PARALLEL), _all(outcomes, RETURN))
    estimate = budget.Estimate(
        profile=profile, micro_batches=sizes.shape.micro_batches, workers=sizes.workers, cores=cores, fixed=fixed
    )
    more, held = budget.race(ground, estimate, steps=sizes.budget_steps, folder=folder / "budget", say=say)
    return results | more, bars | held


def measure_beside(shape: PipelineShape, count: int, folder: Path) -> Profile:
    """Return a profile measured by ``count`` processes at once, as cores share caches and clocks; their mean."""
    alone = make_profile(shape, 2, folder)
    measuring = Contestant(system="measuring", workers=count, stages=(shape.layers,))
    with started(measuring, shape, folder=folder / "beside", burst=1) as running:
        for turn in range(MEASUREMENTS + 1):
            running.take_turn(turn + 1)
    profiles = [profile for each in measured_costs(folder, alone.inside) for profile in each]
    layers = tuple(
        replace(
            same[0],
            forward=statistics.mean(layer.forward for layer in same),
            backward=statistics.mean(layer.backward for layer in same),
            update=statistics.mean(layer.update for layer in same),
        )
        for same in zip(*(profile.layers for profile in profiles), strict=True)
    )
    return replace(alone, layers=layers, memory=None)


def _take_rounds(ground: Ground, sizes: ReplaySizes, *, rounds: int, folder: Path, say: Say) -> Outcomes:
    """Let the ways take turns at each number of steps, in an order that rotates."""
    outcomes: Outcomes = {way.name: {steps: [] for steps in sizes.steps} for way in WAYS}
    for number in range(rounds):
        for steps in sizes.steps:
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                where = folder / f"{number}-{steps}-{WAYS.index(way)}"
                outcomes[way.name][steps].append(kill_after(ground, way, steps=steps, stage=STAGE, folder=where))
            told = ", ".join(f"{way.name} {outcomes[way.name][steps][-1].seconds:.2f}" for way in WAYS)
            say(f"round {number + 1}/{rounds}, {steps} steps after the checkpoint, s: {told}")
    return outcomes


# --- results -----------------------------------------------------------------------------------------


def rows(outcomes: Outcomes) -> dict[str, Any]:
    """Return a row for each way and number of steps; ratios are of the same round."""
    seconds = _seconds(outcomes)
    results: dict[str, Any] = {}
    for steps in outcomes[PARALLEL.name]:
        for way in WAYS:
            each = outcomes[way.name][steps]
            replays = [outcome.replayed for outcome in each if outcome.replayed is not None]
            results[f"{steps} steps: {way.name}"] = {
                "back_s": spread(seconds[way.name][steps]),
                "of_parallel": spread(_gains(seconds, way.name, steps)) if way is not PARALLEL else None,
                "replay_s": spread(replays) if replays else None,
                "step_ms": round(1000 * statistics.median(outcome.step_seconds for outcome in each), 1),
            }
    return results


def bars_of(outcomes: Outcomes) -> dict[str, Bar]:
    """Return the bars: the gain at the most steps is large enough, and more steps save more seconds."""
    seconds = _seconds(outcomes)
    most = max(outcomes[PARALLEL.name])
    gain = statistics.median(_gains(seconds, RETURN.name, most))
    return {
        f"{most} steps after the checkpoint: {RETURN.name}, times {PARALLEL.name}": Bar(value=gain, bar=GAIN_BAR),
        "the more steps, the more seconds saved: the smallest rise": Bar(value=smallest_rise(seconds), bar=0.0),
        "everyone's layers but the lost ones were spared": Bar(value=float(_spared(outcomes)), bar=1.0),
    }


def smallest_rise(seconds: Mapping[str, Mapping[int, Sequence[float]]]) -> float:
    """Return the least rise of the seconds saved (medians) from one number of steps to the next.

    >>> smallest_rise({PARALLEL.name: {5: [1.0], 10: [1.5], 20: [2.0]}, RETURN.name: {5: [2.0], 10: [4.0], 20: [4.4]}})
    -0.1
    """
    saved = [
        statistics.median(
            a - b for a, b in zip(seconds[RETURN.name][steps], seconds[PARALLEL.name][steps], strict=True)
        )
        for steps in sorted(seconds[PARALLEL.name])
    ]
    return round(min((b - a for a, b in itertools.pairwise(saved)), default=0.0), 6)


def _spared(outcomes: Outcomes) -> bool:
    """Tell whether each way did what it is there for: a replay that fell back would count as one."""
    replayed = [each for way in (PARALLEL, ALONE) for each in _all(outcomes, way)]
    returned = _all(outcomes, RETURN)
    return all(o.replayed is not None and o.resumed is None for o in replayed) and all(
        o.replayed is None and o.resumed is not None for o in returned
    )


def _all(outcomes: Outcomes, way: Way) -> list[KillOutcome]:
    return [outcome for each in outcomes[way.name].values() for outcome in each]


def _seconds(outcomes: Outcomes) -> dict[str, dict[int, list[float]]]:
    return {
        name: {steps: [outcome.seconds for outcome in each] for steps, each in by_steps.items()}
        for name, by_steps in outcomes.items()
    }


def _gains(seconds: Mapping[str, Mapping[int, Sequence[float]]], name: str, steps: int) -> list[float]:
    return [a / b for a, b in zip(seconds[name][steps], seconds[PARALLEL.name][steps], strict=True)]
