"""One replica's part of each step's batch, as an order of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.data.order import Batches


@dataclass(frozen=True, kw_only=True)
class Share:
    """The micro-batches of one replica, counted from 0.

    ``part`` tells which of a step's micro-batches are its own, from their number. A replica that would get none
    computes another's again: it has to keep up with the others.

    >>> from holdfast.data.order import Order
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
