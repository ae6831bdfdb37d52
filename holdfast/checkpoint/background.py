"""Threads that write: a script that is over waits for them, and their errors are seen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread as _pools  # noqa: F401 - must have registered its own end before ours

_threads: list[Work] = []


class Work:
    """Something done in a thread of its own. An error is raised by whoever waits, or shown at the end."""

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
        """Whether it is over, well or badly."""
        return not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Returns when it is over, or after so long; an error stays for ``wait``."""
        self._thread.join(seconds)

    def wait(self) -> None:
        """Returns when it is over, or raises what went wrong."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _wait_at_exit() -> None:
    for work in _threads:
        work.join()
        if work._error is not None:
            print(f"holdfast: {work.name} failed: {work._error}", file=sys.stderr, flush=True)


# Not atexit: by then the pools of threads that writing needs are closed. Callbacks run last in, first out.
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
