"""Windows: what a worker has read of one lane, beginning where the run is.

Samples stay in a window until their step is committed. So a step that is dropped is not read again, and a worker that
computes only the last micro-batches of a lane can read those before it, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from holdfast.data.lanes import LaneReader, Position, StreamOrder, Taken
from holdfast.data.stream import Stream
from holdfast.errors import UsageError
from holdfast.rng import seed_everything, seed_of

CPU = torch.device("cpu")


class Window:
    """The samples of a lane that were read from ``position`` on, which is where ``step`` begins."""

    def __init__(self, stream: Stream, order: StreamOrder, lane: int, *, step: int, position: Position) -> None:
        self.step = step
        self._order, self._lane, self._name = order, lane, stream.name(lane)
        self._slots = order.slots_of(lane)
        self._reader = LaneReader(stream, order, lane, position)
        self._taken: list[Taken] = []  # of the slots of this step, and of the next
        self._positions: dict[int, Position] = {}  # by step: where its samples end

    def taken(self, slot: int, *, step: int) -> Taken:
        """Return what a slot of this step, or of the next, takes from the lane. Reads what comes before it, too."""
        wanted = (step - self.step) * len(self._slots) + slot - self._slots.start
        while len(self._taken) <= wanted:
            ahead, place = divmod(len(self._taken), len(self._slots))
            # The numbers that are drawn depend on the shard, or on the micro-batch that a sample is for: not on when it
            # is read, nor by whom.
            self._reader.open()
            self._seed(self.step + ahead, self._slots[place], "data")
            self._taken.append(self._reader.take(self._order.micro_batch))
            if place == len(self._slots) - 1:
                self._positions[self.step + ahead] = self._reader.position()
        return self._taken[wanted]

    def all_taken(self, *, step: int) -> list[Taken]:
        """Return what all slots of this step, or of the next, take."""
        return [self.taken(slot, step=step) for slot in self._slots]

    def end(self, *, step: int) -> Position:
        """Return the position at the end of a step."""
        self.all_taken(step=step)
        return self._positions[step]

    def batch(self, slot: int, collate: Callable[[list[Any]], Any]) -> Any:
        """Return the batch of a slot of this step. The window keeps a copy: the user's code may write into it."""
        taken = self.taken(slot, step=self.step)
        if taken.samples is not None:
            self._seed(self.step, slot, "collate")
            batch, taken.samples = collate(taken.samples), None
            taken.batch = copied(batch)
        else:
            batch = copied(taken.batch)
        self._seed(self.step, slot, "read")
        return batch

    def advance(self, position: Position) -> None:
        """Go on to the next step, which begins at ``position``: the samples of this one are used.

        Raises ``UsageError`` if another worker has come to another position with the same samples.
        """
        found = self.end(step=self.step)
        if found.where != position.where:
            raise UsageError(
                f"workers read {self._name} differently: one is at {found.where}, another at {position.where}",
                hint="a shard must give the same samples wherever and whenever it is opened",
            )
        del self._taken[: len(self._slots)], self._positions[self.step]
        self.step += 1

    def close(self) -> None:
        """Close the open shard."""
        self._reader.close()

    def _seed(self, step: int, slot: int, what: str) -> None:
        seed_everything(seed_of(self._order.seed, step, slot, what), CPU)


def copied(value: Any) -> Any:
    """Return a batch with its tensors copied, and all else too where Python can.

    >>> batch = {"x": [torch.ones(1)]}
    >>> copied(batch)["x"][0].add_(1), batch
    (tensor([2.]), {'x': [tensor([1.])]})
    """
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    try:
        return copy.deepcopy(value)
    except Exception:  # an odd object of the user's: it is given out again as it is
        return value
