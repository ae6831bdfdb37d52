"""Shuffles that are pure functions: any position of any epoch is found without a table.

Both are Feistel networks over the sample numbers, so a data set of a billion samples costs no memory and a worker can
start anywhere. There are two because the first one must stay what it is (runs are repeated by it), and the second one
is quicker: ``shuffled`` walks over up to four times the numbers that there are until it is back among them, which can
take a millisecond for a batch, and knows only ranges. ``permuted`` takes any positions, and less than a tenth of that.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]

ROUNDS = 6  # of the network: chi-squared tests see no pattern; another number would change the order of every run


def _mix(values: Numbers, key: np.uint64) -> Numbers:
    """Hash numbers with splitmix64's finaliser: every bit of the input changes every bit of the output."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shuffled(positions: range, size: int, key: int) -> list[int]:
    """Return where the shuffle of ``range(size)`` with this ``key`` puts a range of positions.

    >>> sorted(shuffled(range(10), 10, key=7))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    return list(_shuffled(positions, size, key))


@lru_cache(maxsize=128)  # an engine asks for the samples of a micro-batch several times, and a feed long before
def _shuffled(positions: range, size: int, key: int) -> tuple[int, ...]:
    with np.errstate(over="ignore"):
        keys = _mix(np.arange(ROUNDS, dtype=np.uint64), np.uint64(key % 2**64))
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    values = np.arange(positions.start, positions.stop, dtype=np.uint64)
    outside = np.ones(len(values), dtype=bool)
    with np.errstate(over="ignore"):
        # The network permutes a power of four that is at least ``size``. A value that lands outside goes through it
        # again, until it is inside: that keeps it a permutation.
        while outside.any():
            left, right = values[outside] >> np.uint64(half), values[outside] & mask
            for round_key in keys:
                left, right = right, left ^ (_mix(right, round_key) & mask)
            values[outside] = (left << np.uint64(half)) | right
            outside = values >= size
    return tuple(values.tolist())


def permuted(positions: Numbers, size: int, key: int) -> Numbers:
    """Return where another shuffle of ``range(size)`` with this ``key`` puts any positions.

    The network runs over a grid of rows and columns that is hardly larger than ``size``, with sums in place of bits.

    >>> sorted(permuted(np.arange(7, dtype=np.uint64), 7, key=3).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    width = isqrt(size - 1) + 1
    rows, columns = np.uint64(-(-size // width)), np.uint64(width)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):  # values beyond ``size``, in the last row, go through it again, as in ``shuffled``
        row, column = np.divmod(values[outside], columns)
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _stirred(column, one)) % rows
            column = (column + _stirred(row, other)) % columns
        found = row * columns + column
        values[outside] = found
        outside = outside[found >= size]
    return values


def _stirred(values: Numbers, key: np.uint64) -> Numbers:
    """Hash numbers to 48 bits. Products overflow on purpose, and for arrays silently."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return values >> np.uint64(16)
