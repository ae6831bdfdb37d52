"""``Data``: a user's settings of which samples a run reads, in which order, on which worker."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.data.fetch import Dataset
from holdfast.data.order import BatchedOrder, Batches, Order
from holdfast.data.partition import Partition
from holdfast.errors import UsageError


@dataclass(frozen=True, eq=False)
class Data:
    """Settings of which samples a run reads, in which order, on which worker.

    - ``dataset``: a map-style data set, where ``dataset[i]`` is ``(input, target)``.
    - ``shuffle``: whether each epoch has an order of its own, drawn from the run's seed. False: the data set's order.
    - ``partition``: which samples each worker reads where replicas take steps of their own (``sync=`` a policy),
      such as ``holdfast.data.partition.SelDP(size=len(dataset))``. None: workers share one batch.

    Raises ``UsageError`` if the data set is a stream, or if the partition is one of another number of samples.

    >>> Data([(1.0, 2.0), (3.0, 4.0)], shuffle=False).order(global_batch=2, micro_batch=1, seed=0).samples(0, 1)
    [1]
    """

    dataset: Dataset = field(repr=False)
    _: KW_ONLY
    shuffle: bool = True
    partition: Partition | None = None

    def __post_init__(self) -> None:
        data: Any = self.dataset
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UsageError(
                "data must be map-style: len(data) and data[i]", hint="a stream has no order that can be repeated"
            )
        if not isinstance(self.shuffle, bool):
            raise UsageError(f"shuffle={self.shuffle!r} is neither True nor False", hint="a seed is given to the Run")
        if self.partition is None:
            return
        if not hasattr(self.partition, "size") or not hasattr(self.partition, "samples"):
            raise UsageError(f"partition={self.partition!r} is no partition", hint="as in SelDP(size=len(data))")
        if self.partition.size != len(data):
            raise UsageError(
                f"the partition is of {self.partition.size} samples, and the data set has {len(data)}",
                hint="make it with size=len(data)",
            )

    @classmethod
    def of(cls, given: Any) -> Data:
        """Return the settings that a user means by ``data=given``: a data set alone, or all of them."""
        return given if isinstance(given, Data) else cls(given)

    def order(self, *, global_batch: int, micro_batch: int, seed: int) -> Order:
        """Return the order of the whole run. ``global_batch`` and ``micro_batch`` are in samples."""
        size = len(self.dataset)
        return Order(size=size, global_batch=global_batch, micro_batch=micro_batch, seed=seed, shuffle=self.shuffle)

    def batches(self, order: Order) -> Batches:
        """Return the samples of each micro-batch: one order for all workers, or each worker's own part."""
        if self.partition is None:
            return order
        return BatchedOrder(
            partition=self.partition, global_batch=order.global_batch, micro_batch=order.micro_batch, seed=order.seed
        )
