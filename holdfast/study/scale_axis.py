"""The axis "scale": several ranks with the same state save it at once. Which rank writes how much, and how long?

The ranks are processes of one machine and share its cores and its disk: the seconds compare strategies here, and do
not predict a cluster.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.measuring import free_port, spread
from holdfast.study.inside import file_control
from holdfast.study.models import Shape, elements
from holdfast.study.process import Failed, Process, Start
from holdfast.study.turns import Say

Row = dict[str, Any]
RANKS = (1, 2, 4)
OVERHEAD = 0.01  # share of a copy: names, headers and indexes, which every file has and which are no second copy
HEAD_START = 0.1  # seconds between the request and the common begin, so that every rank has got its request
LIMIT = 120.0  # seconds for a save; a rank that takes longer hangs


def duplicated(on_disk: int, copy: int) -> int:
    """Return the bytes beyond one copy; names and headers of each file do not count.

    >>> duplicated(2_000, 1_000), duplicated(1_009, 1_000), duplicated(950, 1_000)
    (1000, 0, 0)
    """
    beyond = on_disk - copy
    return beyond if beyond > OVERHEAD * copy else 0


@dataclass(kw_only=True)
class ScaleCase:
    """A strategy on a number of ranks. Lists have an entry a round: seconds and bytes by rank, bytes on the disk."""

    strategy: str
    ranks: int
    seconds: list[list[float]] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    on_disk: list[int] = field(default_factory=list)
    error: str = ""


def measure(
    framework: str,
    start: Start,
    strategies: Sequence[str],
    *,
    shapes: list[Shape],
    folder: Path,
    logs: Path,
    rounds: int,
    seed: int,
    say: Say,
) -> list[Row]:
    """Return a row for each strategy on each number of ranks.

    All take turns in random order. One round before them is not counted: memory that was never touched costs more
    than everything else. An error becomes a row, too.

    Args:
        framework: its name.
        start: starts a process of it.
        strategies: names of its ways to save on several ranks.
        shapes: of the model that every rank holds.
        folder: for checkpoints; nothing is left there.
        logs: folder for what processes print.
        rounds: counted rounds.
        seed: decides the order of turns.
        say: called with what is being done.
    """
    cases = [ScaleCase(strategy=strategy, ranks=ranks) for strategy in strategies for ranks in RANKS]
    order, target = random.Random(f"{seed}/{framework}"), folder / "ranks"
    with Crew(start, [logs / f"{framework}-rank-{rank}.log" for rank in range(RANKS[-1])], shapes) as crew:
        for number in range(rounds + 1):
            say(f"{framework}: ranks save, " + (f"round {number} of {rounds}" if number else "warming up"))
            for ranks in order.sample(RANKS, len(RANKS)) if number else RANKS[-1:]:
                turns = [case for case in cases if case.ranks == ranks and not case.error]
                _turn(crew, order.sample(turns, len(turns)), target, counted=number > 0)
    shutil.rmtree(target, ignore_errors=True)
    return rows_of(framework, cases, state=2 * 4 * elements(iter(shapes)))


def _turn(crew: Crew, cases: Sequence[ScaleCase], folder: Path, *, counted: bool) -> None:
    """Save once with every strategy, on one number of ranks."""
    for case in cases:
        try:
            file_control.empty(folder)
            answers = crew.save(case.strategy, case.ranks, folder)
        except (Failed, OSError) as e:
            case.error = str(e)
            continue
        if counted:
            case.seconds.append([answer["seconds"] for answer in answers])
            case.written.append([answer["written"] for answer in answers])
            case.on_disk.append(sum(each.stat().st_size for each in file_control.files_of(folder)))


class Crew:
    """Processes with the same state, one for each log.

    They are started once. If one fails, all are started again, because the others may wait for it for ever.
    """

    def __init__(self, start: Start, logs: Sequence[Path], shapes: list[Shape]) -> None:
        self._start, self._logs, self._shapes = start, logs, shapes
        self._processes: list[Process] = []
        self._joined = 0

    def save(self, strategy: str, ranks: int, folder: Path) -> list[Row]:
        """Save on the first ``ranks`` processes, which begin at the same moment; return an answer of each."""
        if not self._processes:
            self._processes = [self._start(log) for log in self._logs]
            self._ask("make", [{"shapes": self._shapes, "seed": 0}] * len(self._logs))
        if self._joined != ranks:
            address = f"127.0.0.1:{free_port()}"
            self._ask("join", [{"rank": rank, "ranks": ranks, "address": address} for rank in range(ranks)])
            self._joined = ranks
        given = {"strategy": strategy, "folder": str(folder.absolute()), "ranks": ranks}
        at = time.monotonic() + HEAD_START  # one clock for all processes of a machine
        return self._ask("save_ranked", [{**given, "rank": rank, "at": at} for rank in range(ranks)])

    def _ask(self, op: str, given: Sequence[Mapping[str, Any]]) -> list[Row]:
        asked = self._processes[: len(given)]
        for process, each in zip(asked, given, strict=True):
            process.send(op, **each)
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(process.answer, within=LIMIT) for process in asked]
            wait(answers, return_when=FIRST_EXCEPTION)
            failed = [answer.exception() for answer in answers if answer.done() and answer.exception()]
            if failed:
                self._end()
                raise Failed(str(failed[0]))
            return [answer.result() for answer in answers]

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes, self._joined = [], 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def rows_of(framework: str, cases: Sequence[ScaleCase], *, state: int) -> list[Row]:
    """Return a row for each case. One copy: the bytes on the disk with one rank, because formats may compress."""
    copies = {case.strategy: case.on_disk[0] for case in cases if case.ranks == 1 and not case.error}
    return [_row(framework, case, state, copies.get(case.strategy, state)) for case in cases]


def _row(framework: str, case: ScaleCase, state: int, copy: int) -> Row:
    row: Row = {"id": f"scale/{framework}/{case.strategy}/{case.ranks}", "framework": framework}
    row |= {"strategy": case.strategy, "ranks": case.ranks, "state_bytes": state}
    if case.error:
        return row | {"error": case.error}
    on_disk = statistics.median_low(case.on_disk)
    return row | {
        "written_by_rank": [statistics.median_low(rank) for rank in zip(*case.written, strict=True)],
        "on_disk": on_disk,
        "duplicated": duplicated(on_disk, copy),
        "slowest_s": spread([max(seconds) for seconds in case.seconds]),
        "fastest_s": spread([min(seconds) for seconds in case.seconds]),
    }
