"""Which samples a micro-batch has: a pure function of (seed, step, index), so nothing can be lost.

The shuffle is a Feistel network over the sample numbers: any position of any epoch is found without a
table, so a data set of a billion samples costs no memory and a worker can start anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.engine.rng import seed_of

Numbers = npt.NDArray[np.uint64]

ROUNDS = 6


def _mix(values: Numbers, key: np.uint64) -> Numbers:
    """A well-known 64-bit finaliser: every input bit moves every output bit."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shuffled(positions: range, size: int, key: int) -> list[int]:
    """Where the shuffle of ``range(size)`` with this key puts these positions.

    >>> sorted(shuffled(range(10), 10, key=7))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    with np.errstate(over="ignore"):
        keys = _mix(np.arange(ROUNDS, dtype=np.uint64), np.uint64(key % 2**64))
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    values = np.arange(positions.start, positions.stop, dtype=np.uint64)
    outside = np.ones(len(values), dtype=bool)
    with np.errstate(over="ignore"):
        while outside.any():  # walk along the cycle until we are back below ``size``
            left, right = values[outside] >> np.uint64(half), values[outside] & mask
            for round_key in keys:
                left, right = right, left ^ (_mix(right, round_key) & mask)
            values[outside] = (left << np.uint64(half)) | right
            outside = values >= size
    return [int(value) for value in values]


class Batches(Protocol):
    """Which samples each micro-batch of each step has."""

    @property
    def size(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def steps_per_epoch(self) -> int: ...

    def batch_size(self, step: int) -> int: ...

    def micro_batches(self, step: int) -> int: ...

    def samples(self, step: int, index: int) -> list[int]: ...

    def number(self, step: int, index: int) -> int:
        """What random numbers of a micro-batch depend on: its place in the whole step."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a data set of ``size`` samples in batches. The last batch of an epoch may be ragged.

    >>> order = Order(size=10, global_batch=4, micro_batch=2, seed=0, shuffle=False)
    >>> order.steps_per_epoch, [order.samples(2, i) for i in range(order.micro_batches(2))]
    (3, [[8, 9]])
    """

    size: int
    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.size // self.global_batch)

    def _batch(self, step: int) -> range:
        start = step % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.size))

    def batch_size(self, step: int) -> int:
        """How many samples a step has."""
        return len(self._batch(step))

    def micro_batches(self, step: int) -> int:
        """How many micro-batches a step has."""
        return -(-self.batch_size(step) // self.micro_batch)

    def samples(self, step: int, index: int) -> list[int]:
        """The samples of a micro-batch."""
        positions = self._batch(step)[index * self.micro_batch : (index + 1) * self.micro_batch]
        if not self.shuffle:
            return list(positions)
        epoch = step // self.steps_per_epoch
        return shuffled(positions, self.size, key=seed_of(self.seed, "epoch", epoch))

    def number(self, step: int, index: int) -> int:
        return index
