"""The peers of a replica: the ``Group`` of a ``Run``'s generation, or a process group of ``torch.distributed``."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.cluster import tags
from holdfast.cluster.talk import Transfer
from holdfast.errors import HoldfastError, UsageError
from holdfast.sync.waiter import GRACE, LONGEST, wait_for

# Tags of messages. Those of one tag arrive in the order in which they were sent.

PATIENCE = 1.0  # seconds of waiting for a peer until a thread watches whether it is gone; most waits are shorter
FAREWELL = 60.0  # seconds for the last sends to arrive when a loop ends: a slow network needs some

_open: weakref.WeakSet[TorchPeers] = weakref.WeakSet()  # all in this process that were not closed
_left: list[Any] = []  # watches of closed peers, kept alive because Gloo may still use them


class Peers(Protocol):
    """Other replicas, as an exchange needs them. ``cluster.group.Group`` is one, and defines the semantics.

    No call waits for a send. The peers keep alive what ``start`` sends and what ``keep`` is given. The caller keeps
    the works that ``send`` returns until it knows that they have arrived.
    """

    rank: int
    size: int

    def check(self) -> None:
        """Raise an error if a peer is lost."""

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        """Post transfers of contiguous tensors; return the receives, for ``finish``."""

    def send(self, sends: Sequence[Transfer]) -> list[Any]:
        """Post sends; return works that the caller keeps."""

    def keep(self, works: Sequence[Any]) -> None:
        """Keep works of ``send`` until they have arrived."""

    def finish(self, receives: Iterable[Any]) -> None:
        """Wait for receives. The iterator may post more of them while it is read."""


class PeerLost(HoldfastError, RuntimeError):
    """Error: a process of the group has gone in the middle of an exchange."""


class TorchPeers:
    """The processes of a ``torch.distributed`` group. It must be Gloo's, because NCCL has no tags.

    Raises ``UsageError`` for another backend, and if the group has an open loop already.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._backend = _gloo(group)
        if any(other._backend is self._backend for other in _open):  # each would receive the other's last message
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
        # Gloo never ends a receive whose socket breaks in the middle of its message, but it ends one that has not
        # begun. So a receive that nothing is sent to, a watch, shows that its peer has gone.
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._watches = {peer: self._backend.recv([torch.empty(1)], peer, tags.WATCH) for peer in others}
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
        """Let a thread wait for the sends: Gloo tells only a waiting caller that one is done."""
        if works:
            self._sent.put(works)

    def finish(self, receives: Iterable[Any]) -> None:
        errors: list[Exception] = []
        awaited: list[int] = []  # the rank that is waited for; empty: all receives are done

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
        """Whether waiting is in vain. After ``PATIENCE``, threads watch whether the awaited peers have gone.

        Others may have gone: they may be done, and have sent all.
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
        """End all exchange, and tell processes that wait for this one."""
        if self._lost is not None:
            return
        self._lost = reason
        self.keep(self._last_words())

    def _last_words(self) -> list[Any]:
        works = []
        for peer in self._watches:
            try:
                works.append(self._backend.send([torch.zeros(1)], peer, tags.WATCH))
            except RuntimeError:  # this peer is the lost one
                pass
        return works

    def close(self) -> None:
        """Wait until everything sent has arrived, then tell all that this process is done. The process group stays."""
        _open.discard(self)
        self._sent.put(None)
        self._keeper.join(0.0 if self._lost else FAREWELL)
        end = time.monotonic() + (GRACE if self._lost else FAREWELL)
        if self._lost is None:
            # Dropping a watch before its message comes would stop all other messages on that connection.
            works = self._last_words()
            works += [watch for peer, watch in self._watches.items() if peer not in self._watchers]
            wait_for(works, failed=lambda error: None, over=lambda: time.monotonic() > end)
        for watcher in self._watchers.values():  # one that wakes while the interpreter ends would crash it
            watcher.join(max(end - time.monotonic(), 0.0))
        _left.extend(self._watches.values())


def _see_off(sent: queue.SimpleQueue[Any]) -> None:
    """Wait for sends until None comes. It runs in a thread."""
    while (works := sent.get()) is not None:
        for work in works:
            try:
                work.wait(LONGEST)
            except RuntimeError:  # the next receive fails, and reports it
                pass
        del work, works  # frees the tensors that were sent


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
