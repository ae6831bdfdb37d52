"""A shuffle of any positions, wherever they are, for less than a tenth of a millisecond a batch.

``order.shuffled`` walks a square of up to four times the numbers that there are until it is back among them, which
for a batch can take a millisecond, and only knows ranges. Here the Feistel network runs over a grid that hardly
exceeds the numbers, with sums instead of bits. ``order.shuffled`` stays what it is: runs are repeated by it.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np

from holdfast.data.order import Numbers

ROUNDS = 6


def permuted(positions: Numbers, size: int, key: int) -> Numbers:
    """Where the shuffle of ``range(size)`` with this key puts these positions.

    >>> sorted(permuted(np.arange(7, dtype=np.uint64), 7, key=3).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    width = isqrt(size - 1) + 1
    rows, columns = np.uint64(-(-size // width)), np.uint64(width)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):  # in the last row: walk along the cycle until we are back below ``size``
        row, column = np.divmod(values[outside], columns)
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _stirred(column, one)) % rows
            column = (column + _stirred(row, other)) % columns
        found = row * columns + column
        values[outside] = found
        outside = outside[found >= size]
    return values


def _stirred(values: Numbers, key: np.uint64) -> Numbers:
    """48 bits that look like chance; arrays of numbers overflow silently, as is meant here."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return values >> np.uint64(16)
