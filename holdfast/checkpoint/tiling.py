"""Tiling: whether boxes cover a box exactly once, in a time that grows with their number alone.

An index of a few kilobytes can list thousands of pieces, in any order and overlap. Comparing each with each, or with
what the others have left, would take minutes. Instead every row, column and so on gets a secret random weight, and an
element weighs the product of its own. Boxes that cover another exactly once weigh as much as it does. If they do
not, an element counts twice or never, and the weights are equal by chance only: once in 2**50 attempts.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Sequence

from holdfast.checkpoint.pieces import Box, take_out
from holdfast.errors import CheckpointError

_PRIME = (1 << 61) - 1  # weights are counted modulo this
WORK = 300_000  # boxes that may be looked at to cut overlapping ones apart; about a second


def tiles(boxes: Iterable[Box], outer: Box) -> bool:
    """Whether boxes lie inside of another one and cover each of its elements exactly once. Empty boxes do not count.

    >>> halves = [Box(offset=(0, 0), shape=(2, 3)), Box(offset=(0, 3), shape=(2, 1))]
    >>> tiles(halves, Box(offset=(0, 0), shape=(2, 4))), tiles(halves, Box(offset=(0, 0), shape=(2, 5)))
    (True, False)
    """
    draw = random.Random(secrets.randbits(128)).getrandbits
    before: list[dict[int, int]] = [{} for _ in outer.shape]  # the weight of all rows before a row, by dimension

    def weight(box: Box) -> int:
        product = 1
        for known, start, size in zip(before, box.offset, box.shape, strict=True):
            for place in (start, start + size):
                if place not in known:
                    known[place] = draw(61)
            product = product * (known[start + size] - known[start]) % _PRIME
        return product

    total = 0
    for box in boxes:
        if len(box.shape) != len(outer.shape) or len(box.offset) != len(outer.shape):
            return False
        if box.numel:
            if not _inside(box, outer):
                return False
            total += weight(box)
    return total % _PRIME == (weight(outer) if outer.numel else 0)


def _inside(box: Box, outer: Box) -> bool:
    return all(
        a <= o and o + n <= a + m for o, n, a, m in zip(box.offset, box.shape, outer.offset, outer.shape, strict=True)
    )


def sources(box: Box, pieces: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """The parts of a box, each with the number of the first piece that holds it; and the parts that no piece holds.

    Raises ``CheckpointError`` if so many pieces overlap that it would take long to cut them apart.

    >>> held, left = sources(Box(offset=(0,), shape=(4,)), [Box(offset=(0,), shape=(2,)), Box(offset=(1,), shape=(2,))])
    >>> [(number, part.offset) for number, part in held], left[0].offset
    ([(0, (0,)), (1, (2,))], (3,))
    """
    first: dict[Box, int] = {}  # copies: pieces that hold the same part
    for number, piece in enumerate(pieces):
        common = piece.intersect(box)
        if common is not None:
            first.setdefault(common, number)
    if tiles(first, box):
        return [(number, common) for common, number in first.items()], []
    found: list[tuple[int, Box]] = []
    left = [box] if box.numel else []
    work = 0
    for common, number in first.items():
        work += len(left)
        if work > WORK:
            raise CheckpointError(
                f"{len(pieces)} pieces of a tensor overlap or leave gaps in too many places", hint="it is damaged"
            )
        inside, left = take_out(left, common)
        found += [(number, part) for part in inside]
    return found, left
