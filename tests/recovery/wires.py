"""The wires between workers that are threads: they break for everybody as soon as one gives them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.cluster.membership import Generation
from holdfast.errors import Broken
from tests.engine.memory_group import Letter, Lost, MemoryGroup, Network


class Wires(Network):
    """What is sent stays on its way, whatever becomes of the sender."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._all: list[Letter] = []
        self.voted: Counter[int] = Counter()  # whose ballots are on their way: rank → how often

    def put(self, sender: int, receiver: int, tag: int, tensor: torch.Tensor) -> Letter:
        letter = super().put(sender, receiver, tag, tensor)
        self._all.append(letter)
        return letter


class TownGroup(MemoryGroup):
    """A group that breaks: for everybody, as soon as one gives it up."""

    network: Wires

    def __init__(self, rank: int, network: Wires, generation: Generation, strikes: Callable[[str], bool]) -> None:
        super().__init__(rank, network)
        self.generation, self._strikes = generation, strikes
        self._over = False

    def check(self) -> None:
        if self._over:
            raise Broken("the group is closed")

    def abort(self, reason: str) -> None:
        self._over = True
        self.network.failed.set()

    def close(self) -> None:
        self.abort("closed")

    def start(self, sends: Any, receives: Any) -> Any:
        self.check()
        return super().start(sends, receives)

    def send(self, sends: Any) -> Any:
        self.check()
        return super().send(sends)

    def finish(self, works: Any) -> None:
        try:
            super().finish(works)
        except Lost as e:
            self.abort(str(e))
            raise Broken(str(e)) from e

    def sum(self, values: torch.Tensor, ranks: Sequence[int] | None = None) -> None:
        """Each hears from each, so that it may succeed for some and fail for others."""
        self._sum_of(values, range(self.size) if ranks is None else ranks)

    def vote(self, ballot: torch.Tensor) -> None:
        """An unlucky one's ballot gets through, but it hears from nobody; a rash one gives up before all have voted."""
        unlucky, rash = self._strikes("unlucky"), self._strikes("rash")
        if unlucky or rash:
            self.start([(rank, ballot.clone(), 0) for rank in range(self.size) if rank != self.rank], [])
            self.network.voted[self.rank] += 1
            while unlucky and not self._all_have_voted() and not self.network.failed.wait(0.001):
                pass
            self.abort("lost touch")
            raise Broken("lost touch")
        mine = ballot.clone()
        others = [rank for rank in range(self.size) if rank != self.rank]
        heard = {rank: torch.empty_like(ballot) for rank in others}
        works = self.start([(rank, mine, 0) for rank in others], [(rank, heard[rank], 0) for rank in others])
        self.network.voted[self.rank] += 1
        self.finish(works)
        heard[self.rank] = mine
        ballot.copy_(sum(heard[rank] for rank in range(self.size)))

    def _all_have_voted(self) -> bool:
        voted = self.network.voted
        return all(voted[rank] >= voted[self.rank] for rank in range(self.size))
