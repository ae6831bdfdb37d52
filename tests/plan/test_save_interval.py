"""How often to save: by its cost, by the failures, and never by nonsense."""

from __future__ import annotations

import math

import pytest

from holdfast.errors import UsageError
from holdfast.plan.save_interval import choose


def lost_per_second(steps: int, *, step: float, save: float, between: float) -> float:
    """What saving and redoing half an interval after each failure cost, per second of training."""
    return save / (steps * step) + steps * step / 2 / between


@pytest.mark.parametrize(("step", "save", "between"), [(1.0, 2.0, 3600.0), (0.5, 10.0, 7200.0), (3.0, 1.0, 86400.0)])
def test_no_other_interval_loses_less(step: float, save: float, between: float) -> None:
    chosen = choose(step_seconds=step, lost_seconds=save, between_failures=between).steps
    best = min(range(1, 20 * chosen), key=lambda n: lost_per_second(n, step=step, save=save, between=between))
    assert abs(chosen - best) <= 1  # a whole number of steps, rounded up


def test_failures_that_never_come_are_as_none() -> None:
    assert choose(step_seconds=0.1, lost_seconds=0.7, between_failures=math.inf) == choose(
        step_seconds=0.1, lost_seconds=0.7, between_failures=None
    )


@pytest.mark.parametrize(
    ("step", "lost", "between"),
    [
        (0.0, 1.0, None),
        (-1.0, 1.0, 60.0),
        (1.0, -1.0, 60.0),
        (math.nan, 1.0, 60.0),
        (1.0, math.inf, 60.0),
        (1.0, 1.0, -5.0),
    ],
)
def test_nonsense_gets_a_sentence(step: float, lost: float, between: float | None) -> None:
    with pytest.raises(UsageError):
        choose(step_seconds=step, lost_seconds=lost, between_failures=between)
