"""Talk among many workers in few messages: sums along the tree, and parts that everybody gets.

Few workers tell everybody: one message that takes long, instead of several in a row. Many go in the rounds of the
``butterfly``. What comes out is the same, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from holdfast.cluster.butterfly import Meet, meetings
from holdfast.plan.tree import Node, combine

DIRECT = 8  # workers up to which everybody tells everybody

Transfer = tuple[int, torch.Tensor, int]  # (peer, tensor, tag)
Spans = tuple[tuple[int, int], ...]  # begin and end of each rank's share
Row = tuple[float, ...]


class Talker(Protocol):
    """The members of a group, as those here need them: ``group.Group`` is one."""

    rank: int
    size: int

    def start(
        self, sends: Sequence[tuple[int, torch.Tensor, int]], receives: Sequence[tuple[int, torch.Tensor, int]]
    ) -> list[Any]:
        """Post transfers of (peer, tensor, tag); return the receives."""

    def finish(self, receives: Sequence[Any]) -> None:
        """Wait for receives. Raises ``Broken``."""


def in_rounds(
    group: Talker,
    ranks: Sequence[int],
    *,
    say: Callable[[Meet], torch.Tensor],
    room: Callable[[Meet], torch.Tensor],
    take: Callable[[torch.Tensor, Meet], None],
    tag: int,
) -> None:
    """Swap messages with few others, round by round. All of ``ranks`` call it; places are positions in that list.

    ``say`` gives what to send in a round, and ``room`` memory for what comes, which ``take`` gets. Raises ``Broken``.
    """
    for meet in meetings(ranks.index(group.rank), len(ranks)):
        partner = ranks[meet.partner]
        heard = room(meet) if meet.receives else None
        sends = [(partner, say(meet), tag)] if meet.sends else []
        group.finish(group.start(sends, [] if heard is None else [(partner, heard, tag)]))
        if heard is not None:
            take(heard, meet)


# --- sums along the tree ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Values of micro-batches, of which each rank has those of its share.

    ``rows``: each has a value for every micro-batch; only those of this rank's share are read. ``shares``: the
    micro-batches of each rank, the same on all of them; each micro-batch is in one.
    """

    rows: Sequence[Sequence[float]]
    shares: Sequence[range]

    @property
    def leaves(self) -> int:
        """The number of micro-batches."""
        return len(self.rows[0])

    @property
    def spans(self) -> Spans:
        """The shares in a form that can be a key."""
        return tuple((share.start, share.stop) for share in self.shares)


def add_up(group: Talker, shared: Shared, head: torch.Tensor, *, tag: int) -> list[float]:
    """Return the sum of each row, added in the order of the tree, and add up everybody's ``head`` in place.

    Sums of subtrees travel, not the values themselves: a message has a few numbers, however many micro-batches there
    are. Raises ``Broken``.
    """
    told = _Sums(group.rank, shared, head)
    everybody = range(group.size)
    if group.size <= DIRECT:
        others = [rank for rank in everybody if rank != group.rank]
        mine, heard = told.message(), {rank: told.room(range(rank, rank + 1)) for rank in others}
        receives = [(rank, heard[rank], tag) for rank in others]
        group.finish(group.start([(rank, mine, tag) for rank in others], receives))
        for rank in others:
            told.take(heard[rank], range(rank, rank + 1))
    else:
        in_rounds(
            group,
            everybody,
            say=lambda meet: told.message(),
            room=lambda meet: told.room(meet.theirs),
            take=lambda heard, meet: told.take(heard, meet.theirs, is_result=meet.is_result),
            tag=tag,
        )
    return told.result()


class _Sums:
    """The sums of subtrees that a worker has so far, and everybody's heads as far as heard."""

    def __init__(self, rank: int, shared: Shared, head: torch.Tensor) -> None:
        self._shared, self._head = shared, head
        self._spans, self._leaves, self._rows = shared.spans, shared.leaves, len(shared.rows)
        own = [(Node(0, leaf), tuple(row[leaf] for row in shared.rows)) for leaf in shared.shares[rank]]
        self._parts: list[tuple[Node, Row]] = combine(own, self._leaves, _add)

    def message(self) -> torch.Tensor:
        numbers = [number for _, row in self._parts for number in row]
        return torch.cat([self._head, torch.tensor(numbers, dtype=torch.float64, device=self._head.device)])

    def room(self, places: range) -> torch.Tensor:
        """Return room for the message of a worker that has what these places have."""
        size = self._head.numel() + self._rows * len(nodes_of(self._spans, self._leaves, places.start, places.stop))
        return torch.empty(size, dtype=torch.float64, device=self._head.device)

    def take(self, message: torch.Tensor, places: range, *, is_result: bool = False) -> None:
        nodes = nodes_of(self._spans, self._leaves, places.start, places.stop)
        numbers = message[self._head.numel() :].tolist()
        parts = [(node, tuple(numbers[n * self._rows : (n + 1) * self._rows])) for n, node in enumerate(nodes)]
        head = message[: self._head.numel()]
        (self._head.copy_ if is_result else self._head.add_)(head)
        self._parts = parts if is_result else combine([*self._parts, *parts], self._leaves, _add)

    def result(self) -> list[float]:
        if not self._parts:
            return [0.0] * self._rows
        assert len(self._parts) == 1, "the shares are all micro-batches, each once"
        return list(self._parts[0][1])


def _add(left: Row, right: Row) -> Row:
    return tuple(a + b for a, b in zip(left, right, strict=True))


@lru_cache(maxsize=4096)
def nodes_of(spans: Spans, leaves: int, start: int, stop: int) -> tuple[Node, ...]:
    """Return the nodes of the tree that these places have together, as sums: from ``start`` to before ``stop``.

    >>> nodes_of(((0, 3), (3, 4), (4, 4)), 4, 0, 3)
    (Node(level=2, index=0),)
    """
    if stop - start == 1:
        parts = [(Node(0, leaf), None) for leaf in range(*spans[start])]
    else:
        middle = (start + stop) // 2
        halves = nodes_of(spans, leaves, start, middle) + nodes_of(spans, leaves, middle, stop)
        parts = [(node, None) for node in halves]
    return tuple(node for node, _ in combine(parts, leaves, lambda left, right: None))


# --- parts that everybody gets ------------------------------------------------------------------------------


def share(group: Talker, mine: torch.Tensor, sizes: Sequence[int], *, tag: int) -> list[torch.Tensor]:
    """Return everybody's parts, by rank. ``mine``: this rank's, flat. ``sizes``: their numbers of elements.

    Raises ``Broken``.
    """
    begins = [sum(sizes[:rank]) for rank in range(group.size + 1)]
    whole = torch.empty(begins[-1], dtype=mine.dtype, device=mine.device)
    whole[begins[group.rank] : begins[group.rank + 1]] = mine

    def of(places: range) -> torch.Tensor:
        return whole[begins[places.start] : begins[places.stop]]

    def take(heard: torch.Tensor, meet: Meet) -> None:
        if meet.is_result:  # else it lies where it belongs already
            whole.copy_(heard)

    if group.size <= DIRECT:
        others = [rank for rank in range(group.size) if rank != group.rank]
        own = of(range(group.rank, group.rank + 1))
        receives = [(rank, of(range(rank, rank + 1)), tag) for rank in others if sizes[rank]]
        group.finish(group.start([(rank, own, tag) for rank in others if own.numel()], receives))
    else:
        in_rounds(
            group,
            range(group.size),
            say=lambda meet: whole.clone() if meet.is_result else of(meet.mine),
            room=lambda meet: torch.empty_like(whole) if meet.is_result else of(meet.theirs),
            take=take,
            tag=tag,
        )
    return [whole[begins[rank] : begins[rank + 1]] for rank in range(group.size)]
