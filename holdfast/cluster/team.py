"""The team: ranks that compute one replica together, with torch's own parallelism, and are lost together.

For the cluster a team is one worker, with one standing and one vote. Its first rank, the leader, speaks for it. The
other ranks do what it does, so all of a team must leave a broken generation at the same place: a rank that went on
alone would wait for its mates in one of torch's collectives. So ``Broken`` may only be raised where all ranks meet,
and then on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from holdfast.cluster.membership import Generation, Standing
from holdfast.errors import Broken, UsageError

T = TypeVar("T")


class Mates(Protocol):
    """The ranks of a team, as they talk to each other."""

    rank: int
    size: int

    def exchange(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, by rank. Raises ``RuntimeError`` if one is lost."""


class _Nobody:
    """The mates of a worker that is no team."""

    rank = 0
    size = 1

    def exchange(self, text: bytes) -> list[bytes]:
        return [text]


class Agreed(Broken):
    """``Broken``, as all ranks of the team know it already."""


class Team:
    """The ranks of this worker's team, and how they agree. Every rank must make the same calls in the same order.

    >>> team = Team()
    >>> team.exchange("the loss", 0.5), team.led(lambda: 3)
    ([0.5], 3)
    """

    def __init__(self, mates: Mates | None = None) -> None:
        self._mates = mates or _Nobody()
        self.rank = self._mates.rank
        self.size = self._mates.size

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the team."""
        return self.rank == 0

    def exchange(self, what: str, value: Any = None, *, broken: Broken | None = None) -> list[Any]:
        """Return the JSON values of all ranks, by rank.

        ``what`` names the place in the code, and ``broken`` says that this rank cannot go on. Raises ``Agreed`` on all
        ranks if one of them cannot, and ``UsageError`` if they are at different places.
        """
        if self.size == 1:
            if broken is not None:
                raise broken
            return [value]
        mine = [what, value, None if broken is None else str(broken)]
        said = [json.loads(text) for text in self._mates.exchange(json.dumps(mine).encode())]
        reasons = [reason for _, _, reason in said if reason is not None]
        if reasons:
            found = broken or Broken("")
            raise Agreed(reasons[0], unreached=found.unreached, refused=found.refused) from broken
        for rank, (where, _, _) in enumerate(said):
            if where != what:
                raise UsageError(
                    f"the ranks of a team do different things: rank {self.rank} is at {what}, rank {rank} at {where}",
                    hint="call step.commit, evaluate, predict, save_model and sha256 on every rank alike",
                )
        return [value for _, value, _ in said]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Do something that may break, and find out whether it broke on any rank. Raises ``Broken`` on all then."""
        broken: Broken | None = None
        try:
            yield
        except Agreed:
            raise
        except Broken as e:
            broken = e
        self.exchange(what, broken=broken)

    def led(self, work: Callable[[], T]) -> T:
        """Have the leader do something; return its result, a JSON value, on all ranks. Raises ``Broken`` on all."""
        broken: Broken | None = None
        found: T | None = None
        if self.leads:
            try:
                found = work()
            except Broken as e:
                broken = e
        told: T = self.exchange("the leader's word", found, broken=broken)[0]
        return told


def merge(standings: Sequence[Standing]) -> Standing:
    """Return the standing of a team from those of its ranks: the leader's, with what the others have noticed.

    Raises ``UsageError`` if the ranks have not committed the same.

    >>> merge([Standing(operation=3, ports=(7,)), Standing(operation=3, broken=True, ports=(8,))]).ports
    (7, 8)
    """
    first = standings[0]
    for rank, other in enumerate(standings):
        if (other.operation, other.voted, other.boundary) != (first.operation, first.voted, first.boundary):
            raise UsageError(
                f"the ranks of a team have come apart: rank 0 has made {first.operation} operations, rank {rank} "
                f"{other.operation}",
                hint="the same calls on every rank of a team",
            )
    return replace(
        first,
        broken=any(each.broken for each in standings),
        unreached=tuple(dict.fromkeys(name for each in standings for name in each.unreached)),
        refused=tuple(dict.fromkeys(name for each in standings for name in each.refused)),
        ports=tuple(port for each in standings for port in each.ports),
    )


def column_of(generation: Generation, rank: int) -> Generation:
    """Return a generation as the ranks of one number see it: each member is reached at the port of that rank.

    Raises ``UsageError`` if some team has another number of ranks.
    """
    sizes = {member.worker: len(member.standing.ports) for member in generation.members}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{worker} has {size}" for worker, size in sizes.items())
        raise UsageError(f"teams have different numbers of ranks: {said}", hint="the same --team on every machine")
    members = tuple(replace(member, port=member.standing.ports[rank]) for member in generation.members)
    return replace(generation, members=members)


ALONE = Team()  # of a worker that is no team
