"""Coverage: whether the boxes of a tensor cover it, and where they overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from holdfast.checkpoint.pieces import Box, Piece, Shape, TensorEntry, whole
from holdfast.checkpoint.rules import copies
from holdfast.checkpoint.tiling import sources, tiles
from holdfast.errors import CheckpointError

_COMPARED = 300  # parts of which each pair is compared, to say which two overlap


def gaps(entry: TensorEntry) -> list[Box]:
    """Boxes of a tensor that no piece holds.

    >>> import torch
    >>> [gap.offset for gap in gaps(TensorEntry(shape=(4,), dtype=torch.float32, pieces=()))]
    [(0,)]
    """
    return sources(whole(entry.shape), [piece.box for piece in entry.pieces])[1]


def overlaps(entry: TensorEntry) -> Iterator[tuple[Piece, Piece, Box]]:
    """Pairs of pieces that hold the same elements, with the box that both hold."""
    held = sum(piece.box.numel for piece in entry.pieces)
    if entry.mean or held <= whole(entry.shape).numel:
        return
    twins = copies(entry)  # whole copies first: comparing all pairs takes long where there are many
    for a, b in twins:
        yield a, b, a.box
    seconds = {id(b) for _, b in twins}
    firsts = [piece for piece in entry.pieces if id(piece) not in seconds]
    for a, b in combinations(firsts, 2):
        common = a.box.intersect(b.box)
        if common is not None:
            yield a, b, common


def check_tiling(boxes: Sequence[Box], shape: Shape, *, name: str, where: object) -> None:
    """Refuses boxes that leave a gap, overlap, or reach outside of the tensor.

    ``name`` is the tensor's and ``where`` the file's, for the ``CheckpointError``.

    >>> check_tiling([Box(offset=(0,), shape=(2,)), Box(offset=(2,), shape=(3,))], (6,), name="w", where="a")
    Traceback (most recent call last):
    holdfast.errors.CheckpointError: a: parts of w are missing, 5 of 6 elements are there (a file or an entry is lost)
    """
    for box in boxes:
        if len(box.offset) != len(shape) or not _inside(box, shape):
            text = f"{where}: a part of {name} at {box.offset} of shape {box.shape} lies outside of its shape {shape}"
            raise CheckpointError(text, hint="the checkpoint is damaged")
    if tiles(boxes, whole(shape)):
        return
    parts = [box for box in boxes if box.numel]
    for a, b in combinations(parts[:_COMPARED], 2):
        if a.intersect(b):
            text = f"{where}: two parts of {name} overlap at {max(a.offset, b.offset)}"
            raise CheckpointError(text, hint="a file or an entry is there twice")
    there, wanted = sum(box.numel for box in parts), math.prod(shape)
    if there > wanted or len(parts) > _COMPARED:
        text = f"{where}: the {len(parts)} parts of {name} overlap or leave gaps"
        raise CheckpointError(text, hint="a file or an entry is lost, or there twice")
    text = f"{where}: parts of {name} are missing, {there} of {wanted} elements are there"
    raise CheckpointError(text, hint="a file or an entry is lost")


def _inside(box: Box, shape: Shape) -> bool:
    return all(o >= 0 and n >= 0 and o + n <= m for o, n, m in zip(box.offset, box.shape, shape, strict=True))
