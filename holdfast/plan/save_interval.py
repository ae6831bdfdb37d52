"""Steps between two checkpoints, from the cost of a save and the time between failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from holdfast.errors import UsageError

BOUND = 0.035  # share of the training time that saving may cost; CheckFreq's default
SHORTEST = 10.0  # seconds between saves at least: less lost work than that is not worth a save
FIRST = 10  # steps before the first save: enough to measure how long a step takes
RECENT = 5  # saves whose cost is remembered: the median survives two outliers


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Steps from one checkpoint to the next, and why so many."""

    steps: int
    reason: str


def young_daly(lost_seconds: float, between_failures: float) -> float:
    """Return the seconds between saves that lose the least time in all, by the formula of Young and Daly.

    ``lost_seconds`` is the cost of a save, ``between_failures`` the mean seconds between failures.

    >>> young_daly(2.0, 3600)
    120.0
    """
    return math.sqrt(2 * lost_seconds * between_failures)


def choose(
    *, step_seconds: float, lost_seconds: float, between_failures: float | None, bound: float = BOUND
) -> Interval:
    """Choose the interval from measured seconds: of a step, lost per save, and between failures.

    Without a failure so far (``between_failures=None``) it saves as often as the share ``bound`` of the time allows,
    otherwise as ``young_daly`` says; never more often than every ``SHORTEST`` seconds. Raises UsageError for times
    that are negative or not finite.

    >>> choose(step_seconds=0.1, lost_seconds=0.7, between_failures=None)
    Interval(steps=200, reason='0.70 s lost per save is 3.5% of 200 steps')
    >>> choose(step_seconds=1.0, lost_seconds=2.0, between_failures=3600).steps
    120
    """
    if not 0 < step_seconds < math.inf or not 0 <= lost_seconds < math.inf or not (between_failures or 1.0) > 0:
        raise UsageError(
            f"steps of {step_seconds} s, {lost_seconds} s lost per save, {between_failures} s between failures",
            hint="these are measured seconds",
        )
    if between_failures is None or between_failures == math.inf:
        steps = math.ceil(lost_seconds / bound / step_seconds - 1e-9)
        reason = f"{lost_seconds:.2f} s lost per save is {bound:.1%} of {steps} steps"
    else:
        steps = math.ceil(young_daly(lost_seconds, between_failures) / step_seconds - 1e-9)
        reason = f"{lost_seconds:.2f} s lost per save, {between_failures:.0f} s between failures: {steps} steps"
    fewest = math.ceil(SHORTEST / step_seconds - 1e-9)
    if steps < fewest:
        return Interval(steps=fewest, reason=f"{reason}, but not more often than every {SHORTEST:.0f} s")
    return Interval(steps=max(steps, 1), reason=reason)


@dataclass(kw_only=True)
class SaveCosts:
    """Measures the cost of saves: the stall, and the extra time of steps while a save is written.

    >>> costs = SaveCosts()
    >>> for seconds in (1.0, 1.0, 1.0): costs.step(seconds, saving=False)
    >>> costs.save(stall=0.5); costs.step(1.5, saving=True); costs.step(1.0, saving=False)
    >>> costs.lost_seconds
    1.0
    """

    _steps: list[float] = field(default_factory=list)
    _saves: list[float] = field(default_factory=list)

    def step(self, seconds: float, *, saving: bool) -> None:
        """Record a step of so many seconds; ``saving`` tells whether a save was being written meanwhile."""
        if not saving:
            self._steps = [*self._steps[-99:], seconds]
        elif self._saves and self._steps:
            self._saves[-1] += seconds - median(self._steps)

    def save(self, *, stall: float) -> None:
        """Record that a save has begun, after training stood still for ``stall`` seconds."""
        self._saves = [*self._saves[-(RECENT - 1) :], stall]

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step without a save beside it; None before the first."""
        return median(self._steps) if self._steps else None

    @property
    def lost_seconds(self) -> float | None:
        """Median seconds that a save costs in all; None before the first."""
        # Noise may make steps beside a save look faster than others: a cost is never zero or negative.
        return max(median(self._saves), 1e-4) if self._saves else None
