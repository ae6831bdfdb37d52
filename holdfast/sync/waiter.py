"""Waits for receives that can be given up.

Gloo forgets a receive whose socket breaks in the middle of its message: a wait for it never ends, even after the
sockets were shut down. (A wait with a timeout does not help: when it times out, Gloo closes all connections, those to
living peers too.) So a separate thread waits, and is abandoned if need be. The abandoned thread keeps the memory that
was to be filled alive. Nothing is written there any more, because the socket is closed.
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

from holdfast.cluster.pulse import PULSE

LONGEST = timedelta(days=1)  # practically no limit: heartbeats tell a dead peer from a slow one, not this timeout
TICK = 0.02  # seconds between two looks whether the group was aborted
GRACE = 0.1  # seconds after an abort in which receives fail, unless Gloo has forgotten them

_idle: deque[_Waiter] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a forked child does not have the threads of these waiters


def wait_for(works: Iterable[Any], *, failed: Callable[[Exception], None], over: Callable[[], bool]) -> None:
    """Wait until all receives are done or have failed; or, once ``over()`` is true, for ``GRACE`` seconds more.

    ``failed(error)`` is called for each failure as it comes, in another thread. ``works`` is iterated in that thread
    too, so a generator may decide after each receive what to wait for next.
    """
    waiter = _idle.pop() if _idle else _Waiter()
    done = threading.Lock()
    done.acquire()
    waiter.orders.put((works, failed, done))
    end: float | None = None
    with PULSE.at("wait"):
        while not done.acquire(timeout=TICK):
            if end is None and over():
                end = time.monotonic() + GRACE
            if end is not None and time.monotonic() >= end:
                return  # the waiter is abandoned: it does not go back into the pool
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
            except Exception as e:  # the generator of works has failed
                failed(e)
            del works, failed
            done.release()


def _wait(work: Any, failed: Callable[[Exception], None]) -> None:
    try:
        work.wait(LONGEST)
    except RuntimeError as e:
        failed(e)
