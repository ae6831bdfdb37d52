"""Waiting for receives in such a way that one can stop waiting.

Gloo forgets a receive whose socket breaks in the middle of its message: nobody is told, and whoever waits for it
waits for ever, even after the sockets were shut down. (A wait that times out is no way out: it closes all
connections, those to living peers too.) So a thread of its own waits, and is left behind if need be. It keeps the
memory that was to be filled; the socket is closed, so nothing is written there any more.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

LONGEST = timedelta(days=1)  # a slow peer is not a dead one: heartbeats tell them apart, not this
TICK = 0.02  # seconds between looks at whether it is over
GRACE = 0.1  # seconds after the end in which a receive that was not forgotten has failed

_idle: deque[_Waiter] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's: a child would wait for nobody


def wait_for(works: Iterable[Any], *, failed: Callable[[Exception], None], over: Callable[[], bool]) -> None:
    """Returns when all receives are done or have failed; or, once it is ``over``, when they have had their time.

    ``failed`` is called, in another thread, with each failure as it comes; ``works`` is gone through there too, so
    that what comes may decide on what to wait for next.
    """
    waiter = _idle.pop() if _idle else _Waiter()
    done = threading.Lock()
    done.acquire()
    waiter.orders.put((works, failed, done))
    end: float | None = None
    while not done.acquire(timeout=TICK):
        if end is None and over():
            end = time.monotonic() + GRACE
        if end is not None and time.monotonic() >= end:
            return  # the waiter is left behind
    _idle.append(waiter)


class _Waiter:
    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="holdfast-waiter", daemon=True).start()

    def _serve(self) -> None:
        while True:
            works, failed, done = self.orders.get()
            try:
                for work in works:
                    _wait(work, failed)
            except Exception as e:  # what decides on the next one has failed
                failed(e)
            del works, failed
            done.release()


def _wait(work: Any, failed: Callable[[Exception], None]) -> None:
    try:
        work.wait(LONGEST)
    except RuntimeError as e:
        failed(e)
