"""Table of the systems' outcomes on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from holdfast.simulate.outcome import SystemOutcome
from holdfast.simulate.trace import Trace
from holdfast.words import count


def show(console: Console, trace: Trace, model: str, outcomes: Sequence[SystemOutcome], *, best: float) -> None:
    """Print the table, with a row for each system; ``best`` is the throughput of the ideal."""
    fewest, most = min(trace.counts), max(trace.counts)
    nodes = count(most, "node") if fewest == most else f"{fewest:,} to {count(most, 'node')}"
    title = (
        f"{model} along {trace.name}: {nodes}, {_duration(trace.seconds / 3600)}, {count(trace.losses, 'node')} lost"
    )
    console.print(title, style="bold", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("system", no_wrap=True)
    for heading in ("samples/s", "of ideal", "GPU-hours\nused", "\nidle", "\nlost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for outcome in outcomes:
        table.add_row(*_row(outcome, best), style="bold" if outcome.system == "holdfast" else None)
    console.print(table)


def _row(outcome: SystemOutcome, best: float) -> list[str]:
    if not outcome.runs:
        return [outcome.system, "", "", "", "", "", outcome.note]
    ratio = f"{outcome.samples_per_s / best:.1%}" if best else ""
    hours = [_hours(value) for value in (outcome.used, outcome.idle, outcome.lost)]
    return [outcome.system, f"{outcome.samples_per_s:.4g}", ratio, *hours, outcome.note]


def _duration(hours: float) -> str:
    """Return a number of hours as text.

    >>> _duration(1.0), _duration(240.0), _duration(2.505)
    ('1 hour', '240 hours', '2.505 hours')
    """
    return count(int(hours), "hour") if hours == int(hours) else f"{hours:.4g} hours"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.005 else "0"
