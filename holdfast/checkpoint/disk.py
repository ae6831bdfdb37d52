"""Blocks of bytes to and from files, past the page cache, with a checksum each.

A file is cut into blocks of a fixed size. Several threads each take a block, fill it, hash it and write
it (or read it, check it and hand it out), so that copying, checksums and the disk work beside each other.
A buffer is used again and again: memory that a process has never touched costs more than the copy itself.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from holdfast.errors import CheckpointError

BLOCK = 4 << 20  # measured: smaller wastes calls, larger falls out of the processor's cache
ALIGN = 4096  # what O_DIRECT asks of addresses, offsets and lengths, on all file systems we know of
THREADS = 4  # keeps the disk's queue filled while one copies and one hashes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Progress = Callable[[int], None]
T = TypeVar("T")


def silent(done: int) -> None:
    """The progress of whoever does not want to see it."""


def round_up(size: int, unit: int = ALIGN) -> int:
    """The next multiple.

    >>> round_up(4097)
    8192
    """
    return -(-size // unit) * unit


def blocks_of(size: int) -> range:
    """Where the blocks of a file begin."""
    return range(0, size, BLOCK)


def checksum(data: Bytes) -> str:
    """The checksum of a block.

    >>> checksum(np.zeros(3, dtype=np.uint8))
    'eb5d658bb22f286b'
    """
    return xxhash.xxh3_64_hexdigest(data.data)


class Buffers:
    """Page-aligned buffers that are lent, given back and used again; at most ``keep`` bytes lie idle."""

    def __init__(self, keep: int = 2 * THREADS * BLOCK) -> None:
        self.keep = keep
        self._idle: list[Bytes] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, size: int) -> Iterator[Bytes]:
        buffer = self._take(size)
        try:
            yield buffer
        finally:
            with self._lock:
                if sum(b.nbytes for b in self._idle) + buffer.nbytes <= self.keep:
                    self._idle.append(buffer)

    def _take(self, size: int) -> Bytes:
        with self._lock:
            for index, buffer in enumerate(self._idle):
                if buffer.nbytes >= size:
                    return self._idle.pop(index)
        return aligned(size)


def aligned(size: int) -> Bytes:
    """Fresh memory that starts on a page."""
    room = mmap.mmap(-1, max(round_up(size), ALIGN))
    if size >= BLOCK:
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, dtype=np.uint8)


BUFFERS = Buffers()


def in_parallel(work: Callable[[T], None], items: Sequence[T], threads: int = THREADS) -> None:
    """Does the work for every item; the first failure stops what has not begun."""
    if threads <= 1 or len(items) <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turns the operating system's complaints into sentences with the file's name."""
    try:
        yield
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} does not exist", hint="was the checkpoint moved or deleted?") from e
    except PermissionError as e:
        raise CheckpointError(f"no right to {doing} {path}", hint="check the folder's owner and mode") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"the disk is full: cannot {doing} {path}", hint="free some space") from e
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror}") from e


def open_direct(path: Path, flags: int) -> int:
    """Opens past the page cache where the file system can; tmpfs and some network ones cannot."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def write_blocks(
    path: Path,
    size: int,
    fill: Callable[[int, int, Bytes], Bytes],
    *,
    progress: Progress = silent,
    threads: int = THREADS,
) -> tuple[str, ...]:
    """Writes a new file durably and returns its blocks' checksums.

    ``fill(start, stop, buffer)`` returns bytes [start, stop) of the file, in the buffer or in aligned memory
    of its own.
    """
    sums = [""] * len(blocks_of(size))
    with explained(path, "write"):
        fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if size:
                os.posix_fallocate(fd, 0, round_up(size))  # a full disk is noticed here, not half-way

            def write(start: int) -> None:
                stop = min(start + BLOCK, size)
                with BUFFERS.lend(BLOCK) as buffer:
                    data = fill(start, stop, buffer)
                    sums[start // BLOCK] = checksum(data[: stop - start])
                    data[stop - start : round_up(stop - start)] = 0
                    _write_all(fd, data[: round_up(stop - start)], start)
                progress(stop - start)

            in_parallel(write, blocks_of(size), threads)
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)
    return tuple(sums)


def _write_all(fd: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        view, offset = view[written:], offset + written


def read_exactly(fd: int, buffer: Bytes, start: int, stop: int, path: Path) -> None:
    """Reads bytes [start, stop) of a file into the buffer's begin; a file opened directly needs aligned ones."""
    view = buffer.data
    done = 0
    while start + done < stop:
        # Beyond the end of a file a direct read may ask for a whole page; it gets what there is.
        got = os.preadv(fd, [view[done : round_up(stop - start)]], start + done)
        if got == 0:
            raise CheckpointError(
                f"{path} ends at byte {start + done}, but its data goes on to {stop}", hint="the file is truncated"
            )
        done += got


def sync_folder(path: Path) -> None:
    """Makes names in a folder durable: a file's own fsync does not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
