"""The tensor log's files: records one behind the other, each with its key and its checksum. See docs/log.md.

A log is of use to its own process only, and dies with it. So nothing is ever synced, and what lies where is known
in memory alone: what a file says is only compared with that.
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

MAGIC = b"HOLDLOG1"  # of a file
MARK = b"REC1"  # of a record
HEAD = struct.Struct("<4sIqiiQIIQ")  # mark, direction, step, boundary, micro-batch, number, text, tensors, their bytes
WORD = struct.Struct("<I")
SUM = struct.Struct("<Q")  # XXH3, as in checkpoints: a tenth of the time of a CRC
FILE = 64 << 20  # bytes after which a new file is begun
SHARE = 64  # ... or after this part of all, if that is more: a file takes a descriptor as long as it is there
VECTOR = 1024  # buffers that one call takes

_numbers = itertools.count()  # of this process' files
_Buffer = Any  # what has the buffer protocol


class Damaged(HoldfastError):
    """A record is missing or is not what was kept; the text names the record and the file."""

    def __init__(self, key: Key, where: Path | str, what: str) -> None:
        super().__init__(f"the record of {key} in {where} cannot be used: {what}")
        self.key = key


def size_of(message: Message) -> int:
    """The bytes of a record: what it takes in a file, and what it counts for in memory.

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
    """What a tensor is, but for its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def describes(self, tensor: Tensor) -> bool:
        return (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (self.dtype, self.shape, self.stride)

    def room(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@lru_cache(maxsize=256)  # most messages are described as the one before
def facts_of(text: str) -> tuple[Fact, ...]:
    """What a message's text says of its tensors, each of which must fill its memory without gaps."""
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
    """A dense tensor's bytes as they lie in memory; nothing is copied.

    >>> bytes_of(torch.tensor([1, 256], dtype=torch.int16)).tolist()
    [1, 0, 0, 1]
    """
    # A tensor on another device is copied to the host. Untested.
    return in_memory_order(tensor).cpu().view(torch.uint8).numpy()


def _data_of(text: str, tensors: Sequence[Tensor]) -> list[_Buffer]:
    """The tensors' bytes, if the text tells how to build them again."""
    facts = facts_of(text) if tensors else ()
    if len(facts) != len(tensors) or not all(map(Fact.describes, facts, tensors)):
        raise ValueError("a message's text does not describe its tensors")
    return [bytes_of(tensor) for tensor in tensors if tensor.numel()]


# --- records -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unspilled:
    """A record that is to be written."""

    key: Key
    number: int  # of all that its log ever kept: tells attempts of a step from each other
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a record lies, and what must be found there."""

    file: File
    offset: int
    head: bytes
    text: int  # bytes
    text_sum: int  # the checksum up to the end of the text
    sum: int  # the checksum of all of it

    def read(self, key: Key) -> Message:
        """The message, exactly as it was kept, or ``Damaged``."""
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
        # The text is only believed once its checksum is right: it tells how much memory to take.
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
    """What a file holds is not what was written."""


def _sum(hashed: xxhash.xxh3_64, more: Sequence[_Buffer]) -> int:
    """The checksum of what was hashed before, and more."""
    for buffer in more:
        hashed.update(buffer)
    return hashed.intdigest()


def _what_is(start: bytearray, offset: int) -> str:
    """What lies where another record should, in words."""
    mark, direction, step, boundary, micro_batch, number, *_ = HEAD.unpack_from(start)
    if mark != MARK or direction not in list(Direction):
        return f"there is no record at byte {offset}"
    found = Key(step=step, boundary=boundary, micro_batch=micro_batch, direction=Direction(direction))
    return f"at byte {offset} lies a damaged or another record (number {number}, {found})"


def _fill(fd: int, buffers: Sequence[_Buffer], offset: int) -> int:
    wanted = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
    end = _transfer(os.preadv, fd, buffers, offset)
    if end != wanted:
        raise _Wrong(f"the file ends within it, or before it: there should be bytes up to {wanted}")
    return end


def _transfer(call: Callable[..., int], fd: int, buffers: Sequence[_Buffer], offset: int) -> int:
    """Reads or writes all buffers with few calls; returns where it ended."""
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


class File:
    """A file of records. It is locked as long as its process needs it: one that is not is litter."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.live = 0  # records that are still needed
        self.size = 0
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", worker)
        while True:  # a name may be taken: by a dead process that had our number
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
            pass  # where there are no locks, nobody can find out either that it is not locked

    def write(self, records: Sequence[Unspilled]) -> list[Place]:
        """Appends records; returns where each lies."""
        self.path.stat()  # what is written into a file without a name would never be found again
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
            place = Place(file=self, offset=offset, head=head, text=len(text), text_sum=text_sum, sum=whole)
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
        """For good: its records are not needed any more."""
        _unlink(self.path)
        try:
            os.close(self._fd)
        except OSError:
            pass  # a network's complaint about bytes that nobody wants any more


class Files:
    """All files of a log. Only one thread may use them."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker
        self._files: list[File] = []
        self._full = True  # the last one
        self._cleaned = False

    def write(self, records: Sequence[Unspilled]) -> list[Place]:
        """Appends records; returns where each lies. Its file's ``live`` is to be kept right by the caller."""
        if not self._cleaned:
            self._cleaned = True
            clean(self._folder)
        if self._full:
            self._files.append(File(self._folder, self._worker))
        places = self._files[-1].write(records)
        self._full = self._files[-1].size >= max(FILE, sum(file.size for file in self._files) // SHARE)
        return places

    def tidy(self) -> None:
        """Removes files of which nothing is needed any more."""
        for file in [file for file in self._files if not file.live]:
            self._full = self._full or file is self._files[-1]
            self._files.remove(file)
            file.remove()

    def remove(self) -> None:
        for file in self._files:
            file.live = 0
        self.tidy()


def clean(folder: Path) -> list[Path]:
    """Removes the files that dead processes of this host left; returns which.

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
        # In this order: a file has its host's name only after it was locked.
        if _host_of(fd) != socket.gethostname().encode():
            return False  # whether another host's locks are seen here depends on the file system
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another one who cleans may have been faster, and a living process may have the name already.
        return os.path.samestat(os.fstat(fd), path.stat()) and _unlink(path)
    except OSError:
        return False  # somebody lives
    finally:
        os.close(fd)


def _host_of(fd: int) -> bytes | None:
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
        return False  # what cannot be removed is litter for the next time
