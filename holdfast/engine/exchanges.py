"""Exchanges: two ways in which the holders of a bucket sum its gradients, with the same bits.

- *Directly.* Each holder owns one slice of the bucket. It gets everybody's partial sums of that slice, adds them up,
  and sends the result to everybody. Two rounds, but messages to all.
- *By halves.* Holders swap halves of what they have: each keeps one half, adds the partner's partial sums of it to its
  own, and gives the other half away. So each has a smaller and smaller slice of more and more holders' sum. Then they
  swap slices the other way round, until everybody has all. Twice log2 rounds, but messages to log2 of the holders
  (``cluster.butterfly``).

An exchange is a generator. It yields transfers, and is resumed when the receives among them are done.
Partial sums are nodes of the tree (``plan.tree``): a node's value is that of its left child plus that of its right one,
whoever adds the two. So both ways, and any layout, give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast.cluster import tags
from holdfast.cluster.butterfly import Meet, meetings
from holdfast.cluster.talk import Transfer
from holdfast.engine.gradients import Bucket, Slab
from holdfast.plan.tree import Node, combine

TOTAL = tags.BUCKET_TAGS - 1  # the tag, within its bucket, of finished sums
# Holders up to which each sends to all. `python -m bench scale` (loopback, two busy cores) gave, as medians of the time
# by halves, of direct, with 16 kB, 1 MB and 8 MB: 1.27, 1.17, 1.06 with 4 holders; 0.96, 0.92, 0.94 with 8; 0.81, 1.07,
# 0.76 with 16. Single steps ranged from 0.2 to 3.1. So 4 are faster directly, 8 are alike, 16 mostly faster by halves.
# Bytes do not clearly change it, so only the number counts. Networks with more latency were not measured.
DIRECT_HOLDERS = 8

Transfers = tuple[list[Transfer], list[Transfer]]  # sends, receives
Rounds = Iterator[Transfers]
Own = Sequence[tuple[Node, Slab]]  # partial sums here
Parts = list[tuple[Node, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all holders of a bucket know before they exchange it.

    ``nodes_of(first, stop)`` gives the nodes of the tree that the holders of these places have together, as sums.
    """

    bucket: Bucket
    rank: int
    leaves: int  # of the tree
    has_gaps: bool  # some leaves may have no value: in fast mode those of ranks without micro-batches
    nodes_of: Callable[[int, int], Sequence[Node]]

    @property
    def place(self) -> int:
        """This rank's place among the holders."""
        return self.bucket.ranks.index(self.rank)

    @property
    def tag(self) -> int:
        """The first tag of this bucket."""
        return tags.BUCKETS + self.bucket.number * tags.BUCKET_TAGS

    def add(self, parts: Parts) -> Parts:
        """Add up nodes that lie beside each other, in place of the left one."""
        return combine(parts, self.leaves, torch.Tensor.add_)

    def root(self, parts: Parts) -> torch.Tensor:
        """Add up all nodes. One is left at the end; or several, from left to right, if there are gaps."""
        (_, total), *rest = self.add(parts)
        assert self.has_gaps or not rest, "the shares of a layer's holders are all micro-batches, each once"
        for _, value in rest:
            total.add_(value)
        return total


class Course:
    """The exchange of one bucket, in the way that suits the number of its holders.

    ``next`` gives the transfers of each round in turn; call it when the receives of the round before are done.
    """

    def __init__(self, plan: Plan, own: Own) -> None:
        few = len(plan.bucket.ranks) <= DIRECT_HOLDERS
        meets = meetings(plan.place, len(plan.bucket.ranks))
        self.total = own[0][1] if own else plan.bucket.take()  # where the whole sum is, when all rounds are done
        self._rounds = directly(plan, own, self.total) if few else by_halves(plan, own, self.total, meets)
        self._left = 2 if few else len(meets) + sum(meet.is_swap for meet in meets)

    @property
    def is_last(self) -> bool:
        """Whether the round that was begun is the last one."""
        return self._left == 0

    def next(self) -> Transfers:
        """Return the sends and the receives of the next round."""
        self._left -= 1
        return next(self._rounds)


def slices(size: int, owners: int) -> list[slice]:
    """Return the part of a bucket that each of its ``owners`` owns.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(size * rank // owners, size * (rank + 1) // owners) for rank in range(owners)]


def directly(plan: Plan, own: Own, total: Slab) -> Rounds:
    """Sum a bucket in two rounds: partial sums to the slices' owners, and finished slices to everybody."""
    bucket, place = plan.bucket, plan.place
    parts = slices(bucket.size, len(bucket.ranks))
    mine = parts[place]
    width = mine.stop - mine.start
    others = [(number, rank) for number, rank in enumerate(bucket.ranks) if number != place]
    filled = [(number, rank) for number, rank in others if parts[number].stop > parts[number].start]
    foreign = [(rank, k, node) for number, rank in others for k, node in enumerate(plan.nodes_of(number, number + 1))]
    room = bucket.receiving(width * len(foreign)).view(len(foreign), width)
    receives = [(rank, room[i], plan.tag + k) for i, (rank, k, _) in enumerate(foreign) if width]
    sends = [(rank, slab.flat[parts[n]], plan.tag + k) for n, rank in filled for k, (_, slab) in enumerate(own)]
    yield sends, receives
    heard = [(node, room[i]) for i, (_, _, node) in enumerate(foreign)]
    # The other slices are received into the memory that we sent our partial sums of them from. That is safe: an owner
    # can only have finished its slice after our partial sum had arrived.
    _put(plan.root([*((node, slab.flat[mine]) for node, slab in own), *heard]), total.flat[mine])
    tag = plan.tag + TOTAL
    yield (
        [(rank, total.flat[mine], tag) for _, rank in others if width],
        [(rank, total.flat[parts[number]], tag) for number, rank in filled],
    )


def by_halves(plan: Plan, own: Own, total: Slab, meets: Sequence[Meet]) -> Rounds:
    """Sum a bucket in rounds with few partners each: halves are swapped and added, then swapped back."""
    bucket = plan.bucket
    has = slice(0, bucket.size)  # the part of the bucket that ``parts`` are of
    parts: Parts = [(node, slab.flat) for node, slab in own]
    gone: list[tuple[Meet, slice, slice]] = []  # rounds, with what was kept and what was given away
    for meet in meets:
        if meet.is_result:
            continue
        keeps, gives = _halves(has, meet)
        room = _room(bucket, len(plan.nodes_of(meet.theirs.start, meet.theirs.stop)), keeps)
        partner = bucket.ranks[meet.partner]
        sends = [
            (partner, _part(value, has, gives), plan.tag + k)
            for k, (_, value) in enumerate(parts)
            if meet.sends and gives.stop > gives.start
        ]
        receives = [(partner, row, plan.tag + k) for k, row in enumerate(room) if meet.receives and row.numel()]
        yield sends, receives
        if not meet.receives:  # a guest: it has given everything away, and waits for the result
            break
        theirs = zip(plan.nodes_of(meet.theirs.start, meet.theirs.stop), room, strict=True)
        parts = plan.add([*((node, _part(value, has, keeps)) for node, value in parts), *theirs])
        has = keeps
        gone.append((meet, keeps, gives))
    else:
        _put(plan.root(parts), total.flat[has])
        yield from _give_back(plan, total, gone)
    yield from _results(plan, total, meets)


def _give_back(plan: Plan, total: Slab, gone: list[tuple[Meet, slice, slice]]) -> Rounds:
    """Swap finished slices, in the rounds' opposite order, until this holder has the whole sum."""
    tag = plan.tag + TOTAL
    for meet, keeps, gives in reversed(gone):
        if meet.is_swap:  # not the begin, when a guest gave everything
            partner = plan.bucket.ranks[meet.partner]
            yield (
                [(partner, total.flat[keeps], tag)] if keeps.stop > keeps.start else [],
                [(partner, total.flat[gives], tag)] if gives.stop > gives.start else [],
            )


def _results(plan: Plan, total: Slab, meets: Sequence[Meet]) -> Rounds:
    """Tell the guest the whole sum, or be told it as one."""
    for meet in meets:
        if meet.is_result:
            message = (plan.bucket.ranks[meet.partner], total.flat, plan.tag + TOTAL)
            yield ([message] if meet.sends else []), ([message] if meet.receives else [])


def _halves(has: slice, meet: Meet) -> tuple[slice, slice]:
    """Return what a holder keeps of what it has, and what it gives to its partner: all of it, if only one sends."""
    if not meet.sends:
        return has, slice(has.stop, has.stop)
    if not meet.receives:
        return slice(has.start, has.start), has
    middle = (has.start + has.stop) // 2
    lower, upper = slice(has.start, middle), slice(middle, has.stop)
    return (lower, upper) if meet.mine.start < meet.theirs.start else (upper, lower)


def _part(value: torch.Tensor, has: slice, wanted: slice) -> torch.Tensor:
    """Return a part of a tensor that is itself a part of a bucket."""
    return value[wanted.start - has.start : wanted.stop - has.start]


def _room(bucket: Bucket, rows: int, keeps: slice) -> torch.Tensor:
    """Return memory for a partner's partial sums. It cannot be the bucket's: sums of earlier rounds may lie there."""
    first = bucket.parameters[0]
    return torch.empty(rows, keeps.stop - keeps.start, dtype=first.dtype, device=first.device)


def _put(value: torch.Tensor, place: torch.Tensor) -> None:
    if value.data_ptr() != place.data_ptr():
        place.copy_(value)
