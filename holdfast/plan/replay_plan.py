"""Plan of a replay: which layers and steps have to be computed again after a loss, and from whose records.

Lost layers are loaded from a checkpoint and brought to the present step with the records of their neighbours. Where a
record is lost too, or none was kept, the neighbour is computed again as well, until the inputs and gradients at both
ends of each span of layers are known for every step and micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.plan.log_records import Direction, HeldRecords, Key


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A replay of the steps [first, stop) of some layers, from the checkpoint of step ``first``."""

    first: int
    stop: int
    spans: tuple[range, ...]  # the layers, in order; neighbours are one span
    reason: str

    @property
    def layers(self) -> set[int]:
        """All layers that are computed again."""
        return {layer for span in self.spans for layer in span}


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """The answer instead of a replay when the log does not help, with the reason."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Situation:
    """State of a run after a loss, as all workers know it.

    ``lost`` are the layers that no worker holds; ``step`` is the number of committed steps; ``checkpoints`` are the
    steps of the checkpoints that exist; ``micro_batches(step)`` is a step's number of them; ``holdings`` are the
    records of each rank; ``ties`` are the layers that use each shared weight.
    """

    layers: int
    lost: Collection[int]
    step: int
    checkpoints: Sequence[int]
    micro_batches: Callable[[int], int]
    holdings: Sequence[Sequence[HeldRecords]]
    ties: Sequence[Sequence[int]] = ()
    _whole: dict[tuple[Direction, int, int, int], bool] = field(default_factory=dict, repr=False)

    def is_whole(self, direction: Direction, boundary: int, first: int, number: int = 0) -> bool:
        """Return whether the workers together have every record at a boundary from step ``first`` on.

        For a tie, ``boundary`` is the layer of a use and ``number`` the shared weight.
        """
        place = (direction, boundary, first, number)
        if place not in self._whole:
            at_place = [h for each in self.holdings for h in each if (h.direction, h.boundary) == place[:2]]
            wanted = range(number, number + 1)
            self._whole[place] = all(
                _cover(
                    [span for held in at_place if held.first <= step < held.stop for span in held.micro_batches],
                    wanted if direction is Direction.TIE else range(self.micro_batches(step)),
                )
                for step in range(first, self.step)
            )
        return self._whole[place]


def _cover(spans: Sequence[tuple[int, int]], wanted: range) -> bool:
    """Return whether the ranges [a, b) together contain all of ``wanted``.

    >>> _cover([(4, 8), (0, 5)], range(8)), _cover([(0, 3), (4, 8)], range(8))
    (True, False)
    """
    reached = wanted.start
    for start, stop in sorted(spans):
        if start > reached:
            break
        reached = max(reached, stop)
    return reached >= wanted.stop


def plan_replay(situation: Situation) -> Replay | Impossible:
    """Return the replay of the fewest layers, from the newest checkpoint for which one is possible.

    A replay of all layers is not better than a plain restart from the checkpoint: then, or without a checkpoint, the
    answer is Impossible.

    >>> kept = [HeldRecords(direction=Direction.FORWARD, boundary=2, first=4, stop=6, micro_batches=((0, 8),)),
    ...         HeldRecords(direction=Direction.BACKWARD, boundary=4, first=4, stop=6, micro_batches=((0, 8),))]
    >>> found = plan_replay(Situation(layers=6, lost=[2, 3], step=6, checkpoints=[0, 4], micro_batches=lambda step: 8,
    ...                               holdings=[kept[:1], kept[1:]]))
    >>> found.spans, found.reason
    ((range(2, 4),), 'layers 2 to 3 are computed again: steps 4 to 5')
    """
    checkpoints = [step for step in sorted(situation.checkpoints, reverse=True) if step <= situation.step]
    if not checkpoints:
        return Impossible(reason="there is no checkpoint to begin from")
    tried = []
    for first in checkpoints:
        layers = _closed(situation, first)
        if len(layers) < situation.layers or first == situation.step:
            spans = _spans(layers)
            return Replay(first=first, stop=situation.step, spans=spans, reason=_reason(spans, first, situation.step))
        tried.append(first)
    return Impossible(reason=f"since the checkpoint of step {tried[0]} too few records are left to spare any layer")


def _closed(situation: Situation, first: int) -> set[int]:
    """Return the lost layers, and those needed to compute their inputs and gradients since step ``first``."""
    layers = set(situation.lost)
    while True:
        known = len(layers)
        for span in _spans(layers):
            start, stop = span.start, span.stop
            while start > 0 and not situation.is_whole(Direction.FORWARD, start, first):
                start -= 1
            while stop < situation.layers and not situation.is_whole(Direction.BACKWARD, stop, first):
                stop += 1
            layers |= set(range(start, stop))
        for number, uses in enumerate(situation.ties):
            if layers & set(uses):
                layers |= {use for use in uses if not situation.is_whole(Direction.TIE, use, first, number)}
        if len(layers) == known:
            return layers


def _spans(layers: Collection[int]) -> tuple[range, ...]:
    """Return the layers as ranges of consecutive ones.

    >>> _spans([1, 2, 5])
    (range(1, 3), range(5, 6))
    """
    ordered = sorted(layers)
    groups = itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    runs = [[layer for _, layer in group] for _, group in groups]
    return tuple(range(run[0], run[-1] + 1) for run in runs)


def _reason(spans: Sequence[range], first: int, stop: int) -> str:
    named = " and ".join(
        f"layers {span.start} to {span.stop - 1}" if len(span) > 1 else f"layer {span.start}" for span in spans
    )
    verb = "is" if sum(map(len, spans)) == 1 else "are"
    if first == stop:
        return f"{named} {verb} as saved"
    steps = f"steps {first} to {stop - 1}" if stop - first > 1 else f"step {first}"
    return f"{named} {verb} computed again: {steps}"


def needed(replay: Replay, step: int, share: range, *, layers: int, ties: Sequence[Sequence[int]]) -> Iterator[Key]:
    """Yield the records that a worker with the micro-batches ``share`` needs for a step, in the order of use.

    ``layers`` is the number of layers of the model, ``ties`` as in Situation.

    >>> replay = Replay(first=0, stop=1, spans=(range(2, 4),), reason="")
    >>> [str(key) for key in needed(replay, 0, range(1), layers=6, ties=[])]
    ['step 0, boundary 2, micro-batch 0, forward', 'step 0, boundary 4, micro-batch 0, backward']
    """
    for index in share:
        for span in reversed(replay.spans):
            if span.start > 0:
                yield Key(step=step, boundary=span.start, micro_batch=index, direction=Direction.FORWARD)
            if span.stop < layers:
                yield Key(step=step, boundary=span.stop, micro_batch=index, direction=Direction.BACKWARD)
    inside = replay.layers
    for number, uses in enumerate(ties):
        if inside & set(uses):
            for use in uses:
                if use not in inside:
                    yield Key(step=step, boundary=use, micro_batch=number, direction=Direction.TIE)


class Sources:
    """Index of the records of all ranks."""

    def __init__(self, holdings: Sequence[Sequence[HeldRecords]]) -> None:
        self._at: dict[tuple[Direction, int], list[tuple[int, HeldRecords]]] = {}
        for rank, each in enumerate(holdings):
            for held in each:
                self._at.setdefault((held.direction, held.boundary), []).append((rank, held))

    def rank_of(self, key: Key) -> int:
        """Return the lowest rank that has the record. Raises StopIteration if none has it."""
        found = self._at.get((key.direction, key.boundary), [])
        return next(rank for rank, held in found if held.has(key))
