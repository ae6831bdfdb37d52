"""Advice on which ranks write when all of them hold the same state."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import listed
from holdfast.study.rows import Results, Row, measured, middle, overlap
from holdfast.words import seconds_text, size_text

WAYS = {"rank 0 only": "let rank 0 alone write", "every rank its own file": "let every rank write its own file"}
ALONE = ("tensorflow", "jax", "chainer")  # frameworks whose ranks are independent processes here


def on_scale(results: Results) -> list[Advice]:
    """Return the best strategy of each framework with the most ranks, and the cost of bytes written twice."""
    rows = measured(results, "scale")
    most = max((row["ranks"] for row in rows), default=1)
    last = sorted((row for row in rows if row["ranks"] == most), key=lambda row: middle(row, "slowest_s"))
    if most == 1:
        return []
    ours: dict[str, list[Row]] = {}
    for row in last:
        ours.setdefault(row["framework"], []).append(row)
    text = f"With {most} ranks that hold the same {size_text(last[0]['state_bytes'])}, {_best(list(ours.values()))}."
    text += f" Times are those of the slowest rank.{_twice(list(ours.values()))}"
    if all(row["slowest_s"]["low"] == row["slowest_s"]["high"] for row in last):
        text += " All this is from one round, where small differences may be chance."
    if alone := [name for name in ours if name in ALONE]:
        text += f" Ranks of {listed(alone)} are independent processes here: their own multi-host saving is not tested."
    return [Advice(axis="scale", sentence=text, rests_on=last)]


def _best(groups: Sequence[Sequence[Row]]) -> str:
    """Return the best strategy of each framework. ``groups``: a framework's strategies, the fastest first."""
    ways: dict[str, list[str]] = {}
    for best, *others in groups:
        way = WAYS.get(best["strategy"], f"use “{best['strategy']}”") if others else "only one way was measured"
        ways.setdefault(way, []).append(f"{best['framework']} ({_seconds(best, others)})")
    return "; ".join(f"{way} with {listed(whose)}" for way, whose in ways.items())


def _seconds(best: Row, others: Sequence[Row]) -> str:
    """Return a strategy's seconds, and the strategies that it cannot be told from.

    >>> quick, slow = ({"strategy": name, "slowest_s": {"median": 0.5, "low": 0.4, "high": 0.6}} for name in "ab")
    >>> _seconds(quick, [slow])
    '0.5 s, not to be told from “b”'
    """
    alike = [f"“{row['strategy']}”" for row in others if overlap(best, row, "slowest_s")]
    return seconds_text(middle(best, "slowest_s")) + (f", not to be told from {listed(alike)}" if alike else "")


def _twice(groups: Sequence[Sequence[Row]]) -> str:
    """Return the cost of bytes written twice, against the framework's fastest strategy without them.

    >>> once, twice = ({"duplicated": n, "slowest_s": {"median": 1.0 + n}, "strategy": "all"} for n in (0, 3))
    >>> _twice([[once, twice]])
    ' With “all” 3 B lie on the disk beyond one copy, and saving takes 4 times as long.'
    """
    pairs = []
    for rows in groups:
        once = next((row for row in rows if not row["duplicated"]), None)
        pairs += [(row, once) for row in rows if row["duplicated"] and once is not None]
    if not pairs:
        return ""
    names = listed(list(dict.fromkeys(f"“{row['strategy']}”" for row, _ in pairs)))
    sizes, longer = [row["duplicated"] for row, _ in pairs], [_times(row, once) for row, once in pairs]
    size = f"{'up to ' if len(set(sizes)) > 1 else ''}{size_text(max(sizes))}"
    low, high = f"{min(longer):.2g}", f"{max(longer):.2g}"
    times = low if low == high else f"{low} to {high}"
    return f" With {names} {size} lie on the disk beyond one copy, and saving takes {times} times as long."


def _times(row: Row, other: Row) -> float:
    """Return how many times as long; a time too short to be measured counts as 0.1 ms."""
    took, others = (max(middle(each, "slowest_s"), 1e-4) for each in (row, other))
    return took / others
