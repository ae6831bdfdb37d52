"""The process group of one generation: point-to-point exchange, and a way out of it.

A group is made, used and thrown away. Whoever gives up a generation shuts its sockets down, which
frees itself and everybody blocked on it, within milliseconds and even if the peer is hung or its host
has vanished. (Gloo's own ``abort`` frees nobody; with NCCL, ``abort`` does, which is untested here.)

Nobody ever waits for a *send*: Gloo forgets a send whose socket breaks while it is being written, and
whoever waits for it waits for ever. (Its collectives do that inside, so they are not used.) It is not
needed either. A vote that succeeds proves that all that was sent before it has arrived. Receives can be
forgotten too: ``waiter`` waits for them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.cluster import membership, silence, tags
from holdfast.cluster.membership import Generation
from holdfast.cluster.waiter import wait_for
from holdfast.errors import Broken

CONNECT = timedelta(seconds=60)  # after that an abandoned attempt to connect cleans itself up

Transfer = tuple[int, torch.Tensor, int]  # (peer, tensor, tag)


class _Rendezvous(dist.Store):  # type: ignore[name-defined]
    """Shows a generation's store to c10d, which asks for no more than this."""

    def __init__(self, store: membership.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._store.take(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._store.take(key)


class Group:
    """The workers of one generation, as this worker reaches them."""

    def __init__(self, generation: Generation, rank: int, backend: Any = None) -> None:
        self.generation = generation
        self.rank = rank
        self.size = len(generation.members)
        self._backend = backend
        self._sockets: dict[int, str] = {}
        self.bytes = 0  # that this worker has sent
        self._sent: list[Any] = []  # kept alive until a vote proves that it has arrived
        self._broken: str | None = None
        self._watch: threading.Event | None = None  # set: nobody looks for vanished machines any more

    # --- communication ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ``Broken`` if the generation is over. Cheap: call it between pieces of work."""
        if self._broken is not None:
            raise Broken(self._broken)

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        """Posts transfers and returns the receives, to be finished. Tensors must be contiguous.

        What is sent must stay as it is until the next ``vote`` has succeeded.
        """
        self.check()
        works: list[Any] = []
        try:
            with self._together():
                for peer, tensor, tag in receives:
                    works.append(self._backend.recv([tensor], peer, tag))
                for peer, tensor, tag in sends:
                    self._sent.append(self._backend.send([tensor], peer, tag))
                    self.bytes += tensor.nbytes
        except RuntimeError as e:
            broken = self._give_up(e)
            self.drain(works)
            raise broken from e
        return works

    def send(self, sends: Sequence[Transfer]) -> list[Any]:
        """Posts sends that the caller keeps alive until it knows that they have arrived."""
        self.check()
        works: list[Any] = []
        try:
            with self._together():
                for peer, tensor, tag in sends:
                    works.append(self._backend.send([tensor], peer, tag))
                    self.bytes += tensor.nbytes
        except RuntimeError as e:
            raise self._give_up(e) from e
        return works

    def keep(self, works: Sequence[Any]) -> None:
        """Keeps what was sent alive until the next vote, as ``start`` does."""
        self._sent += works

    def drain(self, receives: Sequence[Any]) -> None:
        """After an abort: waits until none of these writes into its tensor any more."""
        if receives:
            wait_for(receives, failed=lambda error: None, over=lambda: True)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """NCCL wants sends and receives that depend on each other in one call (untested here)."""
        grouped = isinstance(self._backend, getattr(dist, "ProcessGroupNCCL", ()))
        if grouped:
            self._backend._start_coalescing(torch.device("cuda"))
        yield
        if grouped:
            self._sent.append(self._backend._end_coalescing(torch.device("cuda")))

    def finish(self, receives: Iterable[Any]) -> None:
        """Waits for posted receives, all of them even if one fails: none writes into its tensor later."""
        errors: list[Exception] = []

        def failed(error: Exception) -> None:
            errors.append(error)
            self._give_up(error)  # at once: the others are not waited for in vain

        if receives != []:
            wait_for(receives, failed=failed, over=lambda: self._broken is not None)
        if errors and not isinstance(errors[0], RuntimeError | Broken):
            raise errors[0]  # no peer's fault
        if errors:
            raise Broken(self._broken or "") from errors[0]
        self.check()

    def sum(self, values: torch.Tensor, ranks: Sequence[int] | None = None) -> None:
        """Adds up everybody's values, or those of some ranks, in place and in the order of ranks.

        Every worker hears from every other: success means that all have come this far.
        """
        everybody = sorted(range(self.size) if ranks is None else ranks)
        others = [rank for rank in everybody if rank != self.rank]
        mine = values.clone()
        heard = {rank: torch.empty_like(values) for rank in others}
        receives = self.start(
            [(rank, mine, tags.SUM) for rank in others], [(rank, heard[rank], tags.SUM) for rank in others]
        )
        self.finish(receives)
        heard[self.rank] = mine
        values.copy_(heard[everybody[0]])
        for rank in everybody[1:]:
            values.add_(heard[rank])

    def vote(self, ballot: torch.Tensor) -> None:
        """A ``sum`` after which all that was sent before it is known to have arrived."""
        before = len(self._sent)
        self.sum(ballot)
        del self._sent[:before]

    def _give_up(self, error: Exception) -> Broken:
        self.abort(f"lost touch with a peer: {str(error).splitlines()[0][:200]}")
        assert self._broken is not None
        return Broken(self._broken)

    # --- the way out -----------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Ends the group from any thread: whoever waits in it, here or at a peer, fails at once."""
        if self._broken is None:
            self._broken = reason
        if self._watch is not None:
            self._watch.set()
        for number, inode in self._sockets.items():
            _shut_down(number, inode)
        if self._backend is not None and not self._sockets:
            self._backend.abort()  # NCCL: untested here

    def look_for_vanished(self) -> None:
        """Aborts once the machine of a peer does not answer any more, where no coordinator can tell."""
        self._watch = silence.watch(list(self._sockets), silence.seconds_allowed(), self.abort)

    def close(self) -> None:
        """Ends the group. What it holds is freed with the object, which takes Gloo ten milliseconds."""
        self.abort("closed")


def alone() -> Group:
    """The group of a worker that has no others."""
    return Group(membership.Solo().regroup(membership.Standing()), 0)


class _Aside(Group):
    """A worker that computes as if it had no others, but hears when the generation that it is in is over."""

    def __init__(self, group: Group) -> None:
        super().__init__(membership.Solo().regroup(membership.Standing()), 0)
        self._around = group

    def check(self) -> None:
        self._around.check()


def aside(group: Group) -> Group:
    """A group of one for a member of ``group``, which breaks with it."""
    return _Aside(group)


def form(generation: Generation, worker: str, store: membership.Store | None, device: torch.device) -> Group:
    """Connects the members of a generation. Raises ``Broken`` if that is over before it is done.

    The connecting itself cannot be interrupted (a peer that died leaves Gloo waiting for its call), so
    it is left to a thread that can be abandoned.
    """
    rank = generation.rank_of(worker)
    if len(generation.members) == 1:
        return Group(generation, rank)
    assert store is not None
    done = threading.Event()
    result: list[Group | Exception] = []

    def connect() -> None:
        try:
            result.append(_connect(generation, rank, store, device))
        except Exception as e:  # whatever the backend raises, the generation cannot form
            result.append(e)
        done.set()

    threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
    while not done.wait(0.02):
        if store.closed:
            raise Broken("the generation ended while it formed")
    if isinstance(result[0], Group):
        result[0].look_for_vanished()  # not earlier: nobody would end it in a group that was abandoned
        return result[0]
    raise Broken(f"the generation could not form: {result[0]}")


def _connect(generation: Generation, rank: int, store: membership.Store, device: torch.device) -> Group:
    size = len(generation.members)
    if device.type == "cuda":  # untested here
        nccl = dist.ProcessGroupNCCL(_Rendezvous(store), rank, size, dist.ProcessGroupNCCL.Options())
        return Group(generation, rank, nccl)
    address = generation.members[rank].address
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = CONNECT  # also that of a wait which is not given its own
    before = set(_open_sockets().values())
    gloo = dist.ProcessGroupGloo(_Rendezvous(store), rank, size, options)
    group = Group(generation, rank, gloo)
    addresses = {member.address for member in generation.members}
    opened = {n: i for n, i in _open_sockets().items() if i not in before and _is_pair(n, addresses)}
    group._sockets = opened
    return group


def _open_sockets() -> dict[int, str]:
    """This process's sockets: descriptor → inode, as the kernel shows them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


def _is_pair(number: int, addresses: set[str]) -> bool:
    """Whether a socket is connected to a member. A listening one must be spared: Gloo ends the process."""
    try:
        with socket.socket(fileno=os.dup(number)) as candidate:
            return str(candidate.getpeername()[0]) in addresses
    except (OSError, IndexError):
        return False


def _shut_down(number: int, inode: str) -> None:
    """Shuts a socket down unless its descriptor has become somebody else's in the meantime."""
    try:
        with socket.socket(fileno=os.dup(number)) as mine:
            if os.readlink(f"/proc/self/fd/{mine.fileno()}") == inode:
                mine.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
