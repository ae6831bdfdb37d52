"""What the simulator's tests share: random traces, and the published tables if they are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from holdfast.simulate.measured_tables import Tables, read_tables
from holdfast.simulate.trace import Trace, grouped, read_trace

SHARED = Path(__file__).parents[3] / "shared"
TABLES, TRACES = SHARED / "papers" / "oobleck-measured.json", SHARED / "traces"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason="the published tables (../shared) are not here")


def tables() -> Tables:
    return read_tables(TABLES)


def trace(name: str) -> Trace:
    return read_trace(TRACES / name)


@st.composite
def traces(draw: st.DrawFn, most: int = 12, seconds: float = 20_000) -> Trace:
    """Nodes that come and go, alone and together, some before they are up, some under a name used before."""
    count = draw(st.integers(1, most))
    there, away = [f"n{number}" for number in range(count)], [f"m{number}" for number in range(4)]
    moves = [(0.0, True, node) for node in there]
    for time in sorted(draw(st.lists(st.floats(0.5, seconds - 1), max_size=12, unique=True))):
        for _ in range(draw(st.integers(1, 3))):
            leaves = draw(st.booleans())
            source, target = (there, away) if leaves else (away, there)
            if source:
                node = source.pop(draw(st.integers(0, len(source) - 1)))
                target.append(node)
                moves.append((time, not leaves, node))
    return grouped(moves, name="random", end=seconds)
