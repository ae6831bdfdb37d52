"""A thread that serves sockets and timers of this process. Nothing in it ever waits for one peer."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT

Handler = Callable[[int], None]  # gets what a descriptor is ready for: READ, WRITE, or an error's bits

logger = logging.getLogger(__name__)


class Loop:
    """Calls handlers when descriptors are ready, and functions when they are due, all in one thread.

    ``call`` may be used in any thread, and ``rewatch`` too; the other methods belong to the thread itself.
    """

    def __init__(self, name: str) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._over = False
        self._bell_lock = threading.Lock()  # else an order could ring a closed descriptor, or another's
        self._is_deaf = False  # the bell is closed
        self.watch(self._bell, READ, self._rung)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, work: Callable[[], None]) -> None:
        """Have ``work`` done in the thread, soon. Once the thread has ended, nothing is done."""
        self._orders.append(work)
        with self._bell_lock:
            if not self._is_deaf:
                os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """End the thread, after what it was asked for before."""
        self.call(self._stop)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, so long at most."""
        self._thread.join(seconds)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Have ``work`` done after so many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), work))

    def watch(self, descriptor: int, what: int, handler: Handler) -> None:
        """Call ``handler`` whenever a descriptor is ready for ``what``."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, what)

    def rewatch(self, descriptor: int, what: int) -> None:
        """Look for something else from now on."""
        self._poll.modify(descriptor, what)

    def forget(self, descriptor: int) -> None:
        """Look at a descriptor no more. Call it before the descriptor is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            wait = self._timers[0][0] - time.monotonic() if self._timers else -1.0
            for descriptor, what in self._poll.poll(max(wait, 0.0) if self._timers else None):
                handler = self._handlers.get(descriptor)
                if handler is not None:  # else forgotten by a handler before
                    self._do(lambda handler=handler, what=what: handler(what))  # type: ignore[misc]
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._do(heapq.heappop(self._timers)[2])
        self._poll.close()
        with self._bell_lock:
            self._is_deaf = True
            os.close(self._bell)

    def _rung(self, what: int) -> None:
        os.eventfd_read(self._bell)
        while self._orders:
            self._do(self._orders.popleft())

    def _stop(self) -> None:
        self._over = True

    def _do(self, work: Callable[[], None]) -> None:
        """Do a piece of work. An error of ours in it must not end the thread, on which everything hangs."""
        try:
            work()
        except Exception:
            logger.exception("an error in a connection between workers")
