"""Traces are read as they were written, and what is wrong with them is said with the line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.simulate.measured_tables import example
from holdfast.simulate.outcome import Setting, judge
from holdfast.simulate.trace import Trace, parse_trace
from tests.simulate.given import needs_tables, trace, traces


def written(trace: Trace) -> str:
    """In the format with names; losses before additions, as a trace means them."""
    lines = [f"{1000 * trace.start!r},add,{node}" for node in trace.nodes]
    for change in trace.changes:
        lines += [f"{1000 * change.time!r},remove,{node}" for node in change.lost]
        lines += [f"{1000 * change.time!r},add,{node}" for node in change.added]
    return "\n".join(lines)


@given(traces().filter(lambda trace: trace.changes and trace.nodes))
def test_what_is_written_is_read(made: Trace) -> None:
    read = parse_trace(written(made), name=made.name)
    assert read.nodes == made.nodes
    assert [(c.lost, c.added) for c in read.changes] == [(c.lost, c.added) for c in made.changes]
    times = zip([c.time for c in read.changes], [c.time for c in made.changes], strict=True)
    assert all(math.isclose(mine, theirs) for mine, theirs in times)


@given(traces())
def test_node_hours_are_those_of_each_node(made: Trace) -> None:
    """Counted node by node instead of span by span."""
    since = dict.fromkeys(made.nodes, made.start)
    total = 0.0
    for change in made.changes:
        for node in change.lost:
            total += change.time - since.pop(node)
        since |= dict.fromkeys(change.added, change.time)
    total += sum(made.end - time for time in since.values())
    assert math.isclose(made.node_hours, total / 3600, abs_tol=1e-9)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=30).filter(lambda counts: any(counts)))
def test_counts_are_followed(counts: list[int]) -> None:
    text = "\n".join(f"2021-12-10, {minute // 60:02}:{minute % 60:02}:00, {n}" for minute, n in enumerate(counts))
    made = parse_trace(text, name="t")
    by_minute = [next(n for start, end, n in made.spans() if start <= 60 * m < end) for m in range(len(counts) - 1)]
    assert by_minute == counts[:-1]
    assert (made.start, made.end) == (0, 60 * (len(counts) - 1))


def test_counts_that_begin_with_nothing_count() -> None:
    """Two hours without a node, then one that takes its time to be up."""
    text = "2021-12-10, 10:00:00, 0\n2021-12-10, 12:00:00, 4\n2021-12-10, 13:00:00, 4\n"
    made = parse_trace(text, name="t")
    assert (made.nodes, list(made.spans())) == ((), [(0.0, 7200.0, 0), (7200.0, 10800.0, 4)])
    found = judge("oobleck", Setting(trace=made, facts=example()))
    assert [(part.end, part.why) for part in found.segments[:2]] == [
        (7200.0, "too few nodes"),
        (7245.0, "too few nodes"),
    ]
    assert found.samples_per_s == pytest.approx(20.0 * (3600 - 45) / 10800)


def test_later_lines_replace_what_was_said_before_for_their_time() -> None:
    lines = ["13:07:45, 80", "13:08:45, 80", "13:09:45, 80", "13:08:45, 70", "13:10:45, 70"]
    made = parse_trace("\n".join(f"2021-12-10, {line}" for line in lines), name="t")
    assert list(made.spans()) == [(0.0, 60.0, 80), (60.0, 180.0, 70)]
    assert "2 of 5" in made.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("\n  \n", "empty"),
        ("0,add,a\n5,kill,a", "line 2.*kill"),
        ("0,add,a\n\n5,remove,b", "line 3.*b"),
        ("0,add,a\n0,add,a", "line 2.*a"),
        ("-5,add,a", "line 1.*-5"),
        ("nan,add,a", "line 1.*nan"),
        ("soon,add,a", "line 1.*soon"),
        ("5,add,a\n3,remove,a", "line 2.*5.*3"),
        ("0,add", "line 1.*2"),
        ("0,add,", "line 1"),
        ("0,add,a\n0,add,b", "trace t"),
        ("2021-12-10, 13:07:45, 80\n2021-12-10, 25:07:45, 80", "line 2.*25:07:45"),
        ("2021-12-10, 13:07:45, -3", "line 1.*-3"),
        ("2021-12-10, 13:07:45, 0\n2021-12-10, 14:07:45, 0", "trace t"),
    ],
)
def test_bad_lines_are_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_trace(text, name="t")


def test_who_comes_and_goes_at_once_was_never_there() -> None:
    made = parse_trace("0,add,a\n5,add,b\n5,remove,b\n9,remove,a", name="t")
    assert [change.time for change in made.changes] == [0.009]


@needs_tables
def test_the_traces_of_the_paper() -> None:
    for name, hours in (("6h", 90), ("1h", 15), ("10m", 2.505)):
        made = trace(f"{name}.csv")
        assert (len(made.nodes), made.losses, made.end) == (30, 14, 3600 * hours)  # the last loss is the end
    assert trace("gcloud-v100x1-east1c.txt").counts[-1] == 80
    for name in ("p3-trace", "g4dn-trace", "scale_p3-trace", "scale_gcp-trace"):
        assert trace(f"{name}.csv").losses > 50
