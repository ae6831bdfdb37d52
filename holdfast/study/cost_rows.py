"""Rows of the axes "cost" and "formats" and of the machine's limits, made from the same turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.measuring import spread
from holdfast.study.turns import FormatRounds, Turns

Row = dict[str, Any]
SYNCED = 0.05  # share of unwritten bytes below which a save counts as on the disk: indexes, but no tensors


def cost_rows(turns: Turns) -> list[Row]:
    """Return a row for each format: stall, time until on the disk, lost training time, memory, and loading."""
    return [_row("cost", turns, record, _cost(turns, record)) for record in turns.records]


def format_rows(turns: Turns) -> list[Row]:
    """Return a row for each format: its bytes and files, and the seconds to save and load them."""
    return [_row("formats", turns, record, _format(turns, record)) for record in turns.records]


def limit_rows(turns: Turns) -> list[Row]:
    """Return a row for each limit of the machine: raw reads, writes and copies of as many bytes."""
    rows = []
    for name in turns.limits[0] if turns.limits else ():
        seconds = [limit[name] for limit in turns.limits]
        rows.append(
            {
                "id": f"limits/{turns.model.name}/{name}",
                "model": turns.model.name,
                "name": name,
                "bytes": turns.model.nbytes,
                "seconds": spread(seconds),
                "gb_s": spread([turns.model.nbytes / 1e9 / max(each, 1e-9) for each in seconds]),
            }
        )
    return rows


def _row(axis: str, turns: Turns, record: FormatRounds, numbers: Row) -> Row:
    form = record.form
    row = {
        "id": f"{axis}/{turns.model.name}/{record.framework}/{form.name}",
        "model": turns.model.name,
        "framework": record.framework,
        "format": form.name,
        "compressed": form.compressed,
        "background": form.background,
    }
    return row | ({"error": record.error} if record.error else numbers)


def _cost(turns: Turns, record: FormatRounds) -> Row:
    if record.error:
        return {}
    return {
        "bytes": record.saves[-1]["bytes"],
        "stall_s": spread(_all(record.besides, "stall_s")),
        "durable_s": spread(_all(record.saves, "durable_s")),
        "of_raw": spread(_ratios(_all(record.saves, "durable_s"), _all(turns.limits, "raw disk"))),
        "lost_s": spread(_all(record.besides, "lost_s")),
        "step_s": spread(_all(record.besides, "step_s")),
        "peak_mb": None if record.peak is None else spread([record.peak / 1e6]),
        "parts": _parts(record.saves),
        "durable_on_return": is_durable(record.saves),
        "load_cold_s": spread(_all(record.loads, "cold_s")),
        "load_warm_s": spread(_all(record.loads, "warm_s")),
        "load_of_raw": spread(_ratios(_all(record.loads, "cold_s"), _all(turns.limits, "raw read"))),
    }


def _format(turns: Turns, record: FormatRounds) -> Row:
    if record.error:
        return {}
    size = record.saves[-1]["bytes"]
    return {
        "raw_bytes": turns.model.nbytes,
        "bytes": size,
        "of_raw_bytes": round(size / turns.model.nbytes, 4),
        "files": record.saves[-1]["files"],
        "save_s": spread(_all(record.saves, "durable_s")),
        "load_s": spread(_all(record.loads, "cold_s")),
        "of_raw": spread(_ratios(_all(record.saves, "durable_s"), _all(turns.limits, "raw disk"))),
    }


def _parts(saves: Sequence[Row]) -> Row | None:
    """Return the medians of a save's parts: serialising (the save without a disk), the rest of the call, and fsync."""
    if any(save["serialise_s"] is None for save in saves):
        return None
    called, alone = _all(saves, "called_s"), _all(saves, "serialise_s")
    return {
        "serialise": round(statistics.median(min(pair) for pair in zip(called, alone, strict=True)), 4),
        "write": round(statistics.median(max(0.0, a - b) for a, b in zip(called, alone, strict=True)), 4),
        "fsync": round(statistics.median(_all(saves, "fsync_s")), 4),
    }


def is_durable(saves: Sequence[Row]) -> bool | None:
    """Return whether saves were on the disk when their call returned; None where the kernel does not tell.

    >>> is_durable([{"unwritten": 0, "bytes": 1000}]), is_durable([{"unwritten": 900, "bytes": 1000}])
    (True, False)
    >>> is_durable([{"unwritten": None, "bytes": 1000}]) is None
    True
    """
    if any(save["unwritten"] is None for save in saves):
        return None
    return statistics.median(save["unwritten"] / save["bytes"] for save in saves) < SYNCED


def _all(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / max(b, 1e-9) for a, b in zip(mine, theirs, strict=True)]
