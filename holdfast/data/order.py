"""Orders: the samples of each micro-batch, as pure functions of (seed, step, index). No state means none is lost.

``Order`` is the order of a whole run. ``BatchedOrder`` is one where each worker reads its own part of the data
(``partition.py``). ``Share`` is the part of another order that one replica computes. An engine takes any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import Protocol

from holdfast.data.partition import Partition, check_place
from holdfast.data.shuffle import shuffled
from holdfast.errors import UsageError
from holdfast.rng import seed_of


class Batches(Protocol):
    """The samples of each micro-batch of each step. Every method is a pure function."""

    @property
    def size(self) -> int:
        """Samples of the data set."""

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch; the last one of an epoch may have fewer."""

    @property
    def seed(self) -> int: ...

    @property
    def steps_per_epoch(self) -> int: ...

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step."""

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step."""

    def samples(self, step: int, index: int) -> list[int]:
        """The sample numbers of micro-batch ``index`` of a step."""

    def number(self, step: int, index: int) -> int:
        """The micro-batch's number in the whole step, which its random numbers depend on."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which a run reads a data set. The last batch of an epoch, and its last micro-batch, may be smaller.

    ``global_batch`` and ``micro_batch`` are samples of a step and of a micro-batch. Without ``shuffle``, every epoch
    has the order of the data set.

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
        """Return the number of samples of a step."""
        return len(self._batch(step))

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return -(-self.batch_size(step) // self.micro_batch)

    def _positions(self, step: int, index: int) -> range:
        """The places of a micro-batch in the order of its epoch."""
        return self._batch(step)[index * self.micro_batch : (index + 1) * self.micro_batch]

    def samples(self, step: int, index: int) -> list[int]:
        """The samples of a micro-batch."""
        positions = self._positions(step, index)
        if not self.shuffle:
            return list(positions)
        epoch = step // self.steps_per_epoch
        return shuffled(positions, self.size, key=seed_of(self.seed, "epoch", epoch))

    def number(self, step: int, index: int) -> int:
        """The micro-batch's number in the whole step."""
        return index


class _Parting:
    """Attributes of ``BatchedOrder`` that are not fields: ``asdict`` must not show them."""

    partition: Partition
    workers: int
    _batch: Callable[[int, int], list[int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchedOrder(_Parting):
    """An order where each worker reads its own part of the data, as a ``Partition`` says.

    A step's first micro-batches are those of worker 0, then come those of worker 1, and so on. Every worker has the
    same number of them: its share of ``global_batch`` rounded down, but at least one. So a step has at most
    ``global_batch`` samples, or one micro-batch for each worker if that is more.

    The dataclass's fields are what a run's label shows. The partition is among them by its short ``repr``;
    the number of workers is not, since it changes.

    Raises ``UsageError`` if the partition cannot do for so many workers.

    >>> from holdfast.data.partition import SelDP
    >>> order = BatchedOrder(partition=SelDP(size=100), global_batch=16, micro_batch=2, seed=0).for_workers(3)
    >>> order.batch_size(0), order.micro_batches(0), order.per_worker
    (12, 6, 2)
    >>> order.samples(0, 4) + order.samples(0, 5) == SelDP(size=100).samples(0, 2, workers=3, batch=4)
    True
    """

    partition: InitVar[Partition]
    workers: InitVar[int] = 1
    size: int = field(init=False)
    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool = field(default=True, init=False)
    parts: str = field(init=False)

    def __post_init__(self, partition: Partition, workers: int) -> None:
        if not 1 <= self.micro_batch <= self.global_batch:
            raise UsageError(
                f"micro_batch={self.micro_batch} does not fit into global_batch={self.global_batch}",
                hint="1 <= micro_batch <= global_batch",
            )
        check_place(partition.size, 0, 0, workers, self.global_batch)
        known = {"partition": partition, "workers": workers, "size": partition.size, "parts": repr(partition)}
        # An engine asks for one micro-batch after the other, and for some twice.
        for name, value in (known | {"_batch": lru_cache(maxsize=2 * workers)(self._read)}).items():
            object.__setattr__(self, name, value)
        self.samples(0, 0)  # raises now if the partition cannot do for so many workers

    def for_workers(self, workers: int) -> BatchedOrder:
        """Return the same order for another number of workers."""
        return BatchedOrder(
            partition=self.partition,
            workers=workers,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            seed=self.seed,
        )

    @property
    def per_worker(self) -> int:
        """The number of micro-batches of a step that belong to each worker."""
        return max(1, self.global_batch // self.workers // self.micro_batch)

    @property
    def steps_per_epoch(self) -> int:
        """The number that an ``Order`` would have, so that epochs do not change when workers come or go."""
        return -(-self.size // self.global_batch)

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step."""
        return self.micro_batches(step) * self.micro_batch

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return self.workers * self.per_worker

    def samples(self, step: int, index: int) -> list[int]:
        """The samples of a micro-batch."""
        worker, index = divmod(index, self.per_worker)
        return self._batch(step, worker)[index * self.micro_batch : (index + 1) * self.micro_batch]

    def number(self, step: int, index: int) -> int:
        """The micro-batch's number in the whole step."""
        return index

    def _read(self, step: int, worker: int) -> list[int]:
        """The samples of all micro-batches of a worker at a step."""
        batch = self.per_worker * self.micro_batch
        samples = self.partition.samples(step, worker, workers=self.workers, batch=batch)
        if len(samples) != batch:
            raise UsageError(f"{self.parts} gave {len(samples)} samples, not {batch}", hint="every batch must be whole")
        return samples


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of another order that one replica computes. Its micro-batches are counted from 0.

    ``part(count)`` tells which of a step's ``count`` micro-batches are this replica's. A replica that would get none
    computes one of another replica's: it must take part in every step.

    >>> order = Order(size=8, global_batch=8, micro_batch=2, seed=0, shuffle=False)
    >>> mine = Share(order=order, rank=1, part=lambda count: range(count // 2, count))
    >>> mine.micro_batches(0), mine.samples(0, 0), mine.number(0, 0), mine.batch_size(0)
    (2, [4, 5], 2, 4)
    """

    order: Batches
    rank: int
    part: Callable[[int], range]

    @property
    def size(self) -> int:
        return self.order.size

    @property
    def micro_batch(self) -> int:
        return self.order.micro_batch

    @property
    def seed(self) -> int:
        return self.order.seed

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def _mine(self, step: int) -> range:
        count = self.order.micro_batches(step)
        again = self.rank % count
        return self.part(count) or range(again, again + 1)

    def micro_batches(self, step: int) -> int:
        return len(self._mine(step))

    def batch_size(self, step: int) -> int:
        return sum(len(self.samples(step, index)) for index in range(self.micro_batches(step)))

    def samples(self, step: int, index: int) -> list[int]:
        return self.order.samples(step, self._mine(step)[index])

    def number(self, step: int, index: int) -> int:
        """The micro-batch's number in the whole step."""
        return self.order.number(step, self._mine(step)[index])
