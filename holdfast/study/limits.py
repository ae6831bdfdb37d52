"""What no format can beat: the disk and the memory themselves, measured beside everything else."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast.checkpoint.disk import BLOCK, aligned, round_up
from holdfast.study.inside import disk

LARGE = 256 << 20  # more than any cache
_buffer = aligned(4 * BLOCK)  # touched once and used again: fresh memory would be measured instead of the disk


def write_direct(folder: Path, nbytes: int) -> None:
    """As fast as this disk writes: preallocated, past the page cache, from one warm buffer."""
    _buffer[:] = 1
    fd = _open_direct(folder / "raw")
    try:
        os.posix_fallocate(fd, 0, nbytes)
        for start in range(0, nbytes, len(_buffer)):
            os.pwrite(fd, _buffer.data[: round_up(nbytes - start)], start)
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)  # a file system without direct writes, as in memory


def write_buffered(folder: Path, nbytes: int) -> None:
    """Through the page cache, as the formats do."""
    with (folder / "raw").open("wb", buffering=0) as file:
        for start in range(0, nbytes, len(_buffer)):
            file.write(_buffer.data[: nbytes - start])
        os.fsync(file.fileno())


def read(folder: Path) -> None:
    """What was written, with nothing made of it."""
    with (folder / "raw").open("rb", buffering=0) as file:
        while file.readinto(_buffer.data):
            pass


class Copy:
    """Copies so many bytes from memory to memory, both touched before."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._from, self._to = (np.ones(min(nbytes, LARGE), np.uint8) for _ in range(2))

    def __call__(self) -> None:
        for start in range(0, self._nbytes, len(self._from)):
            rest = min(len(self._from), self._nbytes - start)
            np.copyto(self._to[:rest], self._from[:rest])


def measure(folder: Path, nbytes: int, copy: Copy) -> dict[str, float]:
    """One turn of each limit, in seconds."""
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        begin = time.monotonic()
        work()
        found[name] = time.monotonic() - begin

    disk.empty(folder)
    timed("raw disk", lambda: write_direct(folder, nbytes))
    disk.drop_from_cache(folder)
    timed("raw read", lambda: read(folder))
    disk.empty(folder)
    timed("raw buffered", lambda: write_buffered(folder, nbytes))
    timed("memory copy", copy)
    disk.empty(folder)
    return found
