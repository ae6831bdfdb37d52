"""Seconds that holdfast takes to recover from a loss: given by the user, or measured on this machine."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from holdfast.errors import HoldfastError, UsageError
from holdfast.simulate.kill import kill_one

BENCH = Path(".bench")  # where `python -m bench` writes
WORKERS, KILLS = 3, 3


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Seconds of a recovery beyond the step that is done again, and a sentence about where the number comes from."""

    seconds: float
    source: str


def given(milliseconds: float) -> Recovery:
    """Return the recovery time that the user gives.

    >>> given(40.0)
    Recovery(seconds=0.04, source='40 ms beyond the step that is done again, as given by --recovery-ms')
    """
    return Recovery(
        seconds=milliseconds / 1000,
        source=f"{milliseconds:g} ms beyond the step that is done again, as given by --recovery-ms",
    )


def measured(say: Callable[[str], None], *, bench: Path = BENCH) -> Recovery:
    """Return the recovery time of this machine, as `python -m bench recovery` found it.

    If that has not run here, a few workers are killed now, once. ``say`` is told; results are kept in ``bench``.
    Raises ``UsageError`` if that folder cannot be written, ``HoldfastError`` if recovery could not be measured.
    """
    raced, own = bench / "recovery.json", bench / "simulate-recovery.json"
    found = _from_file(raced, "python -m bench recovery") or _from_file(own, "holdfast simulate")
    if found is not None:
        return found
    _check_writable(own)
    say(f"measuring recovery on this machine: {KILLS} times {WORKERS} workers, one killed (once; some seconds)")
    times = _kill(say, bench)
    row = {"beyond_redone_step_ms": {"median": statistics.median(times), "low": min(times), "high": max(times)}}
    own.write_text(json.dumps({"workers": WORKERS, "results": {"holdfast-exact": row}}, indent=1))
    again = _from_file(own, "holdfast simulate")
    assert again is not None
    return again


def _check_writable(path: Path) -> None:
    """Raise UsageError if a file cannot be written, before any time is spent on measuring."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    except OSError as e:
        raise UsageError(
            f"recovery cannot be measured here: {path} cannot be written ({e.strerror or e})",
            hint="give it with --recovery-ms, or go to another folder",
        ) from e


def _from_file(path: Path, by: str) -> Recovery | None:
    try:
        document = json.loads(path.read_text())
        row = document["results"]["holdfast-exact"]["beyond_redone_step_ms"]
        workers = document.get("workers")
        median, low, high = float(row["median"]), float(row["low"]), float(row["high"])
        date = datetime.fromtimestamp(path.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no such file, or one of another bench: measure again
    # A median below zero is noise of a shared machine.
    used = max(median, 0.0)
    found = f"median {median:.0f}, " if median < 0 else ""
    several = f"{workers} workers" if isinstance(workers, int) else "a few workers"
    return Recovery(
        seconds=used / 1000,
        source=f"{used:.0f} ms ({found}{low:.0f} to {high:.0f}) beyond the step that is done again, measured on this "
        f"machine by {by} on {date:%Y-%m-%d} ({path}): {several} with a small model, one killed",
    )


def _kill(say: Callable[[str], None], bench: Path) -> list[float]:
    times = []
    for number in range(KILLS):
        folder = bench / "simulate-recovery" / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            recovery, redone = kill_one(folder, workers=WORKERS, seed=number)
        except HoldfastError as e:
            raise HoldfastError(f"recovery could not be measured: {e}", hint="give it with --recovery-ms") from e
        times.append(1000 * (recovery - redone))
        say(f"kill {number + 1} of {KILLS}: {times[-1]:.0f} ms beyond the step that is done again")
    return times
