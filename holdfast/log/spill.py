"""The tensor log's files: records one behind the other, each with its key and its checksum. See docs/log.md.

A file begins with ``MAGIC``, the length of the host's name, and the name. Each record is a head (``HEAD``), a text
that describes the tensors, the tensors' bytes, and a checksum of all that (``SUM``).

A log serves only its own process, and dies with it. So nothing is ever synced, and there is no index on disk: the
process remembers where each record lies and what its head must be, and compares what it reads with that.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from holdfast import codec
from holdfast.engine.pipe import in_memory_order
from holdfast.errors import HoldfastError
from holdfast.log.record import Direction, Key, Message

MAGIC = b"HOLDLOG1"  # the first bytes of a file
MARK = b"REC1"  # the first bytes of a record
HEAD = struct.Struct("<4sIqiiQIIQ")  # mark, direction, step, boundary, micro-batch, number, text, tensors, their bytes
WORD = struct.Struct("<I")  # the length of the host's name
SUM = struct.Struct("<Q")  # XXH3, as in checkpoints: a tenth of the time of a CRC
FILE = 64 << 20  # bytes after which a new file is begun: a file can only be removed whole
SHARE = 64  # a file may hold 1/64 of all bytes if that is more than FILE: each open file takes a descriptor
VECTOR = 1024  # buffers of one preadv or pwritev: the kernel's limit (IOV_MAX)

_numbers = itertools.count()  # numbers for the names of this process's files
_Buffer = Any  # an object with the buffer protocol


class Damaged(HoldfastError):
    """Error: a record is missing or is not what was kept. The text names the record and the file."""

    def __init__(self, key: Key, where: Path | str, what: str) -> None:
        super().__init__(f"the record of {key} in {where} cannot be used: {what}")
        self.key = key


def size_of(message: Message) -> int:
    """Return the bytes of a record in a file. It counts for as many in memory.

    >>> size_of(("[1, []]", []))
    63
    """
    text, tensors = message
    size = HEAD.size + SUM.size + len(text)
    for tensor in tensors:
        size += tensor.nbytes
    return size


# --- tensors as bytes ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Dtype, shape and stride of a tensor, without its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def describes(self, tensor: Tensor) -> bool:
        """Whether a tensor has this dtype, shape and stride."""
        return (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (self.dtype, self.shape, self.stride)

    def room(self) -> Tensor:
        """Return an uninitialised tensor of this description."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@lru_cache(maxsize=256)  # most messages are described as the one before
def facts_of(text: str) -> tuple[Fact, ...]:
    """Read the descriptions of a message's tensors from its text. Raises ``ValueError`` for one with gaps in memory."""
    _, said = json.loads(text)
    facts = [
        Fact(dtype=codec.dtype_of(dtype), shape=tuple(shape), stride=tuple(stride)) for dtype, shape, stride, *_ in said
    ]
    for fact in facts:
        if not _is_dense(fact.shape, fact.stride):
            raise ValueError(f"a tensor of shape {fact.shape} and stride {fact.stride} has gaps")
    return tuple(facts)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory, in whatever order of dimensions."""
    filled = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length != 1 and step != filled and 0 not in shape:
            return False
        filled *= length
    return True


def bytes_of(tensor: Tensor) -> _Buffer:
    """Return a dense tensor's bytes in memory order. Nothing is copied.

    >>> bytes_of(torch.tensor([1, 256], dtype=torch.int16)).tolist()
    [1, 0, 0, 1]
    """
    # A tensor on another device is copied to the host. Untested.
    return in_memory_order(tensor).cpu().view(torch.uint8).numpy()


def _data_of(text: str, tensors: Sequence[Tensor]) -> list[_Buffer]:
    """Return the tensors' bytes. Raises ``ValueError`` if the text would not build the same tensors again."""
    facts = facts_of(text) if tensors else ()
    if len(facts) != len(tensors) or not all(map(Fact.describes, facts, tensors)):
        raise ValueError("a message's text does not describe its tensors")
    return [bytes_of(tensor) for tensor in tensors if tensor.numel()]


# --- records -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unspilled:
    """A record that is to be written."""

    key: Key
    number: int  # counts all records of the log: tells attempts of the same step from each other
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPlace:
    """The place of a record in a file, and the bytes and checksums that must be found there."""

    file: SpillFile
    offset: int  # bytes from the file's begin
    head: bytes
    text: int  # length in bytes
    text_sum: int  # checksum of head and text
    sum: int  # checksum of the whole record

    def read(self, key: Key) -> Message:
        """Return the message exactly as it was kept. Raises ``Damaged`` if the file holds anything else."""
        try:
            fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return self._read(fd)
            finally:
                os.close(fd)
        except (OSError, _Wrong) as e:
            raise Damaged(key, self.file.path, getattr(e, "strerror", None) or str(e)) from e

    def _read(self, fd: int) -> Message:
        start = bytearray(len(self.head) + self.text)
        at = _fill(fd, [start], self.offset)
        # The text tells how much memory to take, so its checksum is compared before anything else is read.
        hashed = xxhash.xxh3_64(start)
        if hashed.intdigest() != self.text_sum or start[: len(self.head)] != self.head:
            raise _Wrong(_what_is(start, self.offset))
        text = start[len(self.head) :].decode("ascii")
        *_, count, _ = HEAD.unpack(self.head)
        tensors = [fact.room() for fact in facts_of(text)] if count else []
        data = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        end = bytearray(SUM.size)
        _fill(fd, [*data, end], at)
        if not _sum(hashed, data) == self.sum == SUM.unpack(end)[0]:
            raise _Wrong("its checksum is wrong")
        return text, tensors


class _Wrong(Exception):
    """A file does not hold what was written."""


def _sum(hashed: xxhash.xxh3_64, more: Sequence[_Buffer]) -> int:
    """Return the checksum of what was hashed before and of more buffers."""
    for buffer in more:
        hashed.update(buffer)
    return hashed.intdigest()


def _what_is(start: bytearray, offset: int) -> str:
    """Return, for an error message, what lies where a record should be."""
    mark, direction, step, boundary, micro_batch, number, *_ = HEAD.unpack_from(start)
    if mark != MARK or direction not in list(Direction):
        return f"there is no record at byte {offset}"
    found = Key(step=step, boundary=boundary, micro_batch=micro_batch, direction=Direction(direction))
    return f"at byte {offset} lies a damaged or another record (number {number}, {found})"


def _fill(fd: int, buffers: Sequence[_Buffer], offset: int) -> int:
    """Read all buffers from ``offset`` on; return where the last one ends. Raises ``_Wrong`` if the file is short."""
    wanted = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
    end = _transfer(os.preadv, fd, buffers, offset)
    if end != wanted:
        raise _Wrong(f"the file ends within it, or before it: there should be bytes up to {wanted}")
    return end


def _transfer(call: Callable[..., int], fd: int, buffers: Sequence[_Buffer], offset: int) -> int:
    """Read or write all buffers with few system calls; return the offset where it ended."""
    views = [memoryview(buffer) for buffer in buffers]
    first = 0
    while first < len(views):
        done = call(fd, views[first : first + VECTOR], offset)
        if done == 0:
            break
        offset += done
        while first < len(views) and done >= views[first].nbytes:
            done -= views[first].nbytes
            first += 1
        if done:
            views[first] = views[first][done:]
    return offset


# --- files ---------------------------------------------------------------------------------------


class SpillFile:
    """A file of records. Its process holds a lock on it: a file without a lock was left by a dead process."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.live = 0  # records that are still needed
        self.size = 0
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", worker)
        while True:  # a name may be taken, by a dead process that had our pid
            self.path = folder / f"{name}-{os.getpid()}-{next(_numbers)}.log"
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                break
            except FileExistsError:
                continue
        try:
            self._lock()
            host = socket.gethostname().encode()
            self._append([MAGIC, WORD.pack(len(host)), host])
        except BaseException:
            self.remove()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # a file system without locks: then ``clean`` cannot lock it either, and leaves it alone

    def write(self, records: Sequence[Unspilled]) -> list[RecordPlace]:
        """Append records; return the place of each. Raises ``OSError`` if the disk is full or the file was removed."""
        self.path.stat()  # a removed file could still be written to, but ``read`` opens it by its name
        places, buffers, offset = [], [], self.size
        for record in records:
            key, (text, tensors) = record.key, record.message
            data = _data_of(text, tensors)
            head = HEAD.pack(
                MARK,
                key.direction,
                key.step,
                key.boundary,
                key.micro_batch,
                record.number,
                len(text),
                len(tensors),
                sum(view.nbytes for view in data),
            )
            start = head + text.encode("ascii")
            hashed = xxhash.xxh3_64(start)
            text_sum, whole = hashed.intdigest(), _sum(hashed, data)
            place = RecordPlace(file=self, offset=offset, head=head, text=len(text), text_sum=text_sum, sum=whole)
            places.append(place)
            buffers += [start, *data, SUM.pack(whole)]
            offset += size_of(record.message)
        self._append(buffers)
        return places

    def _append(self, buffers: Sequence[_Buffer]) -> None:
        wanted = self.size + sum(memoryview(buffer).nbytes for buffer in buffers)
        try:
            self.size = _transfer(os.pwritev, self._fd, buffers, self.size)
            if self.size != wanted:
                raise OSError(errno.ENOSPC, "nothing was written")
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self.path)) from e

    def remove(self) -> None:
        """Remove the file for good: its records are not needed any more."""
        _unlink(self.path)
        try:
            os.close(self._fd)
        except OSError:
            pass  # a network file system may report lost bytes here, which nobody needs any more


class SpillFiles:
    """All files of a log. Only one thread may use them."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker
        self._files: list[SpillFile] = []
        self._full = True  # the last file takes no more records
        self._cleaned = False

    def write(self, records: Sequence[Unspilled]) -> list[RecordPlace]:
        """Append records; return the place of each. The caller counts the records in use in each file's ``live``."""
        if not self._cleaned:
            self._cleaned = True
            clean(self._folder)
        if self._full:
            self._files.append(SpillFile(self._folder, self._worker))
        places = self._files[-1].write(records)
        self._full = self._files[-1].size >= max(FILE, sum(file.size for file in self._files) // SHARE)
        return places

    def tidy(self) -> None:
        """Remove the files without live records."""
        for file in [file for file in self._files if not file.live]:
            self._full = self._full or file is self._files[-1]
            self._files.remove(file)
            file.remove()

    def remove(self) -> None:
        """Remove all files."""
        for file in self._files:
            file.live = 0
        self.tidy()


def clean(folder: Path) -> list[Path]:
    """Remove the files that dead processes of this host left; return their paths.

    >>> clean(Path("there is no such folder"))
    []
    """
    return [path for path in sorted(folder.glob("*-*-*.log")) if _remove_if_litter(path)]


def _remove_if_litter(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The name is read before the lock is tried: a file gets its host's name only after it was locked, so a new
        # file of a living process is never taken for litter.
        if _host_of(fd) != socket.gethostname().encode():
            return False  # another host's locks may not be visible here: that depends on the file system
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed it meanwhile, and a living one may have made a new file of this name.
        return os.path.samestat(os.fstat(fd), path.stat()) and _unlink(path)
    except OSError:
        return False  # locked: its process lives
    finally:
        os.close(fd)


def _host_of(fd: int) -> bytes | None:
    """Return the name of the host that wrote a file, or None if it is no file of a log."""
    start = os.pread(fd, len(MAGIC) + WORD.size, 0)
    if len(start) < len(MAGIC) + WORD.size or not start.startswith(MAGIC):
        return None
    (length,) = WORD.unpack(start[len(MAGIC) :])
    return os.pread(fd, length, len(start)) if length < 1024 else None


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
        return True
    except OSError:
        return False  # the next ``clean`` tries again
