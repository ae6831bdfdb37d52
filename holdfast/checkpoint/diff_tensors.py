"""Compares the elements of tensors in two checkpoints, a few megabytes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast.checkpoint.disk import Progress, silent
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.tensor_reader import Want, flat_wants, read

BATCH = 16 << 20  # bytes of each side that are in memory at once: enough for several reads beside each other
PART = 1 << 18  # elements whose difference is computed at once, in double precision: 2 MB, which stay in the cache


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A tensor that both checkpoints have in the same shape: its name in the result, in A and in B."""

    name: str
    a: str
    b: str


@dataclass(kw_only=True)
class Tally:
    """Counts of what two tensors differ in.

    ``differing`` elements have other bits (under another dtype: other values), ``beyond`` are further apart than
    the tolerance, ``largest`` is the largest difference.
    """

    differing: int = 0
    beyond: int = 0
    largest: float = 0.0


def compare(
    a: Catalogue, b: Catalogue, pairs: Sequence[Pair], *, tolerance: float = 0.0, progress: Progress = silent
) -> dict[Pair, Tally]:
    """Reads every pair once and returns what each differs in."""
    tallies = {pair: Tally() for pair in pairs}
    for batch in _batches(pairs, a, b):
        ours = _read(a, [(pair.a, start, stop) for pair, start, stop in batch], progress)
        theirs = _read(b, [(pair.b, start, stop) for pair, start, stop in batch], progress)
        for (pair, _, _), x, y in zip(batch, ours, theirs, strict=True):
            count(tallies[pair], x, y, tolerance)
    return tallies


def _batches(pairs: Sequence[Pair], a: Catalogue, b: Catalogue) -> Iterator[list[tuple[Pair, int, int]]]:
    """Batches of (pair, start, stop) that are read together, in the order in which they lie in A's files.

    A large tensor is cut over several batches; many small ones share one.
    """

    def place(pair: Pair) -> tuple[str, int]:
        first = a.tensors[pair.a].pieces[:1]
        return (first[0].stored.file, first[0].stored.offset) if first else ("", 0)

    batch: list[tuple[Pair, int, int]] = []
    room = BATCH
    for pair in sorted(pairs, key=place):
        widest = max(a.tensors[pair.a].dtype.itemsize, b.tensors[pair.b].dtype.itemsize)
        start, end = 0, math.prod(a.tensors[pair.a].shape)
        while start < end:
            stop = min(end, start + max(room // widest, 1))
            batch.append((pair, start, stop))
            room -= (stop - start) * widest
            start = stop
            if room < widest:
                yield batch
                batch, room = [], BATCH
    if batch:
        yield batch


def _read(catalogue: Catalogue, ranges: Sequence[tuple[str, int, int]], progress: Progress) -> list[torch.Tensor]:
    """Elements [start, stop) of flattened tensors, all of one batch in one read."""
    wants: list[Want] = []
    made: list[torch.Tensor] = []
    for name, start, stop in ranges:
        entry = catalogue.tensors[name]
        made.append(torch.empty(stop - start, dtype=entry.dtype))
        wants += flat_wants(name, entry.shape, start, made[-1])
    read(catalogue, wants, progress=progress)
    return made


def count(tally: Tally, a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> None:
    """Adds to a tally what two lines of elements differ in.

    >>> tally = Tally()
    >>> count(tally, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 7.0]), 1.0)
    >>> tally
    Tally(differing=2, beyond=1, largest=4.0)
    """
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return
    for start in range(0, len(a), PART):
        x, y = a[start : start + PART], b[start : start + PART]
        if x.dtype == y.dtype:
            unlike = (_bits(x) != _bits(y)).any(dim=1)
            if not unlike.any():
                continue
            x, y = x[unlike], y[unlike]
        apart = _apart(x, y)
        tally.differing += len(apart) if a.dtype == b.dtype else int((apart != 0).sum())
        tally.beyond += int((~(apart <= tolerance)).sum())  # NaN is beyond every tolerance
        tally.largest = max(tally.largest, float(apart.nan_to_num(math.inf, math.inf).max()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(len(tensor), -1)


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The distance of elements from each other. Equal infinities are 0 apart, and so is NaN from NaN."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    apart = (x - y).abs()
    apart[(x == y) | (x.isnan() & y.isnan())] = 0.0
    return apart
