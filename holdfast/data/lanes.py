"""Lanes: the logical readers of a stream. Their number depends on the batch and the shards, never on the workers.

A lane reads its shards one after the other. Each micro-batch of a step takes its samples from one lane, so a worker
opens only the shards of the lanes whose micro-batches it computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.data.cursor import Cursor
from holdfast.data.shuffle import shuffled
from holdfast.data.stream import Stream
from holdfast.errors import UsageError
from holdfast.rng import seed_of

FOREVER = 2**62  # steps of an epoch, where steps do not tell epochs


class Span(NamedTuple):
    """Consecutive samples of a shard, from ``first`` to before ``stop``, in one pass over the data."""

    epoch: int
    shard: int
    first: int
    stop: int


class End(NamedTuple):
    """The end of a shard in one pass over the data: it has had so many samples."""

    epoch: int
    shard: int
    samples: int


class Position(NamedTuple):
    """A place in a lane: behind ``taken`` samples of its shard number ``place`` in this epoch."""

    epoch: int = 0
    place: int = 0
    taken: int = 0
    state: Any = None  # of the shard, if it has one

    @property
    def where(self) -> tuple[int, int, int]:
        """The position without the state."""
        return self[:3]


class _Sizes:
    """Attribute of ``StreamOrder`` that is no field: ``asdict`` must not show it."""

    sizes: list[int] | None  # samples of each micro-batch of the current step; None: all are full


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamOrder(_Sizes):
    """The micro-batches of a run that reads a stream. The dataclass's fields are what a run's label shows.

    A step has ``slots`` micro-batches when all are full. Near the end of a stream some have fewer samples, and those
    that would have none are left out; the feed knows that before the step begins, and sets ``sizes``.

    >>> order = StreamOrder(shards=3, global_batch=8, micro_batch=2, seed=0)
    >>> order.lanes, [order.lane_of(slot) for slot in range(order.slots)], order.shards_of(0, epoch=0)
    (3, [0, 0, 1, 2], [0])
    """

    shards: int
    global_batch: int
    micro_batch: int
    seed: int
    epochs: int | None = None
    shuffle: bool = False
    size: int = field(default=0, init=False)  # samples of a stream are not known

    def __post_init__(self) -> None:
        self.set_sizes(None)

    def set_sizes(self, sizes: Sequence[int] | None) -> None:
        """Set the samples of each slot of the current step. None: all are full."""
        object.__setattr__(self, "sizes", None if sizes is None else list(sizes))

    @property
    def slots(self) -> int:
        """The number of micro-batches of a full step."""
        return self.global_batch // self.micro_batch

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return min(self.slots, self.shards)

    @property
    def steps_per_epoch(self) -> int:
        return FOREVER

    def lane_of(self, slot: int) -> int:
        """Return the lane of a slot. The slots of a lane are consecutive, as the micro-batches of a worker are."""
        return slot * self.lanes // self.slots

    def slots_of(self, lane: int) -> range:
        """Return the slots of a lane.

        >>> [len(StreamOrder(shards=3, global_batch=8, micro_batch=1, seed=0).slots_of(lane)) for lane in range(3)]
        [3, 3, 2]
        """
        return range(-(-lane * self.slots // self.lanes), -(-(lane + 1) * self.slots // self.lanes))

    def shards_of(self, lane: int, *, epoch: int) -> list[int]:
        """Return the shards of a lane in the order of an epoch. They are always the same ones."""
        mine = range(lane, self.shards, self.lanes)
        if not self.shuffle:
            return list(mine)
        key = seed_of(self.seed, "shards", lane, epoch)
        return [mine[place] for place in shuffled(range(len(mine)), len(mine), key=key)]

    # --- what an engine asks ---------------------------------------------------------------------

    def _filled(self) -> list[int]:
        """Return the slots that have samples in the current step."""
        return [slot for slot in range(self.slots) if self.sizes is None or self.sizes[slot]]

    def batch_size(self, step: int) -> int:
        """Return the number of samples of the current step."""
        return self.global_batch if self.sizes is None else sum(self.sizes)

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of the current step."""
        return len(self._filled())

    def samples(self, step: int, index: int) -> list[int]:
        """Return the places of a micro-batch's samples in the step."""
        slot = self.number(step, index)
        if self.sizes is None:
            return list(range(slot * self.micro_batch, (slot + 1) * self.micro_batch))
        first = sum(self.sizes[:slot])
        return list(range(first, first + self.sizes[slot]))

    def number(self, step: int, index: int) -> int:
        """The micro-batch's number in a full step."""
        return self._filled()[index]


@dataclass(kw_only=True)
class Taken:
    """The samples that one slot has taken from its lane."""

    spans: list[Span] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)  # of shards that were found to be over
    samples: list[Any] | None = field(default_factory=list)  # None: they are in the batch
    batch: Any = None

    @property
    def size(self) -> int:
        return sum(span.stop - span.first for span in self.spans)


class LaneReader:
    """Reads the samples of a lane, from a position on.

    >>> stream = Stream(lambda shard: iter(shard), shards=["ab", "", "cd"], epochs=1)
    >>> order = StreamOrder(shards=3, global_batch=3, micro_batch=3, seed=0, epochs=1)
    >>> reader = LaneReader(stream, order, 0, Position())
    >>> reader.take(3).samples, reader.position().where, reader.take(3).samples, reader.take(3).samples
    (['a', 'b', 'c'], (0, 2, 1), ['d'], [])
    """

    def __init__(self, stream: Stream, order: StreamOrder, lane: int, position: Position) -> None:
        self._stream, self._order, self._lane = stream, order, lane
        self._epoch, self._place, self._start = position.epoch, position.place, position
        self._shards = order.shards_of(lane, epoch=position.epoch)
        self._cursor: Cursor | None = None
        self._has_samples = position.where != (position.epoch, 0, 0)  # whether the present epoch has had any

    def take(self, count: int) -> Taken:
        """Return the next ``count`` samples, fewer only if the stream ends. Raises what the user's shards raise.

        After an error the reader is of no use: a generator that has raised would seem to be at its end.
        """
        taken = Taken()
        assert taken.samples is not None
        while len(taken.samples) < count and not self.is_over:
            epoch, shard = self._epoch, self._shards[self._place]
            cursor = self._open()
            first = cursor.taken
            with cursor.drawing():
                taken.samples += itertools.islice(cursor, count - len(taken.samples))
            if len(taken.samples) < count:
                taken.ends.append(End(epoch, shard, cursor.taken))
                self._has_samples = self._has_samples or cursor.taken > 0
                self._go_on()
            if cursor.taken > first:
                taken.spans.append(Span(epoch, shard, first, cursor.taken))
        return taken

    def open(self) -> None:
        """Open the shard that comes next: samples that were taken before are skipped now, not when others are read."""
        if not self.is_over:
            self._open()

    @property
    def is_over(self) -> bool:
        """Whether all passes are over."""
        return self._order.epochs is not None and self._epoch >= self._order.epochs

    def _open(self) -> Cursor:
        if self._cursor is None:
            start, self._start = self._start, Position()
            here: dict[str, Any] = {"taken": start.taken, "state": start.state}
            here |= {"epoch": self._epoch, "seed": self._order.seed}
            self._cursor = Cursor(self._stream, self._shards[self._place], **here)
        return self._cursor

    def _go_on(self) -> None:
        """Go on to the next shard, or to the next epoch. Raises ``UsageError`` if a whole epoch had no samples."""
        self.close()
        self._place += 1
        if self._place < len(self._shards):
            return
        if not self._has_samples and self._order.epochs is None:
            names = ", ".join(self._stream.name(shard) for shard in self._shards)
            raise UsageError(f"there are no samples in {names}", hint="leave empty shards out, or epochs=1")
        self._epoch, self._place, self._has_samples = self._epoch + 1, 0, False
        self._shards = self._order.shards_of(self._lane, epoch=self._epoch)

    def position(self) -> Position:
        """Return the present position."""
        if self._cursor is None:
            return Position(self._epoch, self._place, self._start.taken, self._start.state)
        return Position(self._epoch, self._place, self._cursor.taken, self._cursor.state())

    def close(self) -> None:
        """Close the open shard."""
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            cursor.close()
