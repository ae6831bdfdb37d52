"""The process group of one generation: point-to-point exchange that can be aborted from any thread.

A group is made for one generation, and thrown away with it. A worker that gives up a generation shuts down the group's
sockets. That frees this worker, and every peer that is blocked on it, within milliseconds, even if the peer is hung or
its host has vanished. (Gloo's own ``abort`` frees nobody; NCCL's does, which is untested here.)

Nobody ever waits for a *send*. Gloo forgets a send whose socket breaks while it is being written, and a wait for it
never ends. (Gloo's collectives wait for sends inside, so they are not used.) Waiting is not needed either: a vote that
succeeds proves that everything sent before it has arrived. Gloo may forget receives too: ``waiter`` deals with that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.cluster import membership, reach, silence, tags
from holdfast.cluster.gloo_sockets import Doorkeeper, peer_address, shut_down
from holdfast.cluster.membership import Generation
from holdfast.cluster.pulse import PULSE
from holdfast.cluster.waiter import wait_for
from holdfast.errors import Broken

CONNECT = timedelta(seconds=60)  # Gloo gives up by itself after this, which ends the thread of an abandoned attempt
CALL_SECONDS = 1.0  # between two looks for calls that nobody answers: a living machine answers much sooner
LOOK_SECONDS = 0.02  # between two looks whether a generation has ended while it forms

Transfer = tuple[int, torch.Tensor, int]  # (peer, tensor, tag)


class _Rendezvous(dist.Store):  # type: ignore[name-defined]
    """A generation's store with the interface that c10d expects: these three methods are all it calls.

    ``door``: adds the addresses of Gloo's sockets to what Gloo puts into the store; None for NCCL.
    """

    def __init__(self, store: membership.Store, door: Doorkeeper | None = None) -> None:
        super().__init__()
        self._store = store
        self._door = door

    def set(self, key: str, value: bytes) -> None:
        self._store.put(key, bytes(value) if self._door is None else self._door.tell(bytes(value)))

    def get(self, key: str) -> bytes:
        value = self._store.take(key)
        return value if self._door is None else self._door.hear(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._store.take(key)


class Group:
    """The connections of this worker to the others of one generation.

    ``backend``: the c10d process group; None for a group of one.
    """

    def __init__(self, generation: Generation, rank: int, backend: Any = None) -> None:
        self.generation = generation
        self.rank = rank
        self.size = len(generation.members)
        self._backend = backend
        self._sockets: dict[int, str] = {}  # descriptors and inodes of the connections to peers
        self.bytes = 0  # bytes that this worker has sent
        self._sent: list[Any] = []  # sends, whose tensors are kept alive until a vote proves that they have arrived
        self._broken: str | None = None  # the reason why the group was aborted
        self.unreached: tuple[str, ...] = ()  # members whose machines have vanished, as far as this worker can tell
        self._watch: threading.Event | None = None  # ends the look for vanished machines when it is set

    # --- communication ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``Broken`` if the generation is over. It is cheap: call it between pieces of work."""
        PULSE.sign()
        if self._broken is not None:
            raise Broken(self._broken, unreached=self.unreached)

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        """Post transfers; return the receives, for ``finish``. Raises ``Broken``.

        Tensors must be contiguous. A tensor that is sent must not change until the next ``vote`` has succeeded.
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
        """Post sends; return them, to be kept alive by the caller until it knows that they have arrived.

        Raises ``Broken``.
        """
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
        """Keep these sends alive until the next vote, as ``start`` does."""
        self._sent += works

    def drain(self, receives: Sequence[Any]) -> None:
        """Wait, after an abort, until none of these receives writes into its tensor any more."""
        if receives:
            wait_for(receives, failed=lambda error: None, over=lambda: True)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Group transfers for NCCL, which needs those that depend on each other in one call (untested here)."""
        grouped = isinstance(self._backend, getattr(dist, "ProcessGroupNCCL", ()))
        if grouped:
            self._backend._start_coalescing(torch.device("cuda"))
        yield
        if grouped:
            self._sent.append(self._backend._end_coalescing(torch.device("cuda")))

    def finish(self, receives: Iterable[Any]) -> None:
        """Wait for posted receives. Raises ``Broken`` if one fails or the group is aborted.

        All are waited for even if one fails, so that none writes into its tensor later.
        """
        errors: list[Exception] = []

        def failed(error: Exception) -> None:
            errors.append(error)
            self._give_up(error)  # at once: it makes the other receives fail too, instead of waiting in vain

        if receives != []:
            wait_for(receives, failed=failed, over=lambda: self._broken is not None)
        if errors and not isinstance(errors[0], RuntimeError | Broken):
            raise errors[0]  # an error of our own, not a lost peer
        if errors:
            raise Broken(self._broken or "") from errors[0]
        self.check()

    def sum(self, values: torch.Tensor, ranks: Sequence[int] | None = None) -> None:
        """Add up everybody's values, or those of some ranks, in place. Raises ``Broken``.

        The order of ranks is the order of addition, so the result is the same everywhere. Every worker hears from
        every other: when it returns, all have come this far.
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
        """Do a ``sum``, and free all sends posted before it.

        Each worker votes after it has finished its receives. So a worker that has heard everybody's ballot knows that
        all it had sent before has arrived. Raises ``Broken``.
        """
        before = len(self._sent)
        self.sum(ballot)
        del self._sent[:before]

    def _give_up(self, error: Exception) -> Broken:
        """Abort the group after an error of the backend; return the error to raise."""
        self.abort(f"lost touch with a peer: {str(error).splitlines()[0][:200]}")
        assert self._broken is not None
        return Broken(self._broken)

    # --- the end of a group ----------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End the group, from any thread. Everyone who waits in it, here or on a peer, fails at once.

        Shutting down a socket (not closing it) wakes up Gloo's threads on both ends, and leaves the descriptor to
        Gloo, so that nobody else can get the same number meanwhile.
        """
        if self._broken is None:
            self._broken = reason
        if self._watch is not None:
            self._watch.set()
        for number, inode in self._sockets.items():
            shut_down(number, inode)
        if self._backend is not None and not self._sockets:
            self._backend.abort()  # NCCL: untested here

    def look_for_vanished(self) -> None:
        """Abort the group once a peer's machine has vanished, in case no coordinator can tell (see ``silence``)."""
        seconds = silence.seconds_allowed()

        def vanished(numbers: Collection[int]) -> None:
            self.unreached = _members_at(self.generation, {peer_address(number) for number in numbers})
            self.abort(f"{' and '.join(self.unreached) or 'a peer'} cannot be reached for {seconds:g} s")

        self._watch = silence.watch(list(self._sockets), seconds, vanished)

    def close(self) -> None:
        """End the group. Its memory is freed with the object, which takes Gloo ten milliseconds."""
        self.abort("closed")


def alone() -> Group:
    """Return a group of one worker."""
    return Group(membership.Solo().regroup(membership.Standing()), 0)


class _Aside(Group):
    """A group of one worker that breaks when the group around it does."""

    def __init__(self, group: Group) -> None:
        super().__init__(membership.Solo().regroup(membership.Standing()), 0)
        self._around = group

    def check(self) -> None:
        self._around.check()


def aside(group: Group) -> Group:
    """Return a group of one for a member of ``group``. Its ``check`` raises ``Broken`` when ``group`` is broken."""
    return _Aside(group)


def form(generation: Generation, worker: str, store: membership.Store | None, device: torch.device) -> Group:
    """Connect the members of a generation; return the group. Raises ``Broken`` if the generation ends meanwhile.

    Connecting cannot be interrupted: if a peer has died, Gloo waits for its call. So a separate thread connects,
    and is abandoned if the generation ends.
    """
    rank = generation.rank_of(worker)
    if len(generation.members) == 1:
        return Group(generation, rank)
    assert store is not None
    done = threading.Event()
    result: list[Group | Exception] = []

    def connect() -> None:
        try:
            result.append(_connect(generation, rank, store, device, door))
        except Exception as e:  # whatever the backend raises, the generation cannot form
            result.append(e)
        done.set()

    door = Doorkeeper(member.address for member in generation.members)
    threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
    calls = reach.Calls(seconds=silence.heartbeat())
    next_look = time.monotonic() + CALL_SECONDS
    with PULSE.at("wait"):
        while not done.wait(LOOK_SECONDS):
            if store.closed:
                raise Broken("the generation ended while it formed")
            if (now := time.monotonic()) >= next_look:
                next_look = now + CALL_SECONDS
                if silent := calls.look(door.unanswered(), now):
                    unreached = _members_at(generation, silent)
                    raise Broken(f"{' and '.join(unreached)} cannot be reached", unreached=unreached)
    if isinstance(result[0], Group):
        result[0].look_for_vanished()  # not in the thread: in an abandoned group nobody would end the look
        return result[0]
    refused = _members_at(generation, door.named_in(str(result[0])))
    raise Broken(f"the generation could not form: {result[0]}", refused=refused)


def _members_at(generation: Generation, addresses: Collection[str]) -> tuple[str, ...]:
    """Return the members whose machines have these addresses."""
    return tuple(member.worker for member in generation.members if member.address in addresses)


def _connect(
    generation: Generation, rank: int, store: membership.Store, device: torch.device, door: Doorkeeper
) -> Group:
    """Make the c10d process group, and find the sockets that it has opened, so that they can be shut down."""
    size = len(generation.members)
    if device.type == "cuda":  # untested here
        nccl = dist.ProcessGroupNCCL(_Rendezvous(store), rank, size, dist.ProcessGroupNCCL.Options())
        return Group(generation, rank, nccl)
    address = generation.members[rank].address
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = CONNECT  # also that of a wait which is not given its own
    try:
        group = Group(generation, rank, dist.ProcessGroupGloo(_Rendezvous(store, door), rank, size, options))
        group._sockets = door.formed()
    finally:
        door.close()
    return group
