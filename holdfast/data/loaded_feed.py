"""The feed of a map-style data set whose batches are read ahead by loader processes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from holdfast.data.feed import MapFeed, ShareOf
from holdfast.data.fetch import Collate, Dataset, Request, after_reading
from holdfast.data.order import Batches
from holdfast.data.pool import Pool


@dataclass(frozen=True, slots=True)
class _Planned:
    """A micro-batch that is about to be read."""

    step: int
    index: int
    request: Request


class LoadedFeed(MapFeed):
    """The feed of a map-style data set with loaders. It gives the bits that ``MapFeed`` gives.

    ``loaders``: processes that read. ``prefetch``: micro-batches that are ahead, for each of them. They are those of
    this step and of the next ones, as far as this worker's share is known.

    >>> from holdfast.data.order import Order
    >>> order = Order(size=4, global_batch=4, micro_batch=2, seed=0, shuffle=False)
    >>> feed = LoadedFeed([1, 2, 3, 4], order=order, loaders=1)
    >>> feed.read(0, 1)
    tensor([3, 4])
    """

    def __init__(
        self,
        data: Dataset,
        *,
        order: Batches,
        collate: Collate = default_collate,
        loaders: int,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        super().__init__(data, order=order, collate=collate, pin=pin)
        self._loaders, self._most = loaders, loaders * prefetch
        self._share: ShareOf | None = None
        self._plan: deque[_Planned] = deque()  # in the order of reading; the first ones are being read ahead
        self._planned = 0  # steps before this one are in the plan, or over
        self._pool = Pool(data, collate=collate, loaders=loaders)
        weakref.finalize(self, self._pool.close)

    def enter(self, share: ShareOf) -> None:
        self._share = share
        self._plan.clear()  # the pool keeps what turns out to be wanted still

    def begin(self, step: int, indices: Sequence[int]) -> None:
        expected = [(planned.step, planned.index) for planned in self._plan if planned.step <= step]
        if expected != [(step, index) for index in indices]:
            self._plan = deque(_Planned(step, index, self.request(step, index)) for index in indices)
            self._planned = step + 1
        self._read_ahead()

    def read(self, step: int, index: int) -> Any:
        planned = next((one for one in self._plan if (one.step, one.index) == (step, index)), None)
        request = self.request(step, index) if planned is None else planned.request
        batch = self._pool.take(request)
        if planned is not None:
            self._plan.remove(planned)
            self._read_ahead()
        after_reading(request)
        return self.pinned(batch)

    def _read_ahead(self) -> None:
        """Plan as many micro-batches as may be ahead, and have them read."""
        last = self._planned + self._most  # a worker may have no share of some steps
        while self._share is not None and len(self._plan) < self._most and self._planned < last:
            step, self._planned = self._planned, self._planned + 1
            self._plan.extend(_Planned(step, index, self.request(step, index)) for index in self._share(step))
        self._pool.want([planned.request for planned in list(self._plan)[: self._most]])

    @contextmanager
    def reading(self, data: Dataset, requests: Sequence[Request]) -> Iterator[Callable[[Request], Any]]:
        """Give a function that reads batches of another data set, with as many loaders, which end afterwards."""
        if len(requests) < 2:
            with super().reading(data, requests) as read_here:
                yield read_here
            return
        with closing(Pool(data, collate=self.collate, loaders=min(self._loaders, len(requests)))) as pool:
            ahead = deque(requests)
            pool.want(requests[: self._most])

            def read(request: Request) -> Any:
                batch = pool.take(request)
                if request in ahead:
                    ahead.remove(request)
                    pool.want(list(ahead)[: self._most])
                after_reading(request)
                return self.pinned(batch)

            yield read
