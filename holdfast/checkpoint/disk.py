"""Blocks of bytes to and from files, past the page cache, with a checksum each.

A file is cut into blocks of a fixed size. Several threads each take a block, fill it, hash it and write
it (or read it, check it and hand it out), so that copying, checksums and the disk work beside each other.
A buffer is used again and again: memory that a process has never touched costs more than the copy itself.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from holdfast.errors import CheckpointError

BLOCK = 4 << 20  # measured: smaller wastes calls, larger falls out of the processor's cache
ALIGN = 4096  # what O_DIRECT asks of addresses, offsets and lengths, on all file systems we know of
THREADS = 4  # keeps the disk's queue filled while one copies and one hashes
_FULL = (errno.ENOSPC, errno.EDQUOT)

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
    # After a fork torch makes its own pool anew, and is not ready for several threads that come for it at once.
    torch.set_num_threads(torch.get_num_threads())
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
        if e.errno in _FULL:
            raise CheckpointError(f"the disk is full: cannot {doing} {path}", hint="free some space") from e
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror}") from e


def open_direct(path: Path, flags: int) -> int:
    """Opens past the page cache where the file system can."""
    fd = os.open(path, flags, 0o644)
    pass_cache(fd)
    return fd


def pass_cache(fd: int) -> None:
    """From now on reads and writes go past the page cache, where the file system can."""
    try:  # not with open: where it cannot, O_CREAT has made the file before O_DIRECT is refused
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        pass  # older tmpfs and some network file systems go through the cache


def is_cached(fd: int, offset: int) -> bool:
    """Whether a byte of a file can be had without the disk."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not there, or not to be known on this file system
        return False


def write_blocks(
    path: Path,
    size: int,
    fill: Callable[[int, int, Bytes], Bytes],
    *,
    progress: Progress = silent,
    threads: int = THREADS,
) -> tuple[str, ...]:
    """Writes a new file durably and returns its blocks' checksums; if that fails, there is no file.

    ``fill(start, stop, buffer)`` returns bytes [start, stop) of the file, in the buffer or in aligned memory
    of its own.
    """
    sums = [""] * len(blocks_of(size))
    with explained(path, "write"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _reserve(fd, round_up(size))
            pass_cache(fd)

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
        except BaseException:
            discard([path])  # half a file is of no use, and on a full disk it is in the way
            raise
        finally:
            os.close(fd)
    return tuple(sums)


def _reserve(fd: int, size: int) -> None:
    """Takes the room that a file will need: a full disk is noticed now, not half-way."""
    while size:
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as e:
            if e.errno not in _FULL or not _discarding:
                raise
            _discarding.pop().join()  # it may have made room


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


def write_durably(path: Path, content: bytes) -> None:
    """Writes a small new file, durable when this returns (but for its name, see :func:`sync_folder`)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Makes names in a folder durable: a file's own fsync does not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, under durable names."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


_discarding: list[threading.Thread] = []


def discard(paths: Iterable[Path]) -> None:
    """Removes files that are of no use; what cannot be removed is litter for the next time."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass


def discard_later(paths: Sequence[Path]) -> None:
    """As :func:`discard`, in the background: to give back a gigabyte takes a third of the time of writing it."""
    _discarding[:] = [thread for thread in _discarding if thread.is_alive()]
    if paths:
        _discarding.append(threading.Thread(target=discard, args=(paths,), name="discarding"))
        _discarding[-1].start()
