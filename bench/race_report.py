"""Results of a race: rows and bars, as a table for people and as one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.running import BENCH

Say = Callable[[str], None]  # shows a line of progress


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A measured value and the bound that it has to keep: at least ``bar``, or with ``at_most`` at most ``bar``.

    >>> Bar(value=0.98, bar=0.97).ok, Bar(value=120.0, bar=100.0, at_most=True).ok
    (True, False)
    """

    value: float
    bar: float
    at_most: bool = False

    @property
    def ok(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"value": round(self.value, 3), "bar": self.bar, "ok": self.ok}


def publish(
    bench: str, results: dict[str, Any], bars: dict[str, Bar], *, columns: dict[str, str], as_json: bool
) -> bool:
    """Print the table and the bars, write both under ``.bench/``, and return whether all bars hold.

    ``results`` has a row for each contestant, ``columns`` the titles of the fields that the table shows. With
    ``as_json`` the JSON object is the only line on standard output.
    """
    table = Table(title=f"bench {bench}")
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
