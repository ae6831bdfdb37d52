"""Threads that write in the background. The interpreter waits for them before it ends, and logs their errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import thread as _pools  # noqa: F401 - must have registered its own end before ours

log = logging.getLogger("holdfast.checkpoint")
_threads: list[Work] = []


class Work:
    """Work in a thread of its own, which starts at once.

    ``work`` is called without arguments; ``name`` is what a message about it says, as "saving runs/gpt". An error
    in it is raised by :meth:`wait`, or logged when the interpreter ends.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.name = name
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name)
        _threads[:] = [*(known for known in _threads if not known.done or known._error is not None), self]
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = e

    @property
    def done(self) -> bool:
        """Whether the work has ended, with or without an error."""
        return not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Waits until the work has ended, or for so many seconds; leaves its error to :meth:`wait`."""
        self._thread.join(seconds)

    def wait(self) -> None:
        """Waits until the work has ended, and raises the error that ended it, once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _wait_at_exit() -> None:
    for work in _threads:
        work.join()
        if work._error is not None:
            log.error("%s failed: %s", work.name, work._error)


# Not atexit: by then Python has closed the pools of threads that writing needs. Callbacks run last in, first out,
# which is why concurrent.futures.thread is imported above.
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
