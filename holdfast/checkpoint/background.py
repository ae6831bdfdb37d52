"""Threads that write in the background. The interpreter waits for them before it ends, and logs their errors.

It does not wait for ever: a disk that hangs, as that of a dead file server, would keep the process for good.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as _pools  # noqa: F401 - must have registered its own end before ours
from pathlib import Path

from holdfast.checkpoint import places

LONGEST_SECONDS = 3600.0  # without a byte written, at the end of the process: longer than any flush of a disk's cache
LOOK_SECONDS = 1.0  # between two looks at the bytes written

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
        _wait_while_it_writes(work)
        if work._error is not None:
            log.error("%s failed: %s", work.name, work._error)
    if hung := [work.name for work in _threads if not work.done]:
        log.error("%s hangs: nothing is written for %g s; this process ends without it", hung[0], LONGEST_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the interpreter itself would wait for the thread


def _wait_while_it_writes(work: Work) -> None:
    """Wait until the work has ended, or until this process has written nothing for ``LONGEST_SECONDS``."""
    written, since = _bytes_written(), time.monotonic()
    while not work.done and time.monotonic() - since < LONGEST_SECONDS:
        work.join(LOOK_SECONDS)
        if written != (written := _bytes_written()):
            since = time.monotonic()


def _bytes_written() -> int:
    """Return the bytes that this process has written to files and stores so far; 0 where the kernel does not tell."""
    try:
        counts = Path("/proc/self/io").read_text()
    except OSError:
        return places.sent.bytes
    return int(counts.partition("wchar: ")[2].partition("\n")[0]) + places.sent.bytes


# Not atexit: by then Python has closed the pools of threads that writing needs. Callbacks run last in, first out,
# which is why concurrent.futures.thread is imported above.
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
