"""Rounds in which every format saves and loads once, and every limit of the machine is measured, in random order."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.study.adapters.base import SaveFormat
from holdfast.study.framework_processes import LIMIT, FrameworkProcesses
from holdfast.study.inside import file_control
from holdfast.study.limits import Copy, measure
from holdfast.study.models import StudyModel
from holdfast.study.process import Failed, Start

Say = Callable[[str], None]
LIMITS = "limits"
AT_ONCE = min(2, os.cpu_count() or 1)  # processes at a time where no times are measured: memory is for two


@dataclass(kw_only=True)
class FormatRounds:
    """Measurements of one format, an entry a round; after an ``error`` it has no more turns."""

    framework: str
    form: SaveFormat
    saves: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    besides: list[dict[str, Any]] = field(default_factory=list)
    peak: int | None = None  # bytes, of a first save
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Measurements of one model. Lists have an entry a round, so that ratios can be taken within a round."""

    model: StudyModel
    records: list[FormatRounds]
    limits: list[dict[str, float]]


def take(
    processes: FrameworkProcesses,
    model: StudyModel,
    *,
    formats: Mapping[str, Sequence[SaveFormat]],
    folder: Path,
    rounds: int,
    seed: int,
    say: Say,
    training: bool = False,
    forks: Mapping[str, Start] | None = None,
) -> Turns:
    """Measure all formats of all frameworks with one model.

    Args:
        processes: of the frameworks.
        model: to save.
        formats: by framework.
        folder: for checkpoints.
        rounds: counted rounds.
        seed: decides the order of turns.
        say: called with what is being done.
        training: measure also what a save costs a training loop, and the same save without a disk. One round before
            the others is not counted then: memory that was never touched costs more than everything else.
        forks: by framework, starts a new process that shows how much memory a first save takes; a later save finds
            the memory there. None: not measured.
    """
    together = fits(model.nbytes, len(formats))
    processes.model(model.shapes, seed=seed, together=together)
    records = [FormatRounds(framework=name, form=form) for name, forms in formats.items() for form in forms]
    order, copy = random.Random(seed), Copy(model.nbytes)
    limits: list[dict[str, float]] = []
    if forks is not None:
        say(f"{model.name}: the memory that a first save takes")
        with ThreadPoolExecutor(AT_ONCE if together else 1) as pool:  # bytes, not times
            peaks = pool.map(lambda record: _peak(forks[record.framework], model, record, folder, seed), records)
            for record, peak in zip(records, peaks, strict=True):
                record.peak = peak
    for number in range(0 if training else 1, rounds + 1):
        say(f"{model.name}: round {number} of {rounds}" if number else f"{model.name}: warming up")
        turns: list[FormatRounds | None] = [None, *(record for record in records if not record.error)]
        for turn in order.sample(turns, len(turns)):
            if turn is None:
                found = measure(folder / LIMITS, model.nbytes, copy)
                limits += [found] if number else []
            else:
                _turn(processes, turn, folder / "save", training=training, counted=number > 0)
    return Turns(model=model, records=records, limits=limits)


def _turn(processes: FrameworkProcesses, record: FormatRounds, folder: Path, *, training: bool, counted: bool) -> None:
    given = {"form": record.form.name, "folder": str(folder.absolute())}
    try:
        saved = processes.ask(record.framework, "save", memory=training and counted, **given)
        if counted:
            loaded = processes.ask(record.framework, "load", **given)
            if not loaded["same"]:
                raise Failed("what was loaded is not what had been saved")
            record.saves.append(saved)
            record.loads.append(loaded)
            record.besides += [processes.ask(record.framework, "beside", **given)] if training else []
    except (Failed, OSError) as e:
        record.error = str(e)
    finally:
        file_control.empty(folder)


def _peak(fork: Start, model: StudyModel, record: FormatRounds, folder: Path, seed: int) -> int | None:
    """Return the bytes by which memory rises in the first save of a process; None if nobody can tell."""
    with TemporaryDirectory(dir=folder) as target:
        try:
            with fork(folder / "peak.log") as process:
                process.ask("make", within=LIMIT, shapes=model.shapes, seed=seed)
                peak = process.ask("save", within=LIMIT, form=record.form.name, folder=target)["peak_bytes"]
                return None if peak is None else int(peak)
        except Failed:
            return None  # its turns will tell why


def fits(nbytes: int, frameworks: int) -> bool:
    """Return whether all frameworks may hold the model at once; each needs about four times its bytes.

    >>> fits(1000, 5), fits(10**15, 5)
    (True, False)
    """
    return 4 * nbytes * frameworks < 0.7 * available()


def available() -> float:
    """Return the bytes of memory that no process uses."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return 0.0
