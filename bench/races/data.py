"""Race of data that keep up: steps of a plain loop over a DataLoader, and of holdfast, on a data set that is slow.

A sample takes 5 ms to read, in which its process sleeps: as with a disk or a network, not as with a decoder, which
would need processors that this race may not have. Contestants take turns. Between two of them their loaders read as far
ahead as they may, so that a turn begins with steps that cost nothing: these are not counted.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.running import BENCH, Running
from holdfast.measuring import spread

COLUMNS = {"step_ms": "ms a step: median (range)", "of_plain": "of the plain loop's in the same round"}
BAR = 1.1  # of the plain loop's time, with as many loaders
BURST, AHEAD = 26, 10  # steps in a turn; those at its begin that may have been read ahead: a DataLoader has 8 at most


@dataclass(frozen=True, kw_only=True)
class LoadingContestant:
    """A way to train, the loaders of each worker, and the contestant that it is compared with."""

    way: str
    loaders: int
    workers: int = 1
    beside: str


CONTESTANTS = {
    f"{way}, {loaders} loaders": LoadingContestant(way=way, loaders=loaders, beside=f"plain, {loaders} loaders")
    for loaders in (2, 4, 0)
    for way in ("plain", "holdfast")
} | {
    "holdfast, 2 workers of 2 loaders": LoadingContestant(
        way="holdfast", loaders=2, workers=2, beside="plain, 4 loaders"
    )
}


def race(*, rounds: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let all contestants take turns; return results and bars."""
    folder = BENCH / "data"
    shutil.rmtree(folder, ignore_errors=True)
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_started(contestant, folder / name.replace(" ", "-")))
            for name, contestant in CONTESTANTS.items()
        }
        names = list(running)
        for number in range(rounds + 1):  # the first one warms up
            for name in names[number % len(names) :] + names[: number % len(names)]:
                running[name].take_turn((number + 1) * BURST)
                if number:
                    times[name].append(counted(running[name].lines, turn=number))
            if number:
                row = ", ".join(f"{name} {1000 * values[-1]:.0f}" for name, values in times.items())
                say(f"data, round {number}/{rounds}, ms a step: {row}")
    return results_of(times)


def counted(lines: Sequence[Mapping[str, Any]], *, turn: int) -> float:
    """Return the seconds of a step in a turn, without the steps at its begin that may have been read ahead.

    >>> counted([{"step": AHEAD, "t": 1.0}, {"step": BURST, "t": 1.0 + 2.0 * (BURST - AHEAD)}], turn=0)
    2.0
    """
    first, last = turn * BURST + AHEAD, (turn + 1) * BURST
    ends = [max(line["t"] for line in lines if line.get("step") == step) for step in (first, last)]
    return float(ends[1] - ends[0]) / (BURST - AHEAD)


def results_of(times: Mapping[str, Sequence[float]]) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Return the rows of the table and the bars, from the seconds of a step in each round."""
    results: dict[str, Any] = {}
    for name, mine in times.items():
        plain = times[CONTESTANTS[name].beside]
        results[name] = {
            "step_ms": spread([1000 * seconds for seconds in mine]),
            "of_plain": spread([a / b for a, b in zip(mine, plain, strict=True)]),
        }
    bars = {
        f"{loaders} loaders, of the plain loop's time": Bar(
            value=results[f"holdfast, {loaders} loaders"]["of_plain"]["median"], bar=BAR, at_most=True
        )
        for loaders in (2, 4)
    }
    return results, bars


@contextmanager
def _started(contestant: LoadingContestant, folder: Path) -> Iterator[Running]:
    """Start a contestant, which waits for its first turn, and end it afterwards."""
    folder = folder.absolute()
    folder.mkdir(parents=True)
    running = Running(folder=folder, workers=contestant.workers)
    running.make_turns()
    words = ["-m", "bench.loading.loading_entry", contestant.way, "--loaders", str(contestant.loaders)]
    words += ["--progress", str(running.progress), "--burst", str(BURST)]
    if contestant.workers > 1:
        agent = ["run", "-n", str(contestant.workers), "--log-dir", str(folder / "logs")]
        words = ["-m", "holdfast.cli", *agent, *words]
    try:
        running.start([sys.executable, *words])
        yield running
    finally:
        running.stop()
