"""Process titles: what ``ps`` shows instead of ``python -m …``, so that a user can tell a run's processes apart.

Linux shows the memory that a process was given its command line in, and a process may write there. Only that memory is
written, never the environment that lies behind it, which C libraries still read. So a title is cut to the length of
the command line.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PR_SET_NAME = 15  # of prctl(2)
SHORT = 15  # bytes of a short name, which the kernel cuts to this
ROOM = 96  # bytes that command lines of our own processes are filled up to, so that their titles fit


def set_title(role: str, command: str = "") -> None:
    """Show this process as "holdfast: ROLE COMMAND" in ``ps``, and as "holdfast:NAME" in ``top``.

    ``command``: the script, whose folder is left out. Where the system does not allow it, do nothing.

    >>> set_title("worker 0.2", "examples/train.py")  # doctest: +SKIP
    """
    what = os.path.basename(command) or command
    _set_short(f"holdfast:{role.rpartition(' ')[2]}")
    _set_command_line(f"holdfast: {role} {what}".rstrip())


def set_loader_title(role: str, name: str) -> None:
    """Show this process, which reads data for a worker, as such in ``ps``, and by ``name`` in ``top``.

    Without it a loader would be shown as the worker that it was forked from, and be taken for one.

    >>> set_loader_title("loader 3 of worker 0.2", "hf-loader 3")  # doctest: +SKIP
    """
    _set_short(name)
    _set_command_line(f"holdfast: {role}")


def filler(words: list[str]) -> list[str]:
    """Return a word that makes a command line long enough for a title; none if it is long enough.

    >>> [len(word) for word in filler(["python", "-m", "holdfast.cluster.zygote"])]
    [61]
    """
    length = sum(len(os.fsencode(word)) + 1 for word in words)
    return [" " * (ROOM - length - 1)] if length < ROOM else []


def _set_short(name: str) -> None:
    try:
        ctypes.CDLL(None).prctl(PR_SET_NAME, os.fsencode(name)[:SHORT], 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux


def _set_command_line(title: str) -> None:
    """Write the title over the command line, and zeros over the rest of it."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(words[45]), int(words[46])  # arg_start and arg_end of proc(5), fields 48 and 49
    except (OSError, IndexError, ValueError):
        return
    if not 0 < start < end:
        return  # the kernel does not tell
    # The last byte stays zero: else Linux takes what follows, the environment, for a part of the title.
    text = os.fsencode(title)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
