"""``Data``: a user's settings of which samples a run reads, in which order, on which worker."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.utils.data import default_collate

from holdfast.checks import by_name, function, to_whole, truth
from holdfast.data.feed import Feed, MapFeed
from holdfast.data.fetch import Collate, Dataset, is_map_style, refuse_loader
from holdfast.data.lanes import StreamOrder
from holdfast.data.loaded_feed import LoadedFeed
from holdfast.data.order import BatchedOrder, Batches, Order
from holdfast.data.partition import Partition
from holdfast.data.stream import Stream
from holdfast.data.stream_feed import StreamFeed
from holdfast.errors import UsageError

MOST_AHEAD = 10_000  # micro-batches: each is an open file of the worker, and each loader a process


@by_name
@dataclass(frozen=True, eq=False)
class Data:
    """Settings of which samples a run reads, in which order, on which worker.

    - ``dataset``: a map-style data set, where ``dataset[i]`` is a sample; or a ``Stream``, or an ``IterableDataset``.
    - ``collate``: a function of a list of samples that makes one batch of them.
    - ``shuffle``: whether each epoch has an order of its own, drawn from the run's seed. False: the data set's order.
      A stream has a setting of its own.
    - ``partition``: which samples each worker reads where replicas take steps of their own (``sync=`` a policy),
      such as ``holdfast.data.partition.SelDP(size=len(dataset))``. None: workers share one batch.
    - ``num_workers``: processes of each worker that read and collate ahead of time. They change no bit. 0: batches are
      read when they are needed.
    - ``prefetch``: micro-batches that are ahead, for each of these processes.
    - ``pin_memory``: whether batches are put into pinned memory, which GPUs copy faster from. Without CUDA it does
      nothing.

    Raises ``UsageError`` if the data set is none of these (a ``DataLoader``, say), or if the partition is one of
    another number of samples.

    >>> Data([(1.0, 2.0), (3.0, 4.0)], shuffle=False).order(global_batch=2, micro_batch=1, seed=0).samples(0, 1)
    [1]
    """

    dataset: Dataset | Stream = field(repr=False)
    _: KW_ONLY
    collate: Collate = default_collate
    shuffle: bool = True
    partition: Partition | None = None
    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False

    def __post_init__(self) -> None:
        data: Any = self.dataset
        refuse_loader(data)
        if Stream.is_meant(data):
            object.__setattr__(self, "dataset", Stream.of(data))
        elif not is_map_style(data):
            raise UsageError(
                "data must be map-style, len(data) and data[i], or a stream",
                hint="a function that opens shards is given as holdfast.Stream(open_shard, shards=[…])",
            )
        function("collate", self.collate, hint="leave it out, or a function of a list of samples")
        if not isinstance(self.shuffle, bool):
            raise UsageError(f"shuffle={self.shuffle!r} is neither True nor False", hint="a seed is given to the Run")
        self._check_loaders()
        if self.stream is not None and self.num_workers:
            raise UsageError(
                "loader processes read numbered samples, and a stream has none", hint="leave num_workers out"
            )
        if self.partition is None:
            return
        if self.stream is not None:
            raise UsageError("a partition is one of numbered samples, and a stream has none", hint="leave it out")
        if not hasattr(self.partition, "size") or not hasattr(self.partition, "samples"):
            raise UsageError(f"partition={self.partition!r} is no partition", hint="as in SelDP(size=len(data))")
        if self.partition.size != len(data):
            raise UsageError(
                f"the partition is of {self.partition.size} samples, and the data set has {len(data)}",
                hint="make it with size=len(data)",
            )

    def _check_loaders(self) -> None:
        for name, least in {"num_workers": 0, "prefetch": 1}.items():
            object.__setattr__(self, name, to_whole(name, getattr(self, name), least=least))
        if self.num_workers * self.prefetch > MOST_AHEAD:
            raise UsageError(
                f"num_workers={self.num_workers} and prefetch={self.prefetch} are too many: "
                f"{self.num_workers * self.prefetch:,} micro-batches would be read ahead",
                hint=f"at most {MOST_AHEAD:,}; a few for each process are enough",
            )
        truth("pin_memory", self.pin_memory)

    @classmethod
    def of(cls, given: Any) -> Data:
        """Return the settings that a user means by ``data=given``: a data set alone, or all of them."""
        return given if isinstance(given, Data) else cls(given)

    @property
    def stream(self) -> Stream | None:
        """The stream; None: the data set is map-style."""
        return self.dataset if isinstance(self.dataset, Stream) else None

    def order(self, *, global_batch: int, micro_batch: int, seed: int) -> Order | StreamOrder:
        """Return the order of the whole run. ``global_batch`` and ``micro_batch`` are in samples."""
        if isinstance(self.dataset, Stream):
            stream, given = self.dataset, {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
            return StreamOrder(shards=stream.count, epochs=stream.epochs, shuffle=stream.shuffle, **given)
        size = len(self.dataset)
        return Order(size=size, global_batch=global_batch, micro_batch=micro_batch, seed=seed, shuffle=self.shuffle)

    def feed(self, order: Order | StreamOrder) -> Feed:
        """Return the feed of a run's engine. With ``num_workers`` this forks a process that will fork the loaders."""
        if isinstance(self.dataset, Stream):
            assert isinstance(order, StreamOrder)
            return StreamFeed(self.dataset, order=order, collate=self.collate, pin=self.pin_memory)
        assert isinstance(order, Order)
        batches = self.batches(order)
        if self.num_workers == 0:
            return MapFeed(self.dataset, order=batches, collate=self.collate, pin=self.pin_memory)
        return LoadedFeed(
            self.dataset,
            order=batches,
            collate=self.collate,
            loaders=self.num_workers,
            prefetch=self.prefetch,
            pin=self.pin_memory,
        )

    def batches(self, order: Order) -> Batches:
        """Return the samples of each micro-batch: one order for all workers, or each worker's own part."""
        if self.partition is None:
            return order
        return BatchedOrder(
            partition=self.partition, global_batch=order.global_batch, micro_batch=order.micro_batch, seed=order.seed
        )
