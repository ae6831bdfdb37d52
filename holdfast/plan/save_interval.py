"""How often to save: from what a save costs and how often everything is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from holdfast.errors import UsageError

BOUND = 0.035  # the share of training time that saving may cost, as CheckFreq has it
SHORTEST = 10.0  # seconds: more often saves nobody anything
FIRST = 10  # steps before the first save: enough to know how long a step takes
RECENT = 5  # saves that are remembered


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Steps from one checkpoint to the next, and why so many."""

    steps: int
    reason: str


def young_daly(lost_seconds: float, between_failures: float) -> float:
    """The seconds between saves that lose the least in all, saving and redoing, as Young and Daly found:
    the square root of twice the cost times the time between failures.

    >>> young_daly(2.0, 3600)
    120.0
    """
    return math.sqrt(2 * lost_seconds * between_failures)


def choose(
    *, step_seconds: float, lost_seconds: float, between_failures: float | None, bound: float = BOUND
) -> Interval:
    """The interval that a measured cost asks for.

    Nothing was ever lost: as often as ``bound`` allows. Otherwise ``young_daly``.

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
    """Measures what saves cost: the stall, and what steps take longer while one is written.

    >>> costs = SaveCosts()
    >>> for seconds in (1.0, 1.0, 1.0): costs.step(seconds, saving=False)
    >>> costs.save(stall=0.5); costs.step(1.5, saving=True); costs.step(1.0, saving=False)
    >>> costs.lost_seconds
    1.0
    """

    _steps: list[float] = field(default_factory=list)
    _saves: list[float] = field(default_factory=list)

    def step(self, seconds: float, *, saving: bool) -> None:
        """A step has been made, while a save was being written or not."""
        if not saving:
            self._steps = [*self._steps[-99:], seconds]
        elif self._saves and self._steps:
            self._saves[-1] += seconds - median(self._steps)

    def save(self, *, stall: float) -> None:
        """A save has begun, after training stood still for so long."""
        self._saves = [*self._saves[-(RECENT - 1) :], stall]

    @property
    def step_seconds(self) -> float | None:
        return median(self._steps) if self._steps else None

    @property
    def lost_seconds(self) -> float | None:
        """What a save costs in all; noise may make steps beside a save look faster than others."""
        return max(median(self._saves), 1e-4) if self._saves else None
