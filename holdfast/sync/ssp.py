"""Stale synchronous parallel training: every replica pushes its updates, and none runs far ahead of the slowest.

There is no server that could be lost. Its state is everywhere: a replica sends each of its updates to all others and
adds theirs as they come, so each holds what a server would, but for updates under way. With N replicas a server
would send N copies of the model after each step over one link; here each link carries N - 1 updates.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checks import by_name, whole
from holdfast.cluster import tags
from holdfast.cluster.pulse import PULSE
from holdfast.errors import UsageError
from holdfast.sync.packed import Packed
from holdfast.sync.peers import Peers
from holdfast.sync.policy import Context, Decision, Policy

Buffers = list[torch.Tensor]


@by_name
@dataclass(frozen=True, kw_only=True)
class SSP(Policy):
    """Policy that pushes each update to all replicas; one that is more than ``staleness`` steps ahead waits.

    An update counts 1/N, so that N replicas move as far in a step as one that averages N gradients. Raises
    ``UsageError`` if ``staleness`` is negative, and for ``overlap`` or ``optimizer_state``, which mean nothing here.

    >>> SSP(staleness=3).tracker(Context()).ballot
    0
    """

    staleness: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("staleness", self.staleness, least=0)
        if self.overlap or self.optimizer_state != "local":
            raise UsageError(
                "SSP pushes updates, not parameters: there is nothing to overlap or to average",
                hint="leave out overlap= and optimizer_state=",
            )

    def tracker(self, context: Context) -> _Never:
        return _Never()


class _Never:
    """Tracker that never synchronises: updates are pushed without a decision."""

    ballot = 0

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        return []

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        return Decision(synchronise=False, reason="updates are pushed as they are made")

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None: ...

    def state(self) -> list[float]:
        return []

    def load(self, state: Sequence[float]) -> None: ...


class Pushes:
    """The updates since replicas were equal, of this replica and of the others as far as they have come.

    When replicas meet, each gives the updates that it has made itself, and their sum is the whole (``gather``), however
    many were still under way. So a broken connection loses no update of a survivor. Of a lost replica, the updates
    that have reached any survivor are kept.
    """

    def __init__(self, peers: Peers, parameters: Sequence[torch.Tensor], *, staleness: int) -> None:
        self._peers = peers
        self._staleness = staleness
        self._parameters = list(parameters)
        self._anchor = self._packed.read()
        self._view = [buffer.clone() for buffer in self._anchor]
        self._mine = [torch.zeros_like(buffer) for buffer in self._anchor]
        self._made = 0  # updates of this replica
        self._closed = False  # nothing more is received
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._kept: deque[list[Any]] = deque()  # sends that may not have arrived
        self._peer: dict[int, _Peer] = {}
        for rank in range(peers.size):
            if rank != peers.rank:
                self._peer[rank] = _Peer(sum_=[torch.zeros_like(buffer) for buffer in self._anchor])
                threading.Thread(target=self._listen, args=(rank,), name="holdfast-updates", daemon=True).start()

    @property
    def _packed(self) -> Packed:
        return Packed(self._parameters)

    # --- each step -------------------------------------------------------------------------------

    @torch.no_grad()
    def fold(self) -> Buffers:
        """Add the update since the last call to this replica's sum; return it, divided by the number of replicas."""
        update = [
            now.sub_(view).div_(self._peers.size) for now, view in zip(self._packed.read(), self._view, strict=True)
        ]
        for total, view, part in zip(self._mine, self._view, update, strict=True):
            total.add_(part)
            view.add_(part)
        self._made += 1
        self._packed.write(self._view)
        return update

    def exchange(self) -> int:
        """Send the newest update, add the updates that have come, and wait for replicas that are too far behind.

        Return the number of bytes sent.
        """
        update = self.fold()
        others = list(self._peer)
        for rank in others:
            room = [torch.empty_like(buffer) for buffer in update]
            works = self._peers.start([], [(rank, buffer, tags.UPDATE) for buffer in room])
            self._peer[rank].expected.put((room, works))
        self._kept.append(self._peers.send([(rank, buffer, tags.UPDATE) for rank in others for buffer in update]))
        self._wait(self._made - self._staleness)
        return len(others) * sum(buffer.nbytes for buffer in update)

    @torch.no_grad()
    def _wait(self, least: int) -> None:
        """Wait until ``least`` updates of each of the others have come; add all that have come to the parameters."""
        with self._changed:
            with PULSE.at("wait"):
                self._changed.wait_for(lambda: self._error or all(p.heard >= least for p in self._peer.values()))
            came = [part for peer in self._peer.values() for part in peer.take()]
            heard = min((peer.heard for peer in self._peer.values()), default=0)
        for part in came:
            for view, buffer in zip(self._view, part, strict=True):
                view.add_(buffer)
        self._packed.write(self._view)
        # A replica that has made m updates had received ours up to number m - 1 - staleness.
        while len(self._kept) > self._made - max(heard - 1 - self._staleness, 0):
            self._kept.popleft()
        if self._error is not None:
            raise self._error

    def _listen(self, rank: int) -> None:
        """Receive the updates of one other replica, in order. It runs in a thread until None is expected."""
        peer = self._peer[rank]
        while (expected := peer.expected.get()) is not None:
            room, works = expected
            try:
                self._peers.finish(works)
            except BaseException as e:  # raised again where the training thread can act on it
                with self._changed:
                    self._error = self._error or e
                    self._changed.notify_all()
                continue  # nothing may be left that still writes
            with self._changed:
                peer.came.append(room)
                for total, buffer in zip(peer.sum_, room, strict=True):
                    total.add_(buffer)
                peer.heard += 1
                self._changed.notify_all()

    # --- meetings --------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all updates that are under way, unless the peers broke. It comes before a meeting."""
        if not self._closed:
            self._closed = True
            try:
                if self._error is None:
                    self._wait(self._made)
            finally:
                for peer in self._peer.values():
                    peer.expected.put(None)
                for works in self._kept:
                    self._peers.keep(works)

    def abandon(self) -> None:
        """Stop to send updates, because the peers broke. They are still added up here."""
        if not self._closed:
            self._closed = True
            for peer in self._peer.values():
                peer.expected.put(None)

    @property
    def heard(self) -> dict[int, int]:
        """Number of updates that have come from each of the other ranks."""
        return {rank: peer.heard for rank, peer in self._peer.items()}

    @torch.no_grad()
    def gather(self, workers: int, lost: Collection[int] = ()) -> None:
        """Set the parameters to this replica's contribution: its own updates and those of ``lost`` ranks.

        The mean of the contributions of ``workers`` replicas is then the state that a parameter server would have.
        """
        total = [buffer.clone() for buffer in self._mine]
        for rank in lost:
            for buffer, part in zip(total, self._peer[rank].sum_, strict=True):
                buffer.add_(part)
        self._packed.write([anchor + buffer * workers for anchor, buffer in zip(self._anchor, total, strict=True)])


class _Peer:
    """The updates that have come from one other replica."""

    def __init__(self, sum_: Buffers) -> None:
        self.sum_ = sum_
        self.heard = 0
        self.came: list[Buffers] = []  # not yet added to the parameters
        self.expected: queue.SimpleQueue[tuple[Buffers, list[Any]] | None] = queue.SimpleQueue()

    def take(self) -> list[Buffers]:
        came, self.came = self.came, []
        return came


def heirs(heard: Mapping[str, Mapping[str, int]], alive: Sequence[str]) -> dict[str, str]:
    """Return for each lost replica the survivor that adds its updates: the one that has heard most of them.

    >>> heirs({"a": {"b": 4, "c": 2}, "b": {"a": 4, "c": 3}}, alive=["a", "b"])
    {'c': 'b'}
    """
    known = [(teller, of, number) for teller in alive for of, number in heard.get(teller, {}).items()]
    lost = sorted({of for _, of, _ in known if of not in alive})
    return {
        of: max((entry for entry in known if entry[1] == of), key=lambda entry: (entry[2], -alive.index(entry[0])))[0]
        for of in lost
    }
