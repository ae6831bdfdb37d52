"""Race of a pipeline with a tensor log against the same pipeline without, while nothing fails.

One log keeps all records in memory, another writes all to disk. The model computes as in ``bench pipeline``, on as
many workers as cores and on twice as many: there no worker waits for work, so nothing hides the log's cost. All save
the same checkpoints as a turn begins, so that each writes in its own turn (a log needs one more before the first step,
in the warm-up). A turn ends when its records are where they belong.
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
from bench.pipelines.speed_contest import SpeedContest, ratios, take_turns
from bench.race_report import Bar, Say
from bench.races.pipeline import COMPUTING
from bench.running import BENCH, cpu_of_turns
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
SPEED_BAR = 0.97  # of the speed without a log
BYTES_BAR = 0.05  # share by which measured bytes may differ from the predicted
PLENTY = 1 << 40  # bytes of memory for a log that never spills


@dataclass(frozen=True, kw_only=True)
class LogSizes:
    """Sizes of the race: the model, the workers of each pipeline, the steps in a turn. Every other turn saves."""

    shape: PipelineShape = COMPUTING
    stages: tuple[int, ...] = (2, 4)
    burst: int = 5


def race(*, rounds: int, say: Say, sizes: LogSizes | None = None) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let the three ways take turns on pipelines of each length; return results and bars."""
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
    """Bytes that workers log in a step: planned and measured."""

    predicted: int
    measured: float
    spilled: float  # share of it, when a turn ended
    usable: bool

    @property
    def deviation(self) -> float:
        """Deviation of the measured from the predicted bytes, as a share.

        >>> round(KeptBytes(predicted=100, measured=104.0, spilled=0.0, usable=True).deviation, 3)
        0.04
        """
        return abs(self.measured / self.predicted - 1) if self.predicted else float("inf")

    @staticmethod
    def read(folder: Path, burst: int) -> KeptBytes:
        """Read the bytes from the files that a run has left in its folder."""
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
    """Return the lines of a file, each a JSON object."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def bytes_per_step(workers: Iterable[Sequence[Mapping[str, Any]]]) -> float:
    """Return the bytes by which all workers' logs grow in a step; steps in which a checkpoint freed some are left out.

    >>> bytes_per_step([[{"bytes": 10}, {"bytes": 20}, {"bytes": 5}, {"bytes": 15}], [{"bytes": 0}, {"bytes": 7}]])
    17.0
    """
    total = 0.0
    for lines in workers:
        grown = [b["bytes"] - a["bytes"] for a, b in itertools.pairwise(lines) if b["bytes"] >= a["bytes"]]
        total += statistics.median(grown) if grown else 0
    return total


def row(
    name: str, times: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]], logs: Mapping[str, KeptBytes]
) -> dict[str, Any]:
    """Return one contestant's numbers; ratios are of the same round."""
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
