"""Who writes when all ranks hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import listed
from holdfast.study.rows import Results, Row, measured, middle
from holdfast.words import seconds_text, size_text


def on_scale(results: Results) -> list[Advice]:
    """At the most ranks: the strategy whose slowest rank is done first, and what the others take."""
    rows = measured(results, "scale")
    most = max((row["ranks"] for row in rows), default=1)
    last = sorted((row for row in rows if row["ranks"] == most), key=lambda row: middle(row, "slowest_s"))
    if most == 1 or not last:
        return []
    best = last[0]
    ways: dict[str, list[Row]] = {}
    for row in last[1:]:
        ways.setdefault(row["strategy"], []).append(row)
    others = f"; {'; '.join(_way(name, of) for name, of in ways.items())}" if ways else ""
    text = (
        f"With {most} ranks that hold the same {size_text(best['state_bytes'])}, {best['framework']}'s "
        f"“{best['strategy']}” is done first: {seconds_text(middle(best, 'slowest_s'))} for the slowest rank and "
        f"{_twice([best])}{others}."
    )
    return [Advice(axis="scale", sentence=text, rests_on=last)]


def _way(name: str, rows: Sequence[Row]) -> str:
    """A strategy, with all frameworks that have it."""
    times = [middle(row, "slowest_s") for row in rows]
    low, high = seconds_text(min(times)), seconds_text(max(times))
    whose = listed(list(dict.fromkeys(str(row["framework"]) for row in rows)))
    return f"“{name}” ({whose}) {low if low == high else f'{low} to {high}'} and {_twice(rows)}"


def _twice(rows: Sequence[Row]) -> str:
    """
    >>> _twice([{"duplicated": 0}]), _twice([{"duplicated": 3_000_000}, {"duplicated": 0}])
    ('nothing written twice', 'up to 3 MB written beyond one copy')
    """
    most = max(row["duplicated"] for row in rows)
    same = len({row["duplicated"] for row in rows}) == 1
    return f"{'' if same else 'up to '}{size_text(most)} written beyond one copy" if most else "nothing written twice"
