"""Those with whom a replica exchanges: the ``Group`` of a ``Run``'s generation, or anyone's process group."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.cluster.group import Transfer
from holdfast.cluster.waiter import GRACE, LONGEST, wait_for
from holdfast.errors import HoldfastError, UsageError

AVERAGE_TAG = 5  # values on their way to who averages them
MEAN_TAG = 6  # means on their way back, and small sums
BALLOT_TAG = 7
UPDATE_TAG = 8  # of stale-synchronous steps
WATCH_TAG = 9  # last words: of who gives up, or takes leave
DISTANCE_TAG = 10

PATIENCE = 1.0  # seconds of waiting for a peer until one asks whether it is there at all
FAREWELL = 60.0  # seconds that the last sends are given

_open: weakref.WeakSet[TorchPeers] = weakref.WeakSet()  # in this process
_left: list[Any] = []  # watches of peers that were closed: some may not have ended


class Peers(Protocol):
    """What an exchange needs. The semantics are those of ``cluster.group.Group``, which is one.

    Nobody waits for a send. What ``start`` sends, and what ``keep`` is told of, is kept alive by the peers; the works
    of ``send`` are the caller's to keep, until it knows that they have arrived.
    """

    rank: int
    size: int

    def check(self) -> None:
        """Raises if it is over."""

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        """Posts transfers of contiguous tensors; returns the receives, to be finished."""

    def send(self, sends: Sequence[Transfer]) -> list[Any]:
        """Posts sends that the caller keeps."""

    def keep(self, works: Sequence[Any]) -> None:
        """Keeps sends for as long as they need."""

    def finish(self, receives: Iterable[Any]) -> None:
        """Waits for receives; they may be decided on while they come."""


class PeerLost(HoldfastError, RuntimeError):
    """A process of the group has gone away in the middle of an exchange."""


class TorchPeers:
    """The processes of a ``torch.distributed`` group, which must be Gloo's: NCCL knows no tags."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._backend = _gloo(group)
        if any(other._backend is self._backend for other in _open):  # each would hear the other's last words
            raise UsageError(
                "another loop is open on this process group",
                hint='give each its own: group=torch.distributed.new_group(backend="gloo")',
            )
        _open.add(self)
        self.rank: int = self._backend.rank()
        self.size: int = self._backend.size()
        self._lost: str | None = None
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=_see_off, args=(self._sent,), name="holdfast-sent", daemon=True)
        self._keeper.start()
        # Gloo forgets a receive whose socket breaks in the middle of its message, but not one that has not begun: a
        # watch ends when its peer does, or says so.
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._watches = {peer: self._backend.recv([torch.empty(1)], peer, WATCH_TAG) for peer in others}
        self._watchers: dict[int, threading.Thread] = {}
        self._gone: set[int] = set()

    def check(self) -> None:
        if self._lost is not None:
            raise PeerLost(self._lost)

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        self.check()
        try:
            works = [(peer, self._backend.recv([tensor], peer, tag)) for peer, tensor, tag in receives]
        except RuntimeError as e:
            raise self._lose(e) from e
        self.keep(self.send(sends))
        return works

    def send(self, sends: Sequence[Transfer]) -> list[Any]:
        self.check()
        try:
            return [self._backend.send([tensor], peer, tag) for peer, tensor, tag in sends]
        except RuntimeError as e:
            raise self._lose(e) from e

    def keep(self, works: Sequence[Any]) -> None:
        """Only who waits for a send of Gloo's learns that it is done: a thread does."""
        if works:
            self._sent.put(works)

    def finish(self, receives: Iterable[Any]) -> None:
        errors: list[Exception] = []
        awaited: list[int] = []  # whose turn it is; empty: all have come

        def one_by_one() -> Iterator[Any]:
            for peer, work in receives:
                if errors:
                    break
                awaited[:] = [peer]
                yield work
            awaited.clear()

        begun = time.monotonic()
        if receives != []:
            wait_for(
                one_by_one(),
                failed=errors.append,
                over=lambda: self._is_over(errors, awaited, time.monotonic() - begun),
            )
        if errors and not isinstance(errors[0], RuntimeError):
            raise errors[0]  # no peer's fault
        if errors:
            raise self._lose(errors[0]) from errors[0]
        self.check()
        if awaited:
            raise self._lose(RuntimeError(f"rank {awaited[0]} has gone"))

    def _is_over(self, errors: list[Exception], awaited: list[int], waited: float) -> bool:
        """Whether waiting is in vain. That a peer has gone is found out by a thread, in a while.

        Only who is waited for matters: another may be done with all, and have left.
        """
        if errors or self._lost is not None:
            return True
        for peer in list(awaited) if waited > PATIENCE else ():
            if peer not in self._watchers:
                name = f"holdfast-watch-{peer}"
                self._watchers[peer] = threading.Thread(target=self._watch, args=(peer,), name=name, daemon=True)
                self._watchers[peer].start()
        return any(peer in self._gone for peer in list(awaited))

    def _watch(self, peer: int) -> None:
        try:
            self._watches[peer].wait(LONGEST)
        except RuntimeError:
            pass
        self._gone.add(peer)

    def _lose(self, error: Exception) -> PeerLost:
        self.give_up(f"lost touch with a peer: {str(error).splitlines()[0][:200]}")
        return PeerLost(self._lost or "")

    def give_up(self, reason: str) -> None:
        """Nothing is exchanged any more, and whoever waits for this process hears of it."""
        if self._lost is not None:
            return
        self._lost = reason
        self.keep(self._last_words())

    def _last_words(self) -> list[Any]:
        works = []
        for peer in self._watches:
            try:
                works.append(self._backend.send([torch.zeros(1)], peer, WATCH_TAG))
            except RuntimeError:  # it is the lost one
                pass
        return works

    def close(self) -> None:
        """All take leave, once what they sent has arrived. The process group stays as it is."""
        _open.discard(self)
        self._sent.put(None)
        self._keeper.join(0.0 if self._lost else FAREWELL)
        end = time.monotonic() + (GRACE if self._lost else FAREWELL)
        if self._lost is None:
            # A watch that was let go before its message comes would stop all others on that connection.
            works = self._last_words()
            works += [watch for peer, watch in self._watches.items() if peer not in self._watchers]
            wait_for(works, failed=lambda error: None, over=lambda: time.monotonic() > end)
        for watcher in self._watchers.values():  # one that wakes while the interpreter ends would take it down
            watcher.join(max(end - time.monotonic(), 0.0))
        _left.extend(self._watches.values())


def _see_off(sent: queue.SimpleQueue[Any]) -> None:
    while (works := sent.get()) is not None:
        for work in works:
            try:
                work.wait(LONGEST)
            except RuntimeError:  # whoever receives next hears of it
                pass
        del work, works  # and with them what was sent


def _gloo(group: dist.ProcessGroup | None) -> Any:
    if not dist.is_initialized():
        raise UsageError("there is no process group", hint='torch.distributed.init_process_group("gloo") first')
    try:
        backend = (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))
    except RuntimeError:
        backend = None
    if not isinstance(backend, dist.ProcessGroupGloo):
        raise UsageError(
            "replicas exchange over a process group of Gloo's", hint='group=torch.distributed.new_group(backend="gloo")'
        )
    return backend
