"""The pulse: signs of progress that the training thread leaves, and the observer that reads them from another thread.

A hung worker may look alive: its side thread still sends heartbeats while the training thread is blocked. The pulse
tells the two apart. The training thread counts a number up, and says whether it waits for other workers or runs code
of its own. That costs nanoseconds. The side thread compares the number from beat to beat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

# Where the training thread is: in a step; in another operation, or in the first one of a generation; in the script
# between two operations; waiting for other workers; or waiting for a thread of its own, which may wait for them.
Where = Literal["step", "operation", "script", "wait", "helper"]
WAITING = ("wait", "helper")
STEP_WINDOW = 600.0  # seconds: the slowest step of the last ten to twenty minutes counts as recent
OTHER_WINDOW = 86_400.0  # seconds: evaluations and saves are rarer, so a day of them counts as recent
LATE_LOOKS = 3.0  # beats without a look after which this process must have been stopped, or was without a coordinator


class Pulse:
    """Signs of progress of this process's training thread. Without a reader they do nothing."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew: this process has become a worker, and this thread is the one that trains."""
        self.signs = 0
        self.where: Where = "script"
        self.around: Where = "script"  # where it was before it began to wait
        self.waited = 0.0  # seconds that the training thread has waited so far, for other workers or for its helpers
        self.waiters: set[int] = set()  # other threads of this process that wait for other workers
        self.born = time.monotonic()
        self.follow()

    def follow(self) -> None:
        """Note that the calling thread is the one that trains."""
        self._thread = threading.get_ident()

    def sign(self) -> None:
        """Leave a sign of progress. It costs nothing: call it between pieces of work. Helpers' signs do not count."""
        if threading.get_ident() == self._thread:
            self.signs += 1

    @contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """Say where the training thread is meanwhile, or that one of its helpers waits.

        >>> pulse = Pulse()
        >>> with pulse.at("wait"):
        ...     pulse.where
        'wait'
        >>> pulse.where
        'script'
        """
        thread = threading.get_ident()
        if thread != self._thread:
            self._help(thread, waits=where == "wait")
            try:
                yield
            finally:
                self._help(thread, waits=False)
            return
        before, around = self.where, self.around
        begin = time.monotonic() if where in WAITING and before not in WAITING else None
        self.where, self.around = where, before
        self.signs += 1
        try:
            yield
        finally:
            if begin is not None:
                self.waited += time.monotonic() - begin
            self.where, self.around = before, around
            self.signs += 1

    def _help(self, thread: int, *, waits: bool) -> None:
        """Note whether a helper waits. Its progress counts only while the training thread waits for its helpers."""
        (self.waiters.add if waits else self.waiters.discard)(thread)
        if self.where == "helper":
            self.signs += 1

    @property
    def judged(self) -> Where:
        """Where the training thread is, seen through its helpers."""
        if self.where != "helper":
            return self.where
        return "wait" if self.waiters else self.around


PULSE = Pulse()  # of this process


@dataclass(frozen=True, kw_only=True)
class Still:
    """A worker's report on its training thread: where it is, and for how long without a sign of progress."""

    where: Where
    seconds: float  # since its last sign of progress
    slowest_step: float = 0.0  # seconds: the longest time without a sign in a recent step
    slowest_other: float = 0.0  # seconds: the same outside of steps, its start included

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; ``from_json`` reads them."""
        return dict(vars(self))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Still:
        """Read a report. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        where = values["where"]
        if where not in get_args(Where):
            raise ValueError(f"no such place: {where!r}")
        numbers = {name: float(values[name]) for name in ("seconds", "slowest_step", "slowest_other")}
        return Still(where=where, **numbers)


class Observer:
    """Measures for how long a training thread shows no sign of progress. It runs in the side thread.

    ``every``: seconds between two looks. ``now``: the time of ``time.monotonic``. A look that comes late says that
    this process itself was stopped, or had nobody to report to. That time is not held against the training thread.

    >>> pulse = Pulse()
    >>> observer = Observer(pulse, every=1.0, now=pulse.born)
    >>> [observer.look(pulse.born + second).seconds for second in (1, 2)]
    [1.0, 2.0]
    >>> pulse.sign()
    >>> observer.look(pulse.born + 3).seconds
    0.0
    """

    def __init__(self, pulse: Pulse, *, every: float, now: float) -> None:
        self._pulse, self._every = pulse, every
        self._step, self._other = _Slowest(STEP_WINDOW, now), _Slowest(OTHER_WINDOW, now)
        self._other.add(now - pulse.born, now)  # the start of this process: other workers' take about as long
        self._seen = (pulse.signs, pulse.judged)
        self._since = self._looked = now

    def look(self, now: float) -> Still:
        """Compare the pulse with the last look; return the report."""
        seen = (self._pulse.signs, self._pulse.judged)
        if seen != self._seen:
            before = self._seen[1]
            if before != "wait":
                (self._step if before == "step" else self._other).add(self._looked - self._since, now)
            self._seen, self._since = seen, now
        elif now - self._looked > LATE_LOOKS * self._every:
            self._since += now - self._looked
        self._looked = now
        return Still(
            where=seen[1],
            seconds=now - self._since,
            slowest_step=self._step.most,
            slowest_other=self._other.most,
        )


class _Slowest:
    """The longest of some durations: of the last one to two ``window`` seconds."""

    def __init__(self, window: float, now: float) -> None:
        self._window, self._turned = window, now
        self._newest = self._older = 0.0

    def add(self, seconds: float, now: float) -> None:
        if now - self._turned > self._window:
            self._older, self._newest, self._turned = self._newest, 0.0, now
        self._newest = max(self._newest, seconds)

    @property
    def most(self) -> float:
        return max(self._newest, self._older)
