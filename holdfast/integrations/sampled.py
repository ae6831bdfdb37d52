"""Data in the order of a torch ``DataLoader``'s own sampler, as a pure function of the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader

from holdfast.data.fetch import is_map_style
from holdfast.data.order import Order
from holdfast.data.source import Data
from holdfast.errors import UsageError
from holdfast.rng import seed_of

OrderOf = Callable[[int], Sequence[int]]  # of an epoch: the numbers of its samples


def order_of(loader: DataLoader[Any], *, micro_batch: int, seed: int) -> OrderOf:
    """Return the order in which a loader's sampler reads each epoch.

    Samplers that take an epoch are told it. What others draw is drawn from ``seed`` and the epoch. Raises
    ``UsageError`` in an epoch whose batches are not all of ``micro_batch`` samples, but for the last one.
    """

    @lru_cache(maxsize=2)  # a loader reads ahead, across the end of an epoch
    def of_epoch(epoch: int) -> list[int]:
        batches: Any = loader.batch_sampler
        for sampler in (batches, getattr(batches, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, "sampler", epoch))
            found = [list(batch) for batch in batches]
        _refuse_uneven(found, micro_batch)
        return [sample for batch in found for sample in batch]

    return of_epoch


def _refuse_uneven(batches: Iterable[Sequence[int]], micro_batch: int) -> None:
    *whole, last = [len(batch) for batch in batches] or [0]
    if any(size != micro_batch for size in whole) or not 0 < last <= micro_batch:
        raise UsageError(
            "the training data loader gives batches of several sizes, or none",
            hint=f"all of per_device_train_batch_size={micro_batch}; the last one of an epoch may be smaller",
        )


class _Given:
    """What ``SampledOrder`` has beside its fields: ``asdict`` must not show it."""

    given: OrderOf


@dataclass(frozen=True, kw_only=True)
class SampledOrder(_Given, Order):
    """An order whose epochs are given by a function. ``drawn`` is a digest of the first one, for the run's label."""

    of_epoch: InitVar[OrderOf]
    drawn: str = field(init=False)

    def __post_init__(self, of_epoch: OrderOf) -> None:
        object.__setattr__(self, "given", of_epoch)
        object.__setattr__(self, "drawn", xxhash.xxh3_64_hexdigest(str(list(of_epoch(0))).encode()))

    def samples(self, step: int, index: int) -> list[int]:
        """The samples of a micro-batch."""
        order = self.given(step // self.steps_per_epoch)
        return [order[position] for position in self._positions(step, index)]


@dataclass(frozen=True, eq=False)
class SampledData(Data):
    """The data set, collate function and order of a ``DataLoader``, for a ``Loop``."""

    sampler: OrderOf | None = None

    @classmethod
    def of_loader(cls, loader: DataLoader[Any], *, micro_batch: int, seed: int, **settings: Any) -> SampledData:
        """Take over a loader. Raises ``UsageError`` for one whose data set has no numbered samples."""
        dataset: Any = loader.dataset
        if loader.batch_sampler is None or not is_map_style(dataset):
            raise UsageError(
                "the training data set has no numbered samples",
                hint="one with len(data) and data[i]; holdfast.Loop takes streams",
            )
        of_epoch = order_of(loader, micro_batch=micro_batch, seed=seed)
        return cls(dataset, collate=loader.collate_fn, shuffle=False, sampler=of_epoch, **settings)

    def order(self, *, global_batch: int, micro_batch: int, seed: int) -> Order:
        """Return the order of the whole run. ``global_batch`` and ``micro_batch`` are in samples."""
        assert self.sampler is not None
        shape = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
        return SampledOrder(size=len(self.sampler(0)), shuffle=False, of_epoch=self.sampler, **shape)

    def first(self, count: int) -> Any:
        """Return the first samples of the run, collated."""
        assert self.sampler is not None
        dataset: Any = self.dataset
        return self.collate([dataset[i] for i in self.sampler(0)[:count]])
