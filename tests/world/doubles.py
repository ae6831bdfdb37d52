"""Doubles of ``threading``, ``queue`` and ``time`` that wait in fibers, for modules that start threads of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.world.fibers import Fiber, Scheduler


class Doubles:
    """The doubles of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.threading = SimpleNamespace(
            Thread=self._thread, Event=self._event, Condition=self._condition, Lock=self._condition
        )
        self.queue = SimpleNamespace(SimpleQueue=self._queue)
        self.time = SimpleNamespace(
            monotonic=lambda: scheduler.now, time=lambda: scheduler.now + scheduler.set_by, sleep=self._sleep
        )

    def _sleep(self, seconds: float) -> None:
        """At least a microsecond: less would not move a clock that shows hours."""
        self._scheduler.pause(max(seconds, 1e-6))

    def _thread(self, *, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", **_: Any) -> Any:
        return _Thread(self._scheduler, lambda: target(*args), name)

    def _event(self) -> Any:
        return _Event(self._scheduler)

    def _condition(self, lock: Any = None) -> Any:
        return _Condition(self._scheduler)

    def _queue(self) -> Any:
        return _Queue(self._scheduler)

    def work(self, work: Callable[[], None], name: str) -> Any:
        """As ``checkpoint.background.Work``: something done in a thread of its own."""
        thread = _Thread(self._scheduler, work, name)
        thread.start()
        return SimpleNamespace(join=thread.join, name=name, done=property(lambda _: not thread.is_alive()))


class _Thread:
    """Belongs to the process of the fiber that starts it, and dies with it."""

    def __init__(self, scheduler: Scheduler, work: Callable[[], None], name: str) -> None:
        self._scheduler, self._work, self._name = scheduler, work, name
        self._fiber: Fiber | None = None

    def start(self) -> None:
        parent = self._scheduler.current
        assert parent is not None
        self._fiber = self._scheduler.spawn(f"{parent.name} {self._name}", self._work, parent.owner)
        self._fiber.doomed = parent.doomed

    def join(self, timeout: float | None = None) -> None:
        fiber = self._fiber
        assert fiber is not None
        self._scheduler.wait(lambda: fiber.finished, timeout)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.finished


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or self._scheduler.wait(lambda: self._set, timeout)


class _Condition:
    """One fiber runs at a time, so there is nothing to lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._times = scheduler, 0

    def __enter__(self) -> _Condition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        self._times += 1

    notify = notify_all

    def wait(self, timeout: float | None = None) -> bool:
        before = self._times
        return self._scheduler.wait(lambda: self._times > before, timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        return predicate() or self._scheduler.wait(predicate, timeout)


class _Queue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        if not self._items:
            self._scheduler.wait(lambda: bool(self._items))
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items
