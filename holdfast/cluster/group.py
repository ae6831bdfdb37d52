"""The workers of one generation, as they talk to each other: point-to-point exchange that any thread can abort.

A group is made for one generation, and thrown away with it. A worker that gives up a generation closes its connections.
That frees this worker, and every peer that is blocked on it, within milliseconds, even if the peer is hung or its host
has vanished.

Nobody ever waits for a *send*. Waiting is not needed: a vote that succeeds proves that everything sent before it has
arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.cluster import membership, tags, talk
from holdfast.cluster.butterfly import Meet
from holdfast.cluster.membership import Generation
from holdfast.cluster.pulse import PULSE
from holdfast.cluster.talk import Shared, Transfer, add_up, in_rounds
from holdfast.cluster.team import ALONE, Team
from holdfast.errors import Broken


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Wait for its end. Raises ``RuntimeError`` if it has failed; it must, once the backend is aborted."""


class Backend(Protocol):
    """The connections of a group: ``links.member_links.Links``, or c10d's process group for NCCL."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Post a send; return what keeps its memory alive. Raises ``RuntimeError``."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Post a receive. Raises ``RuntimeError``."""
        ...

    def abort(self) -> None:
        """End all transfers."""


class Group:
    """The connections of this worker to the others of one generation.

    ``backend``: None for a group of one. ``team``: where workers are teams, this rank's mates; the group then has the
    same rank of each team.
    """

    def __init__(self, generation: Generation, rank: int, backend: Any = None, *, team: Team = ALONE) -> None:
        self.generation = generation
        self.rank = rank
        self.team = team
        self.size = len(generation.members)
        self._backend = backend
        self.bytes = 0  # bytes that this worker has sent
        self.messages = 0  # messages that this worker has sent
        self._sent: list[Any] = []  # sends, whose tensors are kept alive until a vote proves that they have arrived
        self._broken: str | None = None  # the reason why the group was aborted

    # --- communication ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``Broken`` if the generation is over. It is cheap: call it between pieces of work."""
        PULSE.sign()
        if self._broken is not None:
            raise self._error()

    def gate(self) -> None:
        """Do what ``check`` does, and raise ``Broken`` on all ranks of a team at the same gate."""
        with self.team.together("a gate"):
            self.check()

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of all that train."""
        return self.rank == 0 and self.team.leads

    def _error(self) -> Broken:
        return Broken(self._broken or "", unreached=self.unreached, refused=getattr(self._backend, "refused", ()))

    @property
    def unreached(self) -> tuple[str, ...]:
        """Members whose machines have vanished, as far as this worker can tell."""
        return getattr(self._backend, "unreached", ())

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
                    self._count(tensor)
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
                    self._count(tensor)
        except RuntimeError as e:
            raise self._give_up(e) from e
        return works

    def _count(self, tensor: torch.Tensor) -> None:
        self.bytes += tensor.nbytes
        self.messages += 1

    def keep(self, works: Sequence[Any]) -> None:
        """Keep these sends alive until the next vote, as ``start`` does."""
        self._sent += works

    def drain(self, receives: Sequence[Any]) -> None:
        """Wait, after an abort, until none of these receives writes into its tensor any more."""
        for work in receives:
            try:
                work.wait()
            except RuntimeError:
                pass

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

        All are waited for even if one fails, so that none writes into its tensor later. A generator may decide after
        each receive what to wait for next.
        """
        failed: RuntimeError | None = None
        with PULSE.at("wait"):
            for work in receives:
                try:
                    work.wait()
                except RuntimeError as e:
                    failed = failed or e
                    self._give_up(e)  # at once: it makes the other receives fail too, instead of waiting in vain
        if failed is not None:
            raise self._error() from failed
        self.check()

    def sum(self, values: torch.Tensor, ranks: Sequence[int] | None = None, *, tag: int = tags.SUM) -> None:
        """Add up everybody's values, or those of some ranks, in place. Raises ``Broken``.

        The result is the same everywhere. It has something of every worker: when it returns, all have come this far.
        The order of addition depends on the number of workers. So where results must not, one worker has each number,
        and the others have zeros.
        """
        everybody = sorted(range(self.size) if ranks is None else ranks)
        if len(everybody) <= talk.DIRECT:
            self._sum_directly(values, everybody, tag)
            return

        def take(heard: torch.Tensor, meet: Meet) -> None:
            (values.copy_ if meet.is_result else values.add_)(heard)

        in_rounds(
            self,
            everybody,
            say=lambda meet: values.clone(),
            room=lambda meet: torch.empty_like(values),
            take=take,
            tag=tag,
        )

    def _sum_directly(self, values: torch.Tensor, everybody: Sequence[int], tag: int) -> None:
        """Tell everybody, and add in the order of ranks."""
        others = [rank for rank in everybody if rank != self.rank]
        mine = values.clone()
        heard = {rank: torch.empty_like(values) for rank in others}
        receives = self.start([(rank, mine, tag) for rank in others], [(rank, heard[rank], tag) for rank in others])
        self.finish(receives)
        heard[self.rank] = mine
        values.copy_(heard[everybody[0]])
        for rank in everybody[1:]:
            values.add_(heard[rank])

    def vote(self, ballot: torch.Tensor, shared: Shared | None = None) -> list[float]:
        """Sum everybody's ballots, in place, and values of which each rank has some; free all sends posted before it.

        Returns the sums of the ``shared`` values. Each worker votes after it has finished its receives. So a worker
        that has heard everybody's ballot knows that all it had sent before has arrived. Raises ``Broken``.
        """
        before = len(self._sent)
        if shared is None:
            self.sum(ballot)
        sums = [] if shared is None else add_up(self, shared, ballot, tag=tags.SUM)
        del self._sent[:before]
        return sums

    def voted(self) -> None:
        """Free all sends posted before a vote that this rank's team has seen succeed."""
        self._sent.clear()

    def gather(self) -> None:
        """Wait until all members are in this group. Raises ``Broken`` if the generation ends before."""
        self.sum(torch.zeros(1), tag=tags.GATHER)

    def _give_up(self, error: Exception) -> Broken:
        """Abort the group after an error of the backend; return the error to raise."""
        self.abort(str(error).splitlines()[0][:200] if str(error) else "lost touch with a peer")
        return self._error()

    # --- the end of a group ----------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End the group, from any thread. Everyone who waits in it, here or on a peer, fails at once."""
        if self._broken is None:
            self._broken = reason
        if self._backend is not None:
            self._backend.abort()

    def close(self) -> None:
        """End the group."""
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
