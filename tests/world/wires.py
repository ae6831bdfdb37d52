"""Connections between the workers of one generation: late, in order, and broken at any byte.

The real ``Group`` runs on top; this is what ``cluster.links`` is in a real run. What is sent is copied when it
*arrives*, so a sender that writes into it too early is found out by the hash. A connection is made when it is first
used; of two members the one with the higher rank calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from tests.world.fibers import Killed, Scheduler


class Stream:
    """What one worker sends another: delivered in order; after a break only what had arrived by then is there."""

    def __init__(self, scheduler: Scheduler, latency: Callable[[], float]) -> None:
        self._scheduler, self._latency = scheduler, latency
        self._boxes: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._under_way: deque[tuple[int, torch.Tensor]] = deque()
        self._last = 0.0
        self._lost: int | None = None  # once it breaks off: how many of those under way will never arrive
        self.closed = False

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        if self.closed or self._lost is not None:
            return
        self._under_way.append((tag, tensor))
        self._last = max(self._last, self._scheduler.now + self._latency())
        self._scheduler.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self.closed or not self._under_way:
            return
        tag, tensor = self._under_way.popleft()
        self._boxes[tag].append(tensor.detach().clone())
        if len(self._under_way) == self._lost:
            self._close()

    def has(self, tag: int) -> bool:
        return bool(self._boxes[tag])

    def take(self, tag: int) -> torch.Tensor:
        return self._boxes[tag].popleft()

    def break_off(self) -> None:
        """The connection ends: some of what is under way still arrives, the rest never does."""
        if not self.closed and self._lost is None:
            self._lost = self._scheduler.chance.randint(0, len(self._under_way))
            if self._lost == len(self._under_way):
                self._scheduler.later(self._latency(), self._close)

    def fall_silent(self, seconds: float) -> None:
        """Nothing arrives any more, what has arrived is not read, and so much later it breaks."""
        self._lost = 0
        self._under_way.clear()
        self._boxes.clear()
        self._scheduler.later(seconds, self._close)

    def never_connect(self) -> None:
        """Nothing arrives, and nobody is told: the call is not answered."""
        self._lost = 0

    def _close(self) -> None:
        self.closed = True
        self._under_way.clear()


class Wires:
    """All connections of one generation.

    ``reaches(caller, called)``: whether the machine of a rank answers another's calls, and there is somebody to take
    them. ``unanswered(caller, called)`` is told of a call that nobody takes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        latency: Callable[[], float],
        *,
        reaches: Callable[[int, int], bool],
        unanswered: Callable[[int, int], None],
    ) -> None:
        self.scheduler, self._latency = scheduler, latency
        self._reaches, self._unanswered = reaches, unanswered
        self._left: set[int] = set()  # ranks that have given the generation up, or are dead
        self.streams: dict[tuple[int, int], Stream] = {}

    def stream(self, sender: int, receiver: int) -> Stream:
        """What one rank sends another; the two are connected if they were not."""
        if (sender, receiver) not in self.streams:
            caller, called = max(sender, receiver), min(sender, receiver)
            reached = self._reaches(caller, called)
            for way in ((sender, receiver), (receiver, sender)):
                self.streams[way] = Stream(self.scheduler, self._latency)
                if self._left.intersection(way):
                    self.streams[way].break_off()
                elif not reached:
                    self.streams[way].never_connect()
            if not reached:
                self._unanswered(caller, called)
        return self.streams[sender, receiver]

    def leave(self, rank: int) -> None:
        """A worker gives the generation up, or is dead: all of its connections end, both ways."""
        self._left.add(rank)
        for (sender, receiver), stream in self.streams.items():
            if rank in (sender, receiver):
                stream.break_off()

    def deafen(self, rank: int, seconds: float) -> None:
        """A worker is heard, but hears nobody any more; so much later it notices."""
        for (_, receiver), stream in self.streams.items():
            if receiver == rank and not stream.closed:
                stream.fall_silent(seconds)

    def cut(self, a: int, b: int) -> None:
        """The connection between two workers breaks."""
        self.streams[a, b].break_off()
        self.streams[b, a].break_off()


class Backend:
    """What a ``Group`` asks of its links."""

    def __init__(self, wires: Wires, rank: int, owner: Any) -> None:
        self._wires, self._rank, self._owner = wires, rank, owner
        self._aborted = False
        self.unreached: tuple[str, ...] = ()
        self.refused: tuple[str, ...] = ()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        assert tensor.is_contiguous()
        if self._owner.dead:
            raise Killed
        if self._aborted:
            raise RuntimeError("the connection is closed")
        self._wires.stream(self._rank, peer).send(tag, tensor)
        return tensor  # kept alive by the group

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Receive:
        (tensor,) = tensors
        assert tensor.is_contiguous()
        return Receive(self, self._wires.stream(peer, self._rank), tensor, tag)

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._wires.leave(self._rank)

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def scheduler(self) -> Scheduler:
        return self._wires.scheduler


class Receive:
    """Room that was asked to be filled."""

    def __init__(self, backend: Backend, stream: Stream, room: torch.Tensor, tag: int) -> None:
        self._backend, self._stream, self._room, self._tag = backend, stream, room, tag

    def wait(self) -> None:
        stream, tag = self._stream, self._tag
        self._backend.scheduler.wait(lambda: stream.has(tag) or stream.closed or self._backend.aborted)
        if not stream.has(tag) or self._backend.aborted:
            raise RuntimeError("the connection is closed")
        with torch.no_grad():
            self._room.copy_(stream.take(tag).view_as(self._room))
