"""The limits of the machine: raw writes, reads and copies, measured in the same rounds as the formats."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast.checkpoint.disk import BLOCK, BUFFERS, blocks_of, in_parallel, open_direct
from holdfast.measuring import warm_buffer, write_direct
from holdfast.study.inside import file_control

LARGE = 256 << 20  # bytes that are copied at once: more than any cache


def write_buffered(folder: Path, nbytes: int) -> None:
    """Write ``nbytes`` through the page cache and sync, as the formats do."""
    buffer = warm_buffer()
    with (folder / "raw").open("wb", buffering=0) as file:
        for start in range(0, nbytes, len(buffer)):
            file.write(buffer.data[: nbytes - start])
        os.fsync(file.fileno())


def read(folder: Path) -> None:
    """Read the file past the page cache, several blocks at once: as fast as this disk reads."""
    fd = open_direct(folder / "raw", os.O_RDONLY)

    def one(start: int) -> None:
        with BUFFERS.lend(BLOCK) as buffer:
            os.preadv(fd, [buffer[:BLOCK].data], start)

    try:
        in_parallel(one, blocks_of(os.fstat(fd).st_size))
    finally:
        os.close(fd)


class Copy:
    """A copy of ``nbytes`` from memory to memory, both touched before."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._from, self._to = (np.ones(min(nbytes, LARGE), np.uint8) for _ in range(2))

    def __call__(self) -> None:
        for start in range(0, self._nbytes, len(self._from)):
            rest = min(len(self._from), self._nbytes - start)
            np.copyto(self._to[:rest], self._from[:rest])


def measure(folder: Path, nbytes: int, copy: Copy) -> dict[str, float]:
    """Measure each limit once; return seconds by name."""
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        begin = time.monotonic()
        work()
        found[name] = time.monotonic() - begin

    file_control.empty(folder)
    timed("raw disk", lambda: write_direct(folder, nbytes))
    file_control.drop_from_cache(folder)
    timed("raw read", lambda: read(folder))
    file_control.empty(folder)
    timed("raw buffered", lambda: write_buffered(folder, nbytes))
    timed("memory copy", copy)
    file_control.empty(folder)
    return found
