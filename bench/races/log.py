"""What a log costs when nothing happens: a pipeline with it against the same pipeline without, in turns.

Once all records stay in memory, once all are written to disk. The model computes as in ``bench pipeline``, on as many
workers as cores and on twice as many, where nobody ever waits for work that could hide the log's. All save the
same checkpoints (a log has one more, before the first step: in the warm-up, which does not count), as a turn begins, so
that whoever writes does it in its own turn; and a turn ends only when its records are where they belong.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.pipelines.entries import Contestant, PipelineShape
from bench.pipelines.fewer_workers import make_profile
from bench.pipelines.turns import SpeedContest, ratios, take_turns
from bench.races.pipeline import COMPUTING
from bench.report import Bar, Say
from bench.running import BENCH
from holdfast.cluster.events import read_events
from holdfast.errors import HoldfastError
from holdfast.measuring import spread
from holdfast.plan.profile import Profile
from holdfast.words import size_text

COLUMNS = {
    "step_ms": "ms a step: median (range)",
    "of_none": "speed, of no log's",
    "cpu_ms": "CPU ms a step",
    "cpu_of_none": "CPU, of no log's",
    "bytes": "bytes a step, of the predicted; on disk",
}
NONE, MEMORY, DISK = "no log", "log in memory", "log on disk"
SPEED_BAR = 0.97
BYTES_BAR = 0.05
PLENTY = 1 << 40


@dataclass(frozen=True, kw_only=True)
class LogSizes:
    """What is trained, by pipelines of how many workers; a turn has ``burst`` steps, every other one saves."""

    shape: PipelineShape = COMPUTING
    stages: tuple[int, ...] = (2, 4)
    burst: int = 5


def race(*, rounds: int, say: Say, sizes: LogSizes | None = None) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Pipelines of one length after the other; within each, the three take turns."""
    sizes = sizes or LogSizes()
    folder = (BENCH / "log").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    say("measuring what the layers cost, for the plan")
    profile = replace(make_profile(sizes.shape, 2, folder / "profile"), memory=None)
    results: dict[str, Any] = {}
    bars: dict[str, Bar] = {}
    for stages in sizes.stages:
        more, held = _contest(sizes, stages, profile, rounds=rounds, folder=folder / f"{stages}-stages", say=say)
        results |= more
        bars |= held
    return results, bars


def _contest(
    sizes: LogSizes, stages: int, profile: Profile, *, rounds: int, folder: Path, say: Say
) -> tuple[dict[str, Any], dict[str, Bar]]:
    folder.mkdir(parents=True)
    path = folder / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    names = (NONE, MEMORY, DISK)
    contest = SpeedContest(
        title=f"{stages} stages",
        shape=sizes.shape,
        contestants={
            name: _contestant(name, stages, path, every=2 * sizes.burst, checkpoint=folder / f"checkpoints-{number}")
            for number, name in enumerate(names)
        },
        against={},
        burst=sizes.burst,
    )
    times = take_turns(contest, rounds=rounds, folder=folder, say=say)
    runs = {name: folder / str(number) for number, name in enumerate(names)}
    cpu = {name: cpu_of_turns(read_lines(run / "progress.jsonl"), sizes.burst)[1:] for name, run in runs.items()}
    logs = {name: KeptBytes.read(runs[name], sizes.burst) for name in (MEMORY, DISK)}
    for number in range(len(names)):
        shutil.rmtree(folder / f"checkpoints-{number}", ignore_errors=True)
    results = {f"{stages} stages: {name}": row(name, times, cpu, logs) for name in names}
    return results, {
        f"{stages} stages: {what}": bar for name in logs for what, bar in _bars(name, times, logs[name]).items()
    }


def _contestant(name: str, stages: int, profile: Path, *, every: int, checkpoint: Path) -> Contestant:
    options = ["--profile", str(profile), "--checkpoint", str(checkpoint), "--every", str(every)]
    if name != NONE:
        options += ["--log", "--log-memory", str(PLENTY if name == MEMORY else 0)]
    return Contestant(system="holdfast", workers=stages, stages=(stages,), options=options)


# --- what was measured --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeptBytes:
    """What the plan says that the workers keep in a step, what they kept, and whether they always did."""

    predicted: int
    measured: float
    spilled: float  # share of it, when a turn ended
    usable: bool

    @property
    def deviation(self) -> float:
        """Of what was measured from what was predicted.

        >>> round(KeptBytes(predicted=100, measured=104.0, spilled=0.0, usable=True).deviation, 3)
        0.04
        """
        return abs(self.measured / self.predicted - 1) if self.predicted else float("inf")

    @staticmethod
    def read(folder: Path, burst: int) -> KeptBytes:
        """From what a run has left in its folder."""
        predicted = [e["bytes_per_step"] for e in read_events(folder / "logs" / "events.jsonl") if _is_plan(e)]
        workers = [read_lines(file) for file in sorted(folder.glob("progress.jsonl.log-*"))]
        if not predicted or not workers:
            raise HoldfastError(f"nothing was logged in {folder}")
        ends = [line for lines in workers for line in lines if line["step"] % burst == 0]
        return KeptBytes(
            predicted=predicted[-1],
            measured=bytes_per_step(workers),
            spilled=sum(line["spilled"] for line in ends) / max(1, sum(line["bytes"] for line in ends)),
            usable=all(line["usable"] for lines in workers for line in lines),
        )


def _is_plan(event: Mapping[str, Any]) -> bool:
    return event["event"] == "logging"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """What workers have written, a JSON object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def bytes_per_step(workers: Iterable[Sequence[Mapping[str, Any]]]) -> float:
    """What all workers' logs grow by in a step. Where a checkpoint has freed some, the step does not count.

    >>> bytes_per_step([[{"bytes": 10}, {"bytes": 20}, {"bytes": 5}, {"bytes": 15}], [{"bytes": 0}, {"bytes": 7}]])
    17.0
    """
    total = 0.0
    for lines in workers:
        grown = [b["bytes"] - a["bytes"] for a, b in itertools.pairwise(lines) if b["bytes"] >= a["bytes"]]
        total += statistics.median(grown) if grown else 0
    return total


def cpu_of_turns(lines: Sequence[Mapping[str, Any]], burst: int) -> list[float]:
    """CPU seconds of a step in each turn, of all workers and all their threads together.

    >>> lines = [{"pid": 1, "cpu": 1.0, "go": 0}, {"pid": 1, "cpu": 1.5, "step": 1}, {"pid": 1, "cpu": 2.0, "step": 2}]
    >>> cpu_of_turns(lines, 2)
    [0.5]
    """
    spent: dict[int, float] = {}
    for line in lines:
        if "go" in line:
            spent[line["go"]] = spent.get(line["go"], 0.0) - line["cpu"]
        elif line["step"] % burst == 0:
            spent[line["step"] - burst] += line["cpu"]
    last = max((line["step"] for line in lines if "step" in line), default=0)
    return [spent[first] / burst for first in sorted(spent) if first + burst <= last]


def row(
    name: str, times: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]], logs: Mapping[str, KeptBytes]
) -> dict[str, Any]:
    """One contestant's numbers; ratios are of the same round."""
    found: dict[str, Any] = {
        "step_ms": spread([1000 * each for each in times[name]]),
        "cpu_ms": spread([1000 * each for each in cpu[name]]),
    }
    if name in logs:
        kept = logs[name]
        found |= {
            "of_none": spread(ratios(times, NONE, name)),
            "cpu_of_none": spread(ratios(cpu, name, NONE)),
            "bytes": f"{size_text(kept.measured)}, {kept.measured / max(1, kept.predicted):.4f}; {kept.spilled:.0%}",
            "predicted_bytes": kept.predicted,
            "measured_bytes": kept.measured,
        }
    return found


def _bars(name: str, times: Mapping[str, Sequence[float]], kept: KeptBytes) -> dict[str, Bar]:
    return {
        f"{name}, speed": Bar(value=statistics.median(ratios(times, NONE, name)), bar=SPEED_BAR),
        f"{name}, bytes beside the predicted": Bar(value=kept.deviation, bar=BYTES_BAR, at_most=True),
        f"{name}, never given up": Bar(value=float(kept.usable), bar=1.0),
    }
