"""Reads boxes of logical tensors, whatever pieces and files they lie in.

A read is planned first, by pure functions: which bytes of which files go where. Then :mod:`transfer` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.disk import BLOCK, THREADS, Bytes, Progress, round_up, silent
from holdfast.checkpoint.pieces import Box, Catalogue, Piece, Shape, Stored, TensorEntry, flat_boxes, whole
from holdfast.checkpoint.tiling import sources
from holdfast.checkpoint.transfer import FileSpan, Transfer, carry_out
from holdfast.checkpoint.trees import box_text
from holdfast.errors import CheckpointError

SPAN = 2 * BLOCK  # bytes of a file that a strided part may span; larger ones are cut, to bound the memory of a read
CHUNK = 16 * BLOCK  # bytes of the memory through which a tensor is cast, averaged or sent to a device, at most twice


@dataclass(frozen=True, kw_only=True)
class Want:
    """A box of a logical tensor to read, and the tensor of the box's shape that takes it."""

    name: str
    box: Box
    out: torch.Tensor


def read_tensor(catalogue: Catalogue, name: str, box: Box | None = None) -> torch.Tensor:
    """Reads a logical tensor, or a box of it, into new memory; ``CheckpointError`` if it is missing or damaged."""
    entry = find(catalogue, name)
    box = box or whole(entry.shape)
    out = torch.empty(box.shape, dtype=entry.dtype)
    read(catalogue, [Want(name=name, box=box, out=out)])
    return out


def read_range(catalogue: Catalogue, name: str, start: int, stop: int, out: Bytes) -> None:
    """Reads elements [start, stop) of a flattened tensor into ``out``, as bytes; on this thread, for streaming."""
    entry = find(catalogue, name)
    if start >= stop:
        return  # torch cannot view an empty array as another dtype
    line = torch.from_numpy(out).view(entry.dtype)
    read(catalogue, [*flat_wants(name, entry.shape, start, line)], threads=1)


def flat_wants(name: str, shape: Shape, start: int, line: torch.Tensor) -> Iterator[Want]:
    """Wants that together fill a line with the elements of a flattened tensor from ``start`` on.

    >>> [want.box.shape for want in flat_wants("w", (3, 4), 2, torch.empty(7))]
    [(1, 2), (1, 4), (1, 1)]
    """
    done = 0
    for box in flat_boxes(shape, start, start + len(line)):
        yield Want(name=name, box=box, out=line[done : done + box.numel].view(box.shape))
        done += box.numel


def find(catalogue: Catalogue, name: str) -> TensorEntry:
    """A tensor's entry; ``CheckpointError`` with its name if there is none."""
    if name not in catalogue.tensors:
        raise CheckpointError(f"{catalogue.root} has no tensor {name}", hint="holdfast ckpt inspect lists them")
    return catalogue.tensors[name]


def read(catalogue: Catalogue, wants: Sequence[Want], *, progress: Progress = silent, threads: int = THREADS) -> None:
    """Reads every want into its ``out``, which may have another dtype or be on another device.

    ``progress`` is called with the bytes done. Raises ``CheckpointError`` with file and tensor if a byte is not as it
    was written, or no piece holds a part; gaps are noticed before anything is read.
    """
    plain: list[Want] = []
    others: list[Want] = []
    for want in wants:
        assert tuple(want.out.shape) == want.box.shape, f"{want.name}: {tuple(want.out.shape)} cannot take {want.box}"
        entry = find(catalogue, want.name)
        direct = want.out.device.type == "cpu" and not entry.mean and _as_stored(entry, want)
        (plain if direct else others).append(want)
    spans = plan(catalogue, plain)
    for want in others:  # refuses gaps before anything is changed
        _sources(catalogue, want.name, want.box, catalogue.tensors[want.name].pieces)
    carry_out(catalogue, spans, progress, threads)
    for want in others:
        for part in _chunks(want.box, _itemsize(catalogue.tensors[want.name], want)):
            target = want.out[part.relative_to(want.box).slices()]
            target.copy_(_read_indirect(catalogue, want.name, part, threads))
            progress(target.nbytes)


def _as_stored(entry: TensorEntry, want: Want) -> bool:
    return all(piece.stored.dtype == want.out.dtype for piece in entry.pieces)


def _itemsize(entry: TensorEntry, want: Want) -> int:
    return max(want.out.element_size(), entry.dtype.itemsize, *(p.stored.dtype.itemsize for p in entry.pieces), 8)


def _read_indirect(catalogue: Catalogue, name: str, box: Box, threads: int) -> torch.Tensor:
    """A box that has to be cast or averaged: each piece is read in its own dtype first."""
    entry = catalogue.tensors[name]

    def part(piece: Piece, common: Box) -> torch.Tensor:
        out = torch.empty(common.shape, dtype=piece.stored.dtype)
        source = piece.stored.part(common.relative_to(piece.box))
        carry_out(catalogue, _spans([*_transfers(source, out, name)], catalogue), silent, threads)
        return out

    sources = _sources(catalogue, name, box, entry.pieces)
    if not entry.mean:
        values = torch.empty(box.shape, dtype=entry.dtype)
        for piece, common in sources:
            values[common.relative_to(box).slices()] = part(piece, common)
        return values
    total = torch.zeros(box.shape, dtype=torch.float64)
    for piece in entry.pieces:
        for _, all_of_it in _sources(catalogue, name, box, [piece]):  # a mean needs every value of every piece
            total += part(piece, all_of_it)
    total /= len(entry.pieces)
    return total.to(entry.dtype)


def _chunks(box: Box, itemsize: int) -> Iterator[Box]:
    count = max(CHUNK // itemsize, 1)
    if box.numel <= count:
        yield box
        return
    for start in range(0, box.numel, count):
        for part in flat_boxes(box.shape, start, min(start + count, box.numel)):
            offset = tuple(a + b for a, b in zip(part.offset, box.offset, strict=True))
            yield Box(offset=offset, shape=part.shape)


# --- the plan -------------------------------------------------------------------------------------


def plan(catalogue: Catalogue, wants: Sequence[Want]) -> list[FileSpan]:
    """The spans of files to read for some wants, and what to copy out of them."""
    transfers: list[Transfer] = []
    for want in wants:
        for piece, common in _sources(catalogue, want.name, want.box, catalogue.tensors[want.name].pieces):
            target = want.out[common.relative_to(want.box).slices()]
            transfers += _transfers(piece.stored.part(common.relative_to(piece.box)), target, want.name)
    return _spans(transfers, catalogue)


def _sources(catalogue: Catalogue, name: str, box: Box, pieces: Sequence[Piece]) -> list[tuple[Piece, Box]]:
    """The parts of a box, each with the piece to read it from; of pieces that hold the same elements, the first."""
    found, left = sources(box, [piece.box for piece in pieces])
    if left:
        where = box_text(left[0]) if left[0].shape else "the value"
        reason = f"{catalogue.root}: no piece holds {where} of {name}"
        raise CheckpointError(reason, hint="the checkpoint is incomplete")
    return [(pieces[number], common) for number, common in found]


def _transfers(stored: Stored, tensor: torch.Tensor, name: str) -> Iterator[Transfer]:
    target = _numbers(tensor)
    if stored.is_contiguous and target.flags.c_contiguous:  # plain bytes: one transfer for each block of the file
        line = target.reshape(-1).view(np.uint8)
        start, end = stored.offset, stored.offset + stored.nbytes
        for first in _cuts(start, end):
            last = min((first // BLOCK + 1) * BLOCK, end)
            part = Stored(file=stored.file, offset=first, dtype=torch.uint8, shape=(last - first,), strides=(1,))
            yield Transfer(stored=part, target=line[first - start : last - start], name=name)
    else:
        yield from _cut_strided(stored, target, name)


def _cuts(start: int, end: int) -> Iterator[int]:
    yield start
    yield from range((start // BLOCK + 1) * BLOCK, end, BLOCK)


def _cut_strided(stored: Stored, target: np.ndarray[Any, Any], name: str) -> Iterator[Transfer]:
    if stored.span <= SPAN:
        yield Transfer(stored=stored, target=target, name=name)
        return
    dim = max(range(len(stored.shape)), key=lambda d: (stored.shape[d] - 1) * stored.strides[d])
    middle = stored.shape[dim] // 2
    for a, b in ((0, middle), (middle, stored.shape[dim])):
        offset = tuple(a if d == dim else 0 for d in range(len(stored.shape)))
        shape = tuple(b - a if d == dim else n for d, n in enumerate(stored.shape))
        box = Box(offset=offset, shape=shape)
        yield from _cut_strided(stored.part(box), target[box.slices()], name)


def _numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A view of a tensor's memory as integers of the same size: numpy does not know all dtypes of torch."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.detach()
    return (tensor.view(sizes[tensor.element_size()]) if tensor.element_size() in sizes else tensor).numpy()


def _spans(transfers: list[Transfer], catalogue: Catalogue) -> list[FileSpan]:
    """Spans to read: transfers that lie in blocks which are read anyway share a span."""
    spans: list[FileSpan] = []
    for transfer in sorted(transfers, key=lambda t: (t.stored.file, t.stored.offset)):
        stored = transfer.stored
        if not stored.span:
            continue
        start, stop = stored.offset // BLOCK * BLOCK, round_up(stored.offset + stored.span, BLOCK)
        if not spans or spans[-1].file != stored.file or stop > spans[-1].stop:
            spans.append(FileSpan(file=stored.file, start=start, stop=stop))
        spans[-1].transfers.append(transfer)
    for span in spans:
        _trim(span, catalogue)
    return spans


def _trim(span: FileSpan, catalogue: Catalogue) -> None:
    """Shrinks a span to what is wanted, if its file has no checksums: only those need whole blocks."""
    known = catalogue.files[span.file]
    if known.checksums is None:
        span.start = min(t.stored.offset for t in span.transfers)
        span.stop = max(t.stored.offset + t.stored.span for t in span.transfers)
    else:
        span.stop = min(span.stop, known.bytes)
