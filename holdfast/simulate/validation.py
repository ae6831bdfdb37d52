"""The simulator against what Oobleck's authors published: their table 2, cell by cell.

``python -m holdfast.simulate.validation TABLES TRACES`` prints the tables of docs/simulation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.simulate.course import SystemRules, follow
from holdfast.simulate.measured_tables import ModelFacts, Tables, read_tables
from holdfast.simulate.outcome import Setting, SystemOutcome, judge
from holdfast.simulate.placements import draws, mean
from holdfast.simulate.systems.bamboo import Bamboo
from holdfast.simulate.trace import Trace, read_trace

TRACES = ("6h", "1h", "10m")  # a node lost every so often, thirty down to fifteen


@dataclass(frozen=True, kw_only=True)
class PublishedAverage:
    """One published average and ours.

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
        return round(self.simulated / self.published - 1, 9)


def compare(tables: Tables, traces: dict[str, Trace]) -> Iterator[PublishedAverage]:
    """Every published cell."""
    for system in ("oobleck", "bamboo", "varuna"):
        for model, row in tables.published[system].items():
            for name, published in row.items():
                setting = Setting(trace=traces[name], facts=tables.facts(model))
                simulated = judge(system, setting).samples_per_s
                yield PublishedAverage(system=system, model=model, trace=name, published=published, simulated=simulated)


def bamboo_variants(tables: Tables, traces: dict[str, Trace]) -> Iterator[tuple[str, PublishedAverage]]:
    """Bamboo without what is peculiar in the published simulation of it."""
    variants = {
        "as published": {},
        "a waiting node's loss slows nobody": {"waiting_slows": False},
        "pipelines of 6": {"depth": 6},
        "both": {"waiting_slows": False, "depth": 6},
    }
    for title, changes in variants.items():
        for model, row in tables.published["bamboo"].items():
            for name, published in row.items():
                rules = _bamboo(tables.facts(model), **changes)  # type: ignore[arg-type]
                simulated = _placed(rules, traces[name]).samples_per_s
                yield (
                    title,
                    PublishedAverage(
                        system="bamboo", model=model, trace=name, published=published, simulated=simulated
                    ),
                )


def _bamboo(facts: ModelFacts, *, waiting_slows: bool = True, depth: int | None = None) -> Bamboo:
    speeds = facts.speeds["bamboo"]
    assert speeds is not None
    return Bamboo(
        speeds=speeds,
        boundary_samples=facts.samples_per_step,
        local=facts.local_rendezvous,
        everybody=facts.global_rendezvous,
        creation=facts.creation,
        depth=depth or facts.depth,
        waiting_slows=waiting_slows,
    )


def _placed(rules: SystemRules, trace: Trace) -> SystemOutcome:
    return SystemOutcome(system="bamboo", segments=mean([follow(trace, rules, one) for one in draws(trace.losses)]))


def table(tables: Tables, traces: dict[str, Trace]) -> str:
    """Published, simulated and the difference, as the document has it."""
    lines = [f"| system | model | {' | '.join(TRACES)} |", "|---" * (2 + len(TRACES)) + "|"]
    rows: dict[tuple[str, str], dict[str, PublishedAverage]] = {}
    for cell in compare(tables, traces):
        rows.setdefault((cell.system, cell.model), {})[cell.trace] = cell
    for (system, model), cells in rows.items():
        lines.append(f"| {system} | {model} | {' | '.join(_cell(cells[name]) for name in TRACES)} |")
    return "\n".join(lines)


def variants_table(tables: Tables, traces: dict[str, Trace]) -> str:
    """The differences of Bamboo's variants from what is published."""
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
    """With a sign, unless it rounds to nothing.

    >>> _percent(-0.0001), _percent(0.0213)
    ('0.0%', '+2.1%')
    """
    text = f"{value:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def read_all(tables: Path, traces: Path) -> tuple[Tables, dict[str, Trace]]:
    """The published tables and the controlled traces."""
    return read_tables(tables), {name: read_trace(traces / f"{name}.csv") for name in TRACES}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m holdfast.simulate.validation TABLES TRACES")
    read = read_all(Path(sys.argv[1]), Path(sys.argv[2]))
    print(table(*read), variants_table(*read), sep="\n\n")
