"""Detection of stuck workers, by the roster: their heartbeats come, but their training thread does not get on.

Pure: reports and the time are arguments. A worker that waits for others is never stuck, however long it waits. When
one hangs in its own code, all others wait for it, and so stand out from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.cluster.pulse import Still
from holdfast.errors import UsageError

STEP_SECONDS = 60.0  # the least limit of a step that follows from step times: storage may stutter for so long
OTHER_FACTOR = 30.0  # limit of everything else, in limits of a step: half an hour by default, as long as Gloo waits
ALL_FACTOR = 4.0  # of that, if all members stand still at once: two hours by default, as all may evaluate for long
MULTIPLE = 10.0  # of the slowest recent step, or other stretch, that a worker may take
DOUBLINGS = 4  # at most: each worker found stuck doubles the limits that nobody has set, in case it was only slow
HINT = "as in auto, off, 120, or 120:3600 for a step and for everything else"


@dataclass(frozen=True, kw_only=True)
class StepTimeout:
    """The setting ``--step-timeout``: how long a worker may run its own code without a sign of progress, in seconds.

    >>> StepTimeout.parse("120")
    StepTimeout(step=120.0, other=3600.0, learns=False)
    """

    step: float = STEP_SECONDS  # in a step
    other: float = OTHER_FACTOR * STEP_SECONDS  # in everything that may take longer
    learns: bool = True  # the limits are the least, and grow with the run's own times

    @staticmethod
    def parse(text: str) -> StepTimeout:
        """Read "auto", "off", seconds, or "seconds:seconds". Raises ``UsageError`` for anything else."""
        if text == "auto":
            return StepTimeout()
        if text in ("off", "0"):
            return StepTimeout(step=math.inf, other=math.inf, learns=False)
        step, colon, other = text.partition(":")
        try:
            first = float(step)
            second = float(other) if colon else OTHER_FACTOR * first
        except ValueError:
            raise UsageError(f"--step-timeout {text} is not a number of seconds", hint=HINT) from None
        if not (0 < first <= second < math.inf):
            raise UsageError(f"--step-timeout {text}: seconds above 0, the second not below the first", hint=HINT)
        return StepTimeout(step=first, other=second, learns=False)


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A worker that is stuck, and why it counts as that."""

    worker: str
    where: str  # "step", "operation", "script", or "start": it has never connected
    seconds: float  # without a sign of progress
    limit: float  # seconds

    @property
    def cause(self) -> str:
        """The reason as part of a sentence."""
        limit = f"(limit {self.limit:g} s)"
        if self.where == "start":
            return f"stuck: not connected {self.seconds:.0f} s after its start {limit}"
        place = {"step": "in a step", "operation": "in an operation", "script": "in the script"}[self.where]
        return f"stuck: no sign of progress for {self.seconds:.0f} s {place} {limit}"


class StuckWatch:
    """Decides which worker is stuck, one at a time.

    In a step the shorter limit holds, but only if some other member waits or gets on. If all members stand still in
    their own code at once, nobody stands out: the machine or the storage is slow for all, and may come back, while
    killing them could lose the run's state. Then the longer limit holds, as for everything that may take long: the
    first operation of a generation, evaluations, saves, recovery, the script between two steps, and the start. For
    those, it is four times as long if all stand still at once, unless the user has set the limits.

    After each verdict the others get the full time again.

    >>> watch = StuckWatch(StepTimeout.parse("60"))
    >>> stills = {"0.0": Still(where="wait", seconds=61.0), "0.1": Still(where="step", seconds=61.0)}
    >>> watch.look(stills, members=["0.0", "0.1"], starting={}, now=100.0).worker
    '0.1'
    """

    def __init__(self, setting: StepTimeout) -> None:
        self._setting = setting
        self._found = 0  # workers found stuck so far
        self._last = -math.inf  # when the last one was

    @property
    def is_set(self) -> bool:
        """Whether the user has set the limits."""
        return not self._setting.learns

    def look(
        self, stills: Mapping[str, Still], *, members: Collection[str], starting: Mapping[str, float], now: float
    ) -> Stuck | None:
        """Return the worker that is stuck for the longest, in multiples of its limit; None if nobody is.

        ``stills``: the reports of all connected workers. ``starting``: workers that have not connected yet, and the
        seconds since their start.
        """
        step, other = self._limits(stills.values())
        found = []
        for name, still in stills.items():
            if still.where != "wait":
                limits = (step, other) if _stands_out(name, stills, members, step) else (other, self._for_all(other))
                limit = limits[0] if still.where == "step" else limits[1]
                found.append(Stuck(worker=name, where=still.where, seconds=still.seconds, limit=limit))
        found += [Stuck(worker=n, where="start", seconds=age, limit=other) for n, age in starting.items()]
        found = [one for one in found if one.seconds > one.limit and now - self._last > one.limit]
        if not found:
            return None
        self._found += 1
        self._last = now
        return max(found, key=lambda one: one.seconds / one.limit)

    def _for_all(self, limit: float) -> float:
        """Return the limit of what may take long, if nobody stands out."""
        return ALL_FACTOR * limit if self._setting.learns else limit

    def stalled(self, waiting: Collection[Still], now: float) -> bool:
        """Whether these members have all waited for each other for too long: a message between them was lost.

        Nobody is to blame, so nobody is killed: their generation ends, and the next one sends everything again.
        """
        _, limit = self._limits(waiting)
        over = bool(waiting) and all(still.where == "wait" and still.seconds > limit for still in waiting)
        if not over or now - self._last <= limit:
            return False
        self._last = now
        return True

    def _limits(self, stills: Collection[Still]) -> tuple[float, float]:
        """Return the limits of a step and of everything else."""
        setting = self._setting
        if not setting.learns:
            return setting.step, setting.other
        twice = 2.0 ** min(self._found, DOUBLINGS)
        step = max([setting.step, *(MULTIPLE * still.slowest_step for still in stills)])
        other = max([setting.other, step, *(MULTIPLE * still.slowest_other for still in stills)])
        return twice * step, twice * other


def _stands_out(name: str, stills: Mapping[str, Still], members: Collection[str], limit: float) -> bool:
    """Whether another member waits for others, or has shown a sign of progress lately."""
    others = [stills[member] for member in members if member != name and member in stills]
    return any(still.where == "wait" or still.seconds <= limit for still in others)
