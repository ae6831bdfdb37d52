"""A bench's outcome: rows, bars, a table for people and one JSON object for machines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.bench.race import BENCH


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What must hold, and whether it did.

    >>> Bar(value=0.98, bar=0.97).ok, Bar(value=120.0, bar=100.0, at_most=True).ok
    (True, False)
    """

    value: float
    bar: float
    at_most: bool = False

    @property
    def ok(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def to_json(self) -> dict[str, Any]:
        return {"value": round(self.value, 3), "bar": self.bar, "ok": self.ok}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0}
    """
    shown = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 4) for name, value in shown.items()}


def publish(
    bench: str, results: dict[str, Any], bars: dict[str, Bar], *, columns: dict[str, str], as_json: bool
) -> bool:
    """Prints the table and the bars, writes both under ``.bench/``; returns whether all bars hold."""
    table = Table(title=f"holdfast bench {bench}")
    table.add_column("contestant", no_wrap=True)
    for title in columns.values():
        table.add_column(title, justify="right")
    lines = [f"| contestant | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in results.items():
        cells = [_cell(row.get(key)) for key in columns]
        table.add_row(name, *cells)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    verdicts = [
        f"{'ok' if bar.ok else 'MISSED'}: {name}: {bar.value:.3f} (bar {bar.bar:g})" for name, bar in bars.items()
    ]
    outcome = {"bench": bench, "results": results, "bars": {n: b.to_json() for n, b in bars.items()}}
    BENCH.mkdir(exist_ok=True)
    (BENCH / f"{bench}.md").write_text("\n".join([*lines, "", *verdicts, ""]))
    (BENCH / f"{bench}.json").write_text(json.dumps(outcome, indent=1))
    console = Console(stderr=as_json)
    console.print(table)
    for verdict in verdicts:
        console.print(verdict, highlight=False)
    console.print(f"written: {BENCH / bench}.md and .json", highlight=False)
    if as_json:
        print(json.dumps(outcome))
    return all(bar.ok for bar in bars.values())


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.3g} ({value['low']:.3g} to {value['high']:.3g})"
    return "" if value is None else str(value)
