"""Comparison of the simulator with table 2 of Oobleck's paper, cell by cell.

``python -m holdfast.simulate.validation TABLES TRACES`` prints the tables of docs/simulation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.simulate.measured_tables import ModelFacts, Tables, read_tables
from holdfast.simulate.outcome import Setting, judge
from holdfast.simulate.trace import Trace, read_trace

TRACES = ("6h", "1h", "10m")  # a node is lost each time, from thirty down to fifteen


@dataclass(frozen=True, kw_only=True)
class PublishedAverage:
    """A published throughput (average samples per second) and the simulated one.

    >>> PublishedAverage(system="oobleck", model="GPT-2", trace="6h", published=80.0, simulated=84.0).difference
    0.05
    """

    system: str
    model: str
    trace: str
    published: float
    simulated: float

    @property
    def difference(self) -> float:
        """Relative difference of the simulated throughput."""
        return round(self.simulated / self.published - 1, 9)


def compare(tables: Tables, traces: dict[str, Trace]) -> Iterator[PublishedAverage]:
    """Yield every cell of the published table with the simulated value."""
    for system in ("oobleck", "bamboo", "varuna"):
        for model, row in tables.published[system].items():
            for name, published in row.items():
                yield _compared(system, tables.facts(model), traces[name], name, published)


def bamboo_variants(tables: Tables, traces: dict[str, Trace]) -> Iterator[tuple[str, PublishedAverage]]:
    """Yield Bamboo's cells with and without two peculiarities of its published simulation."""
    variants = {
        "as published": {},
        "a waiting node's loss slows nobody": {"waiting_slows": False},
        "pipelines of 6": {"depth": 6},
        "both": {"waiting_slows": False, "depth": 6},
    }
    for title, changes in variants.items():
        for model, row in tables.published["bamboo"].items():
            facts = replace(tables.facts(model), **changes)  # type: ignore[arg-type]
            for name, published in row.items():
                yield title, _compared("bamboo", facts, traces[name], name, published)


def _compared(system: str, facts: ModelFacts, trace: Trace, name: str, published: float) -> PublishedAverage:
    simulated = judge(system, Setting(trace=trace, facts=facts)).samples_per_s
    return PublishedAverage(system=system, model=facts.model, trace=name, published=published, simulated=simulated)


def table(tables: Tables, traces: dict[str, Trace]) -> str:
    """Return the table of docs/simulation.md: published, simulated, difference."""
    lines = [f"| system | model | {' | '.join(TRACES)} |", "|---" * (2 + len(TRACES)) + "|"]
    rows: dict[tuple[str, str], dict[str, PublishedAverage]] = {}
    for cell in compare(tables, traces):
        rows.setdefault((cell.system, cell.model), {})[cell.trace] = cell
    for (system, model), cells in rows.items():
        lines.append(f"| {system} | {model} | {' | '.join(_cell(cells[name]) for name in TRACES)} |")
    return "\n".join(lines)


def variants_table(tables: Tables, traces: dict[str, Trace]) -> str:
    """Return the table of docs/simulation.md with the differences of Bamboo's variants."""
    lines = [f"| Bamboo | model | {' | '.join(TRACES)} |", "|---" * (2 + len(TRACES)) + "|"]
    rows: dict[tuple[str, str], dict[str, PublishedAverage]] = {}
    for title, cell in bamboo_variants(tables, traces):
        rows.setdefault((title, cell.model), {})[cell.trace] = cell
    for (title, model), cells in rows.items():
        lines.append(f"| {title} | {model} | {' | '.join(_percent(cells[name].difference) for name in TRACES)} |")
    return "\n".join(lines)


def _cell(cell: PublishedAverage) -> str:
    return f"{cell.published:g} → {cell.simulated:.4g} ({_percent(cell.difference)})"


def _percent(value: float) -> str:
    """Return a percentage with a sign, unless it rounds to zero.

    >>> _percent(-0.0001), _percent(0.0213)
    ('0.0%', '+2.1%')
    """
    text = f"{value:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def read_all(tables: Path, traces: Path) -> tuple[Tables, dict[str, Trace]]:
    """Read the published tables and the traces that belong to them."""
    return read_tables(tables), {name: read_trace(traces / f"{name}.csv") for name in TRACES}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m holdfast.simulate.validation TABLES TRACES")
    read = read_all(Path(sys.argv[1]), Path(sys.argv[2]))
    print(table(*read), variants_table(*read), sep="\n\n")
