"""What this machine's kernel says of a run's processes. Of another machine's it says nothing, so nothing is shown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def is_worker(pid: int, name: str) -> bool:
    """Whether a process of this machine is that worker: a number in a file may be another machine's, or an old one.

    >>> is_worker(os.getpid(), "0.0")
    False
    """
    return title_of(pid).split()[:3] == ["holdfast:", "worker", name]


def memory_of(name: str, pids: Iterable[int]) -> int | None:
    """Return the bytes of memory that a worker's processes have; None if none of them is on this machine."""
    found = [size for pid in pids if is_worker(pid, name) and (size := _resident(pid)) is not None]
    return sum(found) if found else None


def title_of(pid: int) -> str:
    """Return the title of a process (``holdfast.titles``), or its command line; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _resident(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return None
