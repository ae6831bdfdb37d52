"""Feeds: what an engine asks for the batch of a micro-batch.

The batch of ``(step, index)`` is the same whoever reads it, and however often. A feed may read ahead, since it is told
which micro-batches this worker computes. A feed of a stream also has positions, which are committed with each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from holdfast.data.fetch import Collate, Dataset, Request, after_reading, fetch
from holdfast.data.order import Batches
from holdfast.rng import seed_of

Exchange = Callable[[bytes], list[bytes]]  # sends a text to all workers, and returns everybody's, by rank
ShareOf = Callable[[int], Sequence[int]]  # of a step: the micro-batches that this worker will compute


class Ranks(Protocol):
    """The workers that train together, as far as a feed has to know them."""

    rank: int  # this worker's, from 0 to before ``size``
    size: int

    def exchange(self, text: bytes) -> list[bytes]:
        """Send a text to all workers; return everybody's, by rank. May raise ``Broken``."""


class Feed:
    """The batches of a run. A subclass that has no positions inherits the empty methods.

    A step calls ``prepare`` and ``begin``, then ``read`` for each micro-batch of this worker, then ``agree``; and
    ``keep`` when the step is committed, or ``drop`` when it is not. ``order`` says which samples each micro-batch has.
    """

    def __init__(self, *, order: Batches, collate: Collate = default_collate, pin: bool = False) -> None:
        self.order = order
        self.collate = collate
        self._pins = pin and torch.cuda.is_available()

    def enter(self, share: ShareOf) -> None:
        """Hear of this worker's place in a new layout: ``share(step)`` are its micro-batches, until the next one."""

    def prepare(self, step: int, ranks: Ranks) -> None:
        """Find out with all workers which micro-batches a step has, so that ``order`` can tell."""

    def begin(self, step: int, indices: Sequence[int]) -> None:
        """Hear which micro-batches of a step this worker is about to read, in this order. It may read them ahead."""

    def read(self, step: int, index: int) -> Any:
        """Return the collated batch of a micro-batch, on the CPU. Raises whatever the user's data set raises."""
        raise NotImplementedError

    def agree(self, exchange: Exchange) -> None:
        """Tell all workers how far this one has read. ``exchange`` may raise ``Broken``."""

    def keep(self) -> None:
        """Make the positions of the last attempt those of the run: the step is committed."""

    def drop(self) -> None:
        """Forget the last attempt: the same micro-batches will be read again, perhaps by others."""

    def state(self) -> Any:
        """Return the committed positions as plain values, for joiners and checkpoints; None if there are none."""
        return None

    def set_state(self, value: Any) -> None:
        """Take over what ``state`` returned on another worker, or in a checkpoint."""

    @property
    def facts(self) -> dict[str, Any] | None:
        """What a ledger of the data begins with; None: data without positions need no ledger."""
        return None

    @property
    def ends(self) -> bool:
        """Whether the data come to an end by themselves."""
        return False

    def is_over(self, value: Any) -> bool:
        """Return whether the data end where ``state`` has returned ``value``: there is no further step."""
        return False

    def epoch(self, step: int, value: Any) -> int:
        """Return the pass over the data of the last committed step. ``value``: what ``state`` has returned since."""
        return step // self.order.steps_per_epoch

    def used(self, step: int, index: int) -> list[Any]:
        """Return the samples of a micro-batch, for tests that count them."""
        return self.order.samples(step, index)

    def named(self, step: int, index: int) -> str:
        """Return the samples of a micro-batch in words."""
        return f"samples {self.order.samples(step, index)}"

    @contextmanager
    def reading(self, data: Dataset, requests: Sequence[Request]) -> Iterator[Callable[[Request], Any]]:
        """Give a function that reads batches of another data set, such as one to evaluate.

        ``requests``: what it will be asked for, in this order. A feed with loaders reads them ahead.
        """
        yield lambda request: self._read_here(data, request)

    def _read_here(self, data: Dataset, request: Request) -> Any:
        """Read a batch in this process."""
        batch = fetch(data, request, self.collate)
        after_reading(request)
        return self.pinned(batch)

    def pinned(self, batch: Any) -> Any:
        """Return a batch in memory that a GPU can copy from by itself, if that is wished. Untested here."""
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]


class MapFeed(Feed):
    """The feed of a map-style data set, read when it is asked for.

    >>> from holdfast.data.order import Order
    >>> order = Order(size=4, global_batch=4, micro_batch=2, seed=0, shuffle=False)
    >>> MapFeed([1, 2, 3, 4], order=order).read(0, 1)
    tensor([3, 4])
    """

    def __init__(self, data: Dataset, *, order: Batches, collate: Collate = default_collate, pin: bool = False) -> None:
        super().__init__(order=order, collate=collate, pin=pin)
        self.data = data

    def request(self, step: int, index: int) -> Request:
        """Return what a micro-batch consists of."""
        seed = seed_of(self.order.seed, step, self.order.number(step, index), "data")
        return Request(seed=seed, samples=tuple(self.order.samples(step, index)))

    def read(self, step: int, index: int) -> Any:
        return self._read_here(self.data, self.request(step, index))
