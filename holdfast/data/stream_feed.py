"""The feed of a stream: reads the lanes of this worker, and agrees with the others on where they end.

The positions of all lanes are committed with each step. With ``epochs=``, so are the sizes of the next step's
micro-batches, for which a worker reads one step ahead: so all know how large a step is before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from holdfast.data.feed import Exchange, Feed, Ranks
from holdfast.data.fetch import Collate
from holdfast.data.lanes import End, Position, Span, StreamOrder, Taken
from holdfast.data.stream import Stream
from holdfast.data.window import Window
from holdfast.errors import UsageError

State = Mapping[str, Any]


class StreamFeed(Feed):
    """The feed of a ``Stream``. Its state is a dict of JSON values.

    - "step": the step that comes next; "cut": how the stream is cut into lanes, to compare.
    - "lanes": of each lane the position (epoch, place of the shard, samples taken, state), and the sizes of its
      micro-batches in the next step (None: all are full).
    - "record": what the last step has used, for the ledger.
    """

    order: StreamOrder

    def __init__(
        self, stream: Stream, *, order: StreamOrder, collate: Collate = default_collate, pin: bool = False
    ) -> None:
        super().__init__(order=order, collate=collate, pin=pin)
        self.stream = stream
        self._state: State | None = None  # as it was committed last; None: nothing was
        self._next: State | None = None  # as the present attempt would leave it
        self._step = 0  # of the present attempt
        self._share: Sequence[int] = ()
        self._reads: list[int] = []  # slots that were read in the present attempt
        self._windows: dict[int, Window] = {}
        self._empty: list[End] = []  # shards of lanes that have no samples at all: no step will tell of them

    # --- a step ----------------------------------------------------------------------------------

    def prepare(self, step: int, ranks: Ranks) -> None:
        """Find out how many samples each micro-batch of a step has, with all workers. May raise ``Broken``.

        Raises ``UsageError`` if a stream that ends has no samples at all.
        """
        self._step = step
        if self.order.epochs is None:
            return
        if self._state is not None:
            self.order.set_sizes([size for lane in self._state["lanes"] for size in lane[4]])
            return
        mine = {lane: self._first_of(lane, step) for lane in range(ranks.rank, self.order.lanes, ranks.size)}
        said = [json.loads(text) for text in ranks.exchange(json.dumps(mine).encode())]
        found = {int(lane): first for each in said for lane, first in each.items()}
        sizes = [size for lane in range(self.order.lanes) for size in found[lane][0]]
        if not any(sizes):
            raise UsageError("the stream has no samples", hint=f"its shards are empty: {self.stream.name(0)} …")
        self.order.set_sizes(sizes)
        self._empty = [end for lane in range(self.order.lanes) for end in found[lane][1]]

    def _first_of(self, lane: int, step: int) -> tuple[list[int], list[End]]:
        """Return the samples of each slot of a lane at the first step; and its shards, if none has any sample."""
        first = self._window(lane).all_taken(step=step)
        sizes = [taken.size for taken in first]
        return sizes, [] if any(sizes) else [end for taken in first for end in taken.ends]

    def begin(self, step: int, indices: Sequence[int]) -> None:
        """Hear which micro-batches this worker computes. The shards of other lanes are closed."""
        self._step, self._share = step, [self.order.number(step, index) for index in indices]
        wanted = {self.order.lane_of(slot) for slot in self._share}
        for lane in self._windows.keys() - wanted:
            self._windows.pop(lane).close()

    def read(self, step: int, index: int) -> Any:
        self._step = step
        slot = self.order.number(step, index)
        lane = self.order.lane_of(slot)
        self._reads.append(slot)
        try:
            return self.pinned(self._window(lane).batch(slot, self.collate))
        except Exception:
            self._windows.pop(lane).close()  # a generator that has raised would seem to be at its end
            raise

    def _window(self, lane: int) -> Window:
        """Return the window of a lane, at the present step."""
        window = self._windows.get(lane)
        if window is not None and window.step == self._step - 1:
            window.advance(self._position(lane))
        if window is None or window.step != self._step:
            if window is not None:
                window.close()
            position = self._position(lane)
            window = Window(self.stream, self.order, lane, step=self._step, position=position)
            self._windows[lane] = window
        return window

    def _position(self, lane: int) -> Position:
        """Return the committed position of a lane."""
        return Position() if self._state is None else Position(*self._state["lanes"][lane][:4])

    # --- the agreement ---------------------------------------------------------------------------

    def agree(self, exchange: Exchange) -> None:
        mine = {
            "share": list(self._share),
            "reads": [[slot, self._taken(slot).spans] for slot in self._reads],
            "lanes": {lane: self._ending(lane) for lane in self._lanes_that_end_here()},
        }
        said = [json.loads(text) for text in exchange(json.dumps(mine).encode())]
        lanes: list[Any] = [None] * self.order.lanes
        ends: list[Any] = [] if self._state is not None else [*self._empty]
        for lane, (told, found) in [(int(key), one) for each in said for key, one in each["lanes"].items()]:
            if lanes[lane] is None:
                lanes[lane] = told
                ends += found
            elif lanes[lane][:3] != told[:3]:  # the first and the last stage of a pipeline both read
                raise UsageError(
                    f"workers read {self.stream.name(lane)} differently: {lanes[lane][:3]}, {told[:3]}",
                    hint="a shard must give the same samples wherever it is opened",
                )
        idle = [lane for lane in range(self.order.lanes) if lanes[lane] is None]
        for lane in idle:  # a lane that is over
            lanes[lane] = [*self._position(lane), [0] * len(self.order.slots_of(lane))]
        record = self._record(said, lanes, idle, ends)
        self._next = {"cut": _cut(self.order), "step": self._step + 1, "lanes": lanes, "record": record}

    def _taken(self, slot: int) -> Taken:
        return self._window(self.order.lane_of(slot)).taken(slot, step=self._step)

    def _lanes_that_end_here(self) -> list[int]:
        """Return the lanes whose last micro-batch of the step is one of this worker's."""
        sizes, mine = self.order.sizes, set(self._share)
        lanes = {self.order.lane_of(slot) for slot in self._share}
        filled = {lane: [s for s in self.order.slots_of(lane) if sizes is None or sizes[s]] for lane in lanes}
        return sorted(lane for lane, slots in filled.items() if slots[-1] in mine)

    def _ending(self, lane: int) -> tuple[list[Any], list[End]]:
        """Return where a lane is after this step, with the sizes of the next, and which shards have ended."""
        window, sizes = self._window(lane), None
        position = window.end(step=self._step)
        ends = [end for taken in window.all_taken(step=self._step) for end in taken.ends]
        if self.order.epochs is not None:
            ahead = window.all_taken(step=self._step + 1)
            sizes = [taken.size for taken in ahead]
            if not any(sizes):  # no later step will tell of these
                ends += [end for taken in ahead for end in taken.ends]
        return [*position, sizes], ends

    def _record(self, said: list[Any], lanes: list[Any], idle: list[int], ends: list[Any]) -> dict[str, Any]:
        """Return what the step has used, as the ledger keeps it.

        Stages of one pipeline read the same micro-batches: the first of them counts.
        """
        readers = {tuple(each["share"]): each["reads"] for each in reversed(said)}
        used = [read for reads in readers.values() for read in reads]
        moved = [lane for lane in range(self.order.lanes) if lane not in idle]
        shards = {lane: self.order.shards_of(lane, epoch=lanes[lane][0]) for lane in moved}
        return {
            "step": self._step,
            "epoch": min((self._position(lane).epoch for lane in moved), default=0),
            "samples": self.order.batch_size(self._step),
            "used": sorted(used),
            "ends": ends,
            "to": [[lane, lanes[lane][0], shards[lane][lanes[lane][1]], lanes[lane][2]] for lane in moved],
        }

    def keep(self) -> None:
        if self._next is not None:
            self._state, self._next = self._next, None

    def drop(self) -> None:
        self._next, self._share, self._reads = None, (), []
        self.order.set_sizes(None)

    # --- what the run asks -----------------------------------------------------------------------

    def state(self) -> State | None:
        return self._state

    def set_state(self, value: State | None) -> None:
        """Take over the committed positions. Raises ``UsageError`` if they are of a stream that was cut differently."""
        if value is self._state:
            return
        now = _cut(self.order)
        if value is not None and value["cut"] != now:
            before = value["cut"]
            changed = [f"{key} {before.get(key)}, now {now.get(key)}" for key in now if before.get(key) != now[key]]
            raise UsageError(
                f"the positions of the stream are of another cut into lanes: {', '.join(changed) or before}",
                hint="resume with the same shards, global_batch, micro_batch, epochs and shuffle",
            )
        self._state = value
        for lane in list(self._windows):
            self._windows.pop(lane).close()

    @property
    def facts(self) -> dict[str, Any]:
        return {"shards": [self.stream.name(shard) for shard in range(self.stream.count)], "lanes": self.order.lanes}

    @property
    def ends(self) -> bool:
        return self.order.epochs is not None

    def is_over(self, value: State | None) -> bool:
        """Return whether a stream with this state has come to its end."""
        if self.order.epochs is None or value is None:
            return False
        return not any(size for lane in value["lanes"] for size in lane[4])

    def epoch(self, step: int, value: State | None) -> int:
        """Return the epoch of the last committed step: that of the lane which is furthest behind."""
        return 0 if value is None else int(value["record"]["epoch"])

    def used(self, step: int, index: int) -> list[Any]:
        """Return the spans of a micro-batch."""
        return [list(span) for span in self._taken(self.order.number(step, index)).spans]

    def named(self, step: int, index: int) -> str:
        """Return the samples of a micro-batch in words, such as "a.txt samples 40..47"."""
        spans: list[Span] = self._taken(self.order.number(step, index)).spans
        return ", ".join(f"{self.stream.name(span.shard)} samples {span.first}..{span.stop - 1}" for span in spans)


def _cut(order: StreamOrder) -> dict[str, Any]:
    """Return how a stream is cut into lanes: positions are of use as long as this stays the same."""
    cut = {"shards": order.shards, "lanes": order.lanes, "shuffle": order.shuffle, "epochs": order.epochs}
    if order.epochs is not None:  # the sizes of the next micro-batches are kept, too
        cut |= {"micro-batches": order.slots, "samples of each": order.micro_batch}
    return cut
