"""Curves: bounded, in order, and the same whether values come at once or late."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.watch.series import Clock, Series


@given(st.lists(st.integers(0, 500), max_size=300), st.integers(2, 20))
def test_no_step_is_lost_and_none_counts_twice(steps: list[int], points: int) -> None:
    series = Series(points)
    for step in steps:
        series.add(step, float(step))
    found = series.to_json()
    assert len(found["steps"]) <= points
    assert found["steps"] == sorted(set(found["steps"]))
    assert sum(point.count for point in series._points) == len(steps)
    assert math.isclose(sum(point.total for point in series._points), sum(steps))
    assert all(low <= mean <= high for low, mean, high in zip(found["low"], found["mean"], found["high"], strict=True))


def test_what_is_trained_again_is_forgotten() -> None:
    series, clock = Series(8), Clock(8)
    for step in range(20):
        series.add(step, 1.0)
        clock.add(step, float(step))
    series.rewind(8)
    clock.rewind(8)
    assert series.to_json()["steps"] == [0, 4]
    assert clock.step_at(100.0) == 8


def test_what_no_curve_can_show_is_left_out() -> None:
    series = Series(8)
    for value in (math.nan, math.inf, -math.inf, 2.0):
        series.add(0, value)
    assert (len(series), series.last) == (1, 2.0)
