"""A run's order where each worker reads its own part of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import lru_cache

from holdfast.data.partition import Partition, check_place
from holdfast.errors import UsageError


class _Parting:
    """What an order knows beside its fields."""

    partition: Partition
    workers: int
    _batch: Callable[[int, int], list[int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchedOrder(_Parting):
    """Looks like an ``Order``, but a step's micro-batches belong to workers: the first so many to worker 0, and so on.

    Every worker has the same number of micro-batches: its share of ``global_batch`` rounded down, but at least one. So
    a step has at most ``global_batch`` samples, or one micro-batch for each worker if that is more.

    The fields are what a run's label shows. Neither the samples' labels nor the number of workers are among them: the
    one may be long, and the other changes.

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
        self.samples(0, 0)  # what the partition cannot do for so many workers, it says now

    def for_workers(self, workers: int) -> BatchedOrder:
        """The same for another number of workers."""
        return BatchedOrder(
            partition=self.partition,
            workers=workers,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            seed=self.seed,
        )

    @property
    def per_worker(self) -> int:
        """How many micro-batches of a step belong to each worker."""
        return max(1, self.global_batch // self.workers // self.micro_batch)

    @property
    def steps_per_epoch(self) -> int:
        """As with an ``Order``, so that epochs are no other when workers come or go."""
        return -(-self.size // self.global_batch)

    def batch_size(self, step: int) -> int:
        """How many samples a step has."""
        return self.micro_batches(step) * self.micro_batch

    def micro_batches(self, step: int) -> int:
        """How many micro-batches a step has."""
        return self.workers * self.per_worker

    def samples(self, step: int, index: int) -> list[int]:
        """The samples of a micro-batch."""
        worker, index = divmod(index, self.per_worker)
        return self._batch(step, worker)[index * self.micro_batch : (index + 1) * self.micro_batch]

    def number(self, step: int, index: int) -> int:
        """What random numbers of a micro-batch depend on."""
        return index

    def _read(self, step: int, worker: int) -> list[int]:
        batch = self.per_worker * self.micro_batch
        samples = self.partition.samples(step, worker, workers=self.workers, batch=batch)
        if len(samples) != batch:
            raise UsageError(f"{self.parts} gave {len(samples)} samples, not {batch}", hint="every batch must be whole")
        return samples
