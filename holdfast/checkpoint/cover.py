"""Whether the pieces of a tensor cover it, and where they hold the same elements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from holdfast.checkpoint.pieces import Box, Entry, Piece, whole
from holdfast.checkpoint.rules import copies


def gaps(entry: Entry) -> list[Box]:
    """Boxes of a tensor that no piece holds.

    >>> import torch
    >>> [gap.offset for gap in gaps(Entry(shape=(4,), dtype=torch.float32, pieces=()))]
    [(0,)]
    """
    left = [whole(entry.shape)] if whole(entry.shape).numel else []
    for piece in entry.pieces:
        rest: list[Box] = []
        for one in left:
            common = one.intersect(piece.box)
            rest += [one] if common is None else one.without(common)
        left = rest
    return left


def overlaps(entry: Entry) -> Iterator[tuple[Piece, Piece, Box]]:
    """Pairs of pieces that hold the same elements: whole copies, and what else has a part in common."""
    held = sum(piece.box.numel for piece in entry.pieces)
    if entry.mean or held <= whole(entry.shape).numel:
        return
    twins = copies(entry)
    for a, b in twins:
        yield a, b, a.box
    seconds = {id(b) for _, b in twins}
    firsts = [piece for piece in entry.pieces if id(piece) not in seconds]
    for a, b in combinations(firsts, 2):
        common = a.box.intersect(b.box)
        if common is not None:
            yield a, b, common
