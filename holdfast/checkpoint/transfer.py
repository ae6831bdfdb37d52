"""Carries out a planned read: a few threads read spans of files, check them, and copy out of them what is wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from holdfast.checkpoint.disk import (
    ALIGN,
    BLOCK,
    BUFFERS,
    Bytes,
    Progress,
    checksum,
    explained,
    in_parallel,
    is_cached,
    pass_cache,
    read_exactly,
    read_object,
    round_up,
)
from holdfast.checkpoint.inside import open_regular
from holdfast.checkpoint.pieces import Catalogue, Stored
from holdfast.checkpoint.places import Remote
from holdfast.checkpoint.trees import some
from holdfast.errors import CheckpointError

READERS = 6  # of an object store at least: its answers take longer than a disk's; more gain nothing, and need memory
FILES = 64  # open at a time: some formats have one for each tensor, and systems allow about a thousand


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An array in a file, and the memory of the same shape that takes it; both are seen as plain integers."""

    stored: Stored
    target: np.ndarray[Any, Any]
    name: str


@dataclass(kw_only=True)
class FileSpan:
    """Bytes [start, stop) of a file that are read at once, and the arrays that are copied out of them."""

    file: str
    start: int
    stop: int
    transfers: list[Transfer] = field(default_factory=list)


def carry_out(catalogue: Catalogue, spans: Sequence[FileSpan], progress: Progress, threads: int) -> None:
    """Reads every span, checks it and copies what is wanted out of it.

    The spans of one file must follow each other. With one thread, the last block is kept for the next call, for
    readers that stream. Raises ``CheckpointError`` for a damaged block.
    """
    if isinstance(catalogue.root, Remote) and threads > 1:
        threads = max(threads, READERS)
    for batch in _few_files(spans):
        with ExitStack() as stack:
            files = _open_files(catalogue, batch, stack)

            def work(span: FileSpan, files: Mapping[str, int | Remote] = files) -> None:
                _read(catalogue, span, files[span.file], streaming=threads == 1)
                progress(sum(t.stored.nbytes for t in span.transfers))

            in_parallel(work, batch, threads)


def _few_files(spans: Sequence[FileSpan]) -> Iterator[list[FileSpan]]:
    batch: list[FileSpan] = []
    names: set[str] = set()
    for span in spans:
        if span.file not in names and len(names) == FILES:
            yield batch
            batch, names = [], set()
        batch.append(span)
        names.add(span.file)
    yield batch


def _open_files(catalogue: Catalogue, spans: Sequence[FileSpan], stack: ExitStack) -> Mapping[str, int | Remote]:
    """Opens files for reading, past the page cache if their bytes are not in it. Objects need no opening.

    Our own files are written past the cache and never are in it; those of other programs may be.
    """
    files: dict[str, int | Remote] = {}
    for name, group in groupby(spans, key=lambda span: span.file):
        path, wanted = catalogue.root / name, list(group)
        if isinstance(path, Remote):
            files[name] = path
            continue
        middle = wanted[len(wanted) // 2]  # the begin of a file was read when it was opened
        with explained(path, "read"):
            fd = files[name] = open_regular(path)
            stack.callback(os.close, fd)
            ours = catalogue.files[name].checksums is not None
            if ours or not is_cached(fd, (middle.start + middle.stop) // 2):
                pass_cache(fd)
    return files


class _Recent(threading.local):
    """The span that this thread has checked last: small tensors that are streamed one by one share it."""

    catalogue: Catalogue | None = None  # the object, not its id, which may be reused
    span: tuple[str, int, int]
    data: Bytes


_recent = _Recent()


def _read(catalogue: Catalogue, span: FileSpan, fd: int | Remote, *, streaming: bool) -> None:
    size = span.stop - span.start
    key = (span.file, span.start, span.stop)
    if streaming and _recent.catalogue is catalogue and _recent.span == key:
        _copy_all_out(span, _recent.data)
        return
    if isinstance(fd, Remote):
        with explained(fd, "read"):
            data = read_object(fd, span.start, span.stop)
        check_blocks(catalogue, span, data)
        _copy_all_out(span, data)
        if streaming and size <= BLOCK:
            _recent.catalogue, _recent.span, _recent.data = catalogue, key, data
        return
    before = span.start % ALIGN  # a read past the page cache begins on a page
    with BUFFERS.lend(round_up(size + before)) as room:
        path = catalogue.root / span.file
        with explained(path, "read"):
            read_exactly(fd, room, span.start - before, span.stop, path)
        buffer = room[before:]
        check_blocks(catalogue, span, buffer)
        _copy_all_out(span, buffer)
        if streaming and size <= BLOCK and sum(t.stored.nbytes for t in span.transfers) < size // 2:
            _recent.catalogue, _recent.span, _recent.data = catalogue, key, buffer[:size].copy()


def _copy_all_out(span: FileSpan, data: Bytes) -> None:
    for transfer in span.transfers:
        _copy_out(transfer, data, span.start)


def check_blocks(catalogue: Catalogue, span: FileSpan, data: Bytes) -> None:
    """Raises ``CheckpointError`` for a block that does not match its checksum, with the tensors in it."""
    sums = catalogue.files[span.file].checksums
    if sums is None:
        return
    for start in range(span.start, span.stop, BLOCK):
        stop = min(start + BLOCK, span.stop)
        if checksum(data[start - span.start : stop - span.start]) != sums[start // BLOCK]:
            names = _names_in(catalogue, span.file, start, stop)
            raise CheckpointError(
                f"{catalogue.root / span.file} is damaged between bytes {start} and {stop} (it holds {names})",
                hint="restore the file, or load an older checkpoint",
            )


def _names_in(catalogue: Catalogue, file: str, start: int, stop: int) -> str:
    names = [
        name
        for name, entry in catalogue.tensors.items()
        for piece in entry.pieces
        if piece.stored.file == file and piece.stored.offset < stop and piece.stored.offset + piece.stored.span > start
    ]
    return some(names) or "the header"


def _copy_out(transfer: Transfer, buffer: Bytes, start: int) -> None:
    stored, target = transfer.stored, transfer.target
    size = target.dtype.itemsize
    source: np.ndarray[Any, Any] = np.ndarray(
        stored.shape,
        dtype=target.dtype,
        buffer=buffer.data,
        offset=stored.offset - start,
        strides=tuple(s * size for s in stored.strides),
    )
    np.copyto(target, source)
