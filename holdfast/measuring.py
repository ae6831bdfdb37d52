"""Tools to measure on this machine (ports, cold files, medians), for ``study``, the races in ``bench/`` and the tests.

Only the standard library is imported at once: the study uses this inside other frameworks' environments.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


def free_port() -> int:
    """Return a TCP port of the loopback device that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range of ``values``, rounded to four digits.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0}
    """
    shown = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 4) for name, value in shown.items()}


def files_of(folder: Path) -> list[Path]:
    """Return all files below ``folder``, sorted by path."""
    return sorted(each for each in folder.rglob("*") if each.is_file())


def sync_files(folder: Path) -> None:
    """Write everything below ``folder`` to the disk; a file that another process renames meanwhile is left to it."""
    for place, _, files in os.walk(folder):
        for each in (*files, "."):
            try:
                fd = os.open(os.path.join(place, each), os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def drop_from_cache(folder: Path) -> None:
    """Drop all files below ``folder`` from the page cache: the next read comes from the disk."""
    sync_files(folder)
    for each in files_of(folder):
        fd = os.open(each, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@cache
def warm_buffer() -> Any:
    """Return an aligned array of bytes, touched once and used again: fresh memory would cost time of its own."""
    from holdfast.checkpoint.disk import BLOCK, aligned

    buffer = aligned(4 * BLOCK)
    buffer[:] = 1
    return buffer


def write_direct(folder: Path, nbytes: int) -> None:
    """Write ``nbytes`` to ``folder/raw`` as fast as the disk can: preallocated, past the page cache, then synced."""
    from holdfast.checkpoint.disk import open_direct, round_up

    buffer = warm_buffer()
    fd = open_direct(folder / "raw", os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        for start in range(0, nbytes, len(buffer)):
            os.pwrite(fd, buffer.data[: round_up(nbytes - start)], start)
        os.fsync(fd)
    finally:
        os.close(fd)
