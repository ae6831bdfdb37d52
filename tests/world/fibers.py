"""Fibers: threads of which one runs at a time, and a clock that moves when all of them wait.

Who runs next, and nothing else, is drawn from the seed. So the same seed gives the same history, event by event.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

Ready = Callable[[], bool]


class Killed(BaseException):
    """SIGKILL: nothing may catch it but what cleans up after a test."""


class Stalled(AssertionError):
    """Everybody waits, and nothing will ever happen."""


def locked() -> threading.Lock:
    """A lock that one thread takes when another has released it: a semaphore of C, faster than Python's own."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Fiber:
    """A thread that runs only when the scheduler says so. ``owner`` is the process that it belongs to."""

    def __init__(self, scheduler: Scheduler, name: str, work: Callable[[], None], owner: Any) -> None:
        self.name, self.owner = name, owner
        self.finished = False
        self.error: BaseException | None = None
        self.doomed = False
        self.stuck = False  # in a deadlock or an endless loop: it never gets on, while the rest of its process lives
        self.since = scheduler.now  # when it last got on
        self._scheduler, self._work = scheduler, work
        self._go = locked()
        self.ready: Ready = lambda: True
        self.until: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        self._scheduler.here.fiber = self
        try:
            if not self.doomed:
                self._work()
        except Killed:
            pass
        except BaseException as e:
            self.error = e
        self.finished = True
        self._scheduler.back.release()

    def resume(self) -> None:
        """Let it run until it waits again. Called by the scheduler."""
        self.since = self._scheduler.now
        self._go.release()
        self._scheduler.back.acquire()

    def pause(self) -> None:
        """Give the baton back. Called inside the fiber."""
        self._scheduler.back.release()
        self._go.acquire()


class Scheduler:
    """Runs fibers and timers, one at a time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.set_by = 0.0  # seconds by which the wall clock was set, forward or back
        self.here = threading.local()  # .fiber: the one that runs in this thread
        self.back = locked()
        self.fibers: list[Fiber] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.switches = 0

    @property
    def current(self) -> Fiber | None:
        return getattr(self.here, "fiber", None)

    def spawn(self, name: str, work: Callable[[], None], owner: Any) -> Fiber:
        fiber = Fiber(self, name, work, owner)
        self.fibers.append(fiber)
        return fiber

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back, outside of fibers, after so much simulated time."""
        self.at(self.now + seconds, callback)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back, outside of fibers, at that simulated time. Of two at the same time, the first comes first."""
        heapq.heappush(self._timers, (when, next(self._numbers), callback))

    def wait(self, ready: Ready, seconds: float | None = None) -> bool:
        """In a fiber: wait until ``ready()``, or so long; return whether it is."""
        fiber = self.current
        assert fiber is not None, "only fibers wait"
        if fiber.doomed:
            raise Killed
        fiber.ready, fiber.until = ready, None if seconds is None else self.now + seconds
        fiber.pause()
        if fiber.doomed:
            raise Killed
        return ready()

    def pause(self, seconds: float) -> None:
        """In a fiber: let simulated time pass."""
        self.wait(lambda: False, seconds)

    def kill(self, fiber: Fiber) -> None:
        """End a fiber: whatever it does next, it ends. One that is waiting ends now."""
        fiber.doomed = True

    def _runs(self, fiber: Fiber) -> bool:
        if fiber.doomed:
            return True
        if fiber.stuck or getattr(fiber.owner, "frozen", False):
            return False
        return fiber.ready() or (fiber.until is not None and fiber.until <= self.now)

    def run(self, over: Ready, *, limit: float) -> None:
        """Go on until ``over()``. Raises ``Stalled`` if nothing can happen, or past ``limit`` simulated seconds."""
        while not over():
            self.fibers = [fiber for fiber in self.fibers if not fiber.finished]
            ready = [fiber for fiber in self.fibers if self._runs(fiber)]
            if ready:
                self.switches += 1
                self.chance.choice(ready).resume()
                continue
            moving = [f for f in self.fibers if not f.stuck and not getattr(f.owner, "frozen", False)]
            ends = [f.until for f in moving if f.until is not None]
            first = self._timers[0][0] if self._timers else None
            if not ends and first is None:
                raise Stalled("everybody waits")
            self.now = max(self.now, min([*ends, *([] if first is None else [first])]))
            if self.now > limit:
                raise Stalled(f"not over after {limit:g} simulated seconds")
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()

    def clean_up(self) -> None:
        """End all fibers that are left."""
        for fiber in self.fibers:
            fiber.doomed = True
        for _ in range(1000):  # one may start another, or wait again, on its way out
            left = [fiber for fiber in self.fibers if not fiber.finished]
            if not left:
                return
            for fiber in left:
                fiber.doomed = True
                fiber.resume()
        raise AssertionError(f"fibers do not end: {[fiber.name for fiber in self.fibers if not fiber.finished]}")
