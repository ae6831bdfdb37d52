"""Blocks of bytes to and from files, past the page cache, with a checksum each.

A file is cut into blocks of a fixed size. Several threads each take a block, fill it, hash it and write
it (or read it, check it and hand it out), so that copying, checksums and the disk work at the same time.
Buffers are reused: memory that a process touches for the first time costs more than the copy itself.
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
from typing import TypeVar

import numpy as np
import torch
import xxhash

from holdfast.checkpoint.places import Bytes as Bytes
from holdfast.checkpoint.places import Place, Remote
from holdfast.errors import CheckpointError

BLOCK = 4 << 20  # bytes; measured: smaller ones cost calls, larger ones fall out of the processor's cache
ALIGN = 4096  # bytes; O_DIRECT asks for multiples of it in addresses, offsets and lengths, on all known file systems
THREADS = 4  # enough to keep the disk's queue filled while one thread copies and one hashes
_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # a file system where a file has one name only

Progress = Callable[[int], None]  # is called with the number of bytes that have been done since the last call
T = TypeVar("T")


def silent(done: int) -> None:
    """A ``Progress`` that shows nothing."""


def round_up(size: int, unit: int = ALIGN) -> int:
    """The smallest multiple of ``unit`` that is not less than ``size``.

    >>> round_up(4097)
    8192
    """
    return -(-size // unit) * unit


def blocks_of(size: int) -> range:
    """The offsets at which the blocks of a file of ``size`` bytes begin."""
    return range(0, size, BLOCK)


def checksum(data: Bytes) -> str:
    """The checksum of a block: XXH3, 64 bits, as hexadecimal digits.

    >>> checksum(np.zeros(3, dtype=np.uint8))
    'eb5d658bb22f286b'
    """
    return xxhash.xxh3_64_hexdigest(data.data)


class Buffers:
    """Page-aligned buffers that are lent and used again; at most ``keep`` bytes are kept while nobody uses them."""

    def __init__(self, keep: int = 2 * THREADS * BLOCK) -> None:
        self.keep = keep
        self._idle: list[Bytes] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, size: int) -> Iterator[Bytes]:
        """A buffer of at least ``size`` bytes, until the end of the ``with`` block."""
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
    """New memory of at least ``size`` bytes that starts on a page."""
    room = mmap.mmap(-1, max(round_up(size), ALIGN))
    if size >= BLOCK:
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, dtype=np.uint8)


BUFFERS = Buffers()


def in_parallel(work: Callable[[T], None], items: Sequence[T], threads: int = THREADS) -> None:
    """Does the work for every item in a few threads. The first failure is raised, and stops what has not begun."""
    # After a fork torch creates its pool of threads anew on first use, which is not safe from several threads at once.
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
def explained(path: Place, doing: str) -> Iterator[None]:
    """Turns an ``OSError`` inside the ``with`` block into a ``CheckpointError`` that names the file.

    ``doing`` is a verb for the sentence: "read", "write", "create" …
    """
    try:
        yield
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} does not exist", hint="was the checkpoint moved or deleted?") from e
    except PermissionError as e:
        raise CheckpointError(f"no right to {doing} {path}{_reason(path, e)}", hint=_rights(path)) from e
    except (FileExistsError, NotADirectoryError) as e:
        hint = "is a file where the folder should be? choose another folder"
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror}", hint=hint) from e
    except OSError as e:
        if e.errno in _FULL:
            full = "store" if isinstance(path, Remote) else "disk"
            raise CheckpointError(f"the {full} is full: cannot {doing} {path}", hint="free some space") from e
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror}") from e


def _reason(path: Place, error: OSError) -> str:
    return f": {error.strerror}" if isinstance(path, Remote) else ""


def _rights(path: Place) -> str:
    if isinstance(path, Remote):
        return f"check the credentials, and what they may do in the bucket {path.bucket}"
    return "check the folder's owner and mode"


def open_direct(path: Path, flags: int) -> int:
    """Opens a file past the page cache, where the file system can; returns the descriptor."""
    fd = os.open(path, flags, 0o644)
    pass_cache(fd)
    return fd


def pass_cache(fd: int) -> None:
    """Makes reads and writes of an open file go past the page cache (O_DIRECT), where the file system can."""
    try:  # not a flag of open: there O_CREAT would have made the file before O_DIRECT is refused
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        pass  # older tmpfs and some network file systems go through the cache


def is_cached(fd: int, offset: int) -> bool:
    """Whether a byte of a file is in the page cache."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # it is not, or this file system cannot tell
        return False


def write_blocks(
    path: Place,
    size: int,
    fill: Callable[[int, int, Bytes], Bytes],
    *,
    progress: Progress = silent,
    threads: int = THREADS,
) -> tuple[str, ...]:
    """Writes a new file of ``size`` bytes durably and returns its blocks' checksums.

    ``fill(start, stop, buffer)`` returns bytes [start, stop) of the file, in the buffer or in aligned memory
    of its own; several threads call it. Raises ``CheckpointError`` if the file exists or cannot be written; then no
    half of it is left.
    """
    sums = [""] * len(blocks_of(size))
    if isinstance(path, Remote):
        _write_to_store(path, size, fill, sums, progress, threads)
        return tuple(sums)
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


def _write_to_store(
    path: Remote, size: int, fill: Callable[[int, int, Bytes], Bytes], sums: list[str], progress: Progress, threads: int
) -> None:
    def part(begin: int, end: int) -> Bytes:
        # Memory of its own: it is still on its way to the store when the next part is asked for. Mapped, so that the
        # kernel has it back at once: malloc would keep it.
        data = fill(begin, end, aligned(end - begin))[: end - begin]
        for start in range(begin, end, BLOCK):
            sums[start // BLOCK] = checksum(data[start - begin : min(start + BLOCK, end) - begin])
        progress(end - begin)
        return data

    with explained(path, "write"):
        path.write_blocks(size, part, threads)


def _reserve(fd: int, size: int) -> None:
    """Reserves the room that a file will need, so that a full disk is noticed now and not half-way."""
    while size:
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as e:
            if e.errno not in _FULL or not _discarding:
                raise
            _discarding.pop().join()  # a removal that goes on may make room


def _write_all(fd: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        view, offset = view[written:], offset + written


def read_exactly(fd: int | Remote, buffer: Bytes, start: int, stop: int, path: Place) -> None:
    """Reads bytes [start, stop) of a file to the begin of a buffer; ``CheckpointError`` if the file is shorter.

    Past the page cache, ``start`` and the buffer must be multiples of ``ALIGN``.
    """
    if isinstance(fd, Remote):
        buffer[: stop - start] = read_object(fd, start, stop)
        return
    view = buffer.data
    done = 0
    while start + done < stop:
        # Past the page cache a read has to ask for whole pages; at the end of the file it gets fewer bytes.
        got = os.preadv(fd, [view[done : round_up(stop - start)]], start + done)
        if got == 0:
            raise _truncated(path, start + done, stop)
        done += got


def read_object(path: Remote, start: int, stop: int) -> Bytes:
    """Reads bytes [start, stop) of an object; ``CheckpointError`` if it is shorter."""
    found = path.read_range(start, stop)
    if len(found) < stop - start:
        raise _truncated(path, start + len(found), stop)
    return found


def _truncated(path: Place, end: int, stop: int) -> CheckpointError:
    return CheckpointError(f"{path} ends at byte {end}, but its data goes on to {stop}", hint="the file is truncated")


def write_durably(path: Path, content: bytes) -> None:
    """Writes a small new file. Its content is durable when this returns, its name only after :func:`sync_folder`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Place) -> None:
    """Makes the names in a folder durable; the fsync of a file does not. In a store they always are."""
    if isinstance(path, Remote):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Place) -> None:
    """Makes a folder, and the missing ones above it, with durable names.

    A store has no folders to make: it is asked, once, whether it can be written and is fit for checkpoints.
    """
    if isinstance(path, Remote):
        path.store.refuse_if_unfit(path)
        return
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


_discarding: list[threading.Thread] = []  # removals that go on in the background


def discard(paths: Iterable[Place]) -> None:
    """Removes files that are of no use. One that cannot be removed stays, and the next save tries again."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass


def discard_later(paths: Sequence[Place]) -> None:
    """Does :func:`discard` in the background: freeing a gigabyte takes a third of the time of writing it."""
    _discarding[:] = [thread for thread in _discarding if thread.is_alive()]
    if paths:
        _discarding.append(threading.Thread(target=discard, args=(paths,), name="discarding"))
        _discarding[-1].start()
