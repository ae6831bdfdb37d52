"""The coordinator's side of etcd: what it knows when it begins, and the fence around its decisions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.cluster.keeper import HOSTS_PER_START
from holdfast.cluster.membership import machine_of
from holdfast.cluster.partition import why_resign
from holdfast.cluster.quorum.etcd import FAILURES, Entry, Etcd, Operation, changed_at, created_at, delete, put
from holdfast.cluster.quorum.records import Decided, Keys, decided_of, decided_text
from holdfast.cluster.register import Sent

AGAIN_SECONDS = 0.1  # between two tries while etcd does not answer, and between two looks at who is alive
RESIGN_SECONDS = 4.0  # for which hosts stay alive in etcd that do not come: one that is lost does so for 2.4 s
# Messages that decide something. An old coordinator must not send them; heartbeats and welcomes do no harm.
DECISIONS = frozenset({"generation", "regroup", "pause", "dismiss", "kill", "stop", "finishing", "clear", "again"})


class Deposed(Exception):
    """Another coordinator has taken this one's place."""


class Resigned(Exception):
    """This coordinator should leave its role to another machine. The text says why."""


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """What etcd knows of the run when a coordinator begins.

    ``decided`` is None for a new run; also if no agent of the last generation is alive any more: then the run
    begins again, from its checkpoint if it has one.
    """

    first_host: int  # the first number that it may give to a host
    decided: Decided | None
    newest: int  # the number of the last generation, also if nobody of it is alive
    alive: frozenset[int]  # numbers of the hosts whose agents keep their leases alive


class Fence:
    """Lets a coordinator's decisions through as long as ``epoch`` is the present one."""

    def __init__(self, etcd: Etcd, keys: Keys, *, epoch: int) -> None:
        self._etcd, self._keys = etcd, keys
        self._ours = created_at(keys.coordinator, epoch)
        self._members: Counter[int] = Counter()  # workers by machine, of the last generation that etcd has

    async def open(self) -> Recalled:
        """Read what the coordinators before have left. Raises ``Deposed``."""
        keys, etcd = self._keys, self._etcd
        while True:
            try:
                term, generation = await etcd.get(keys.term), await etcd.get(keys.generation)
                hosts = await etcd.get_all(keys.hosts)
                number = 0 if term is None else int(term.value) + 1
                before = changed_at(keys.term, 0 if term is None else term.changed)
                if await etcd.transact([self._ours, before], [put(keys.term, str(number))]):
                    break
                await self.confirm()  # a lost answer may have raised the term already: then this one is still ours
            except FAILURES:
                await asyncio.sleep(AGAIN_SECONDS)
        alive = _numbers(hosts)
        known = None if generation is None else decided_of(generation.value)
        newest = 0 if known is None else known.generation.number
        if known is not None and not alive.intersection(machine_of(name) for name in known.generation.workers):
            known = None
        self._members = _by_machine(known)
        return Recalled(first_host=HOSTS_PER_START * number, decided=known, newest=newest, alive=alive)

    async def confirm(self, decided: Decided | None = None) -> None:
        """Make sure that this coordinator holds the role; commit a new generation, if there is one.

        Waits while etcd does not answer. Raises ``Deposed``.
        """
        await self._commit([] if decided is None else [put(self._keys.generation, decided_text(decided))])
        self._members = self._members if decided is None else _by_machine(decided)

    async def hear(self, heard: Callable[[], Collection[int]], seconds: float) -> None:
        """Wait while another machine may reach more members. Etcd is asked only if few are heard.

        It must not be longer in doubt than so many ``seconds``. Nothing may be decided before: another coordinator goes
        on from the last generation in etcd. Hosts that are lost are soon forgotten there. Raises ``Resigned``.
        """
        since = None
        while why_resign(self._members, heard=heard(), alive=self._members):
            try:
                alive = await self._alive()
            except FAILURES:
                since = None  # etcd may give everybody a new lease's time when it is back
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            reason, now = why_resign(self._members, heard=heard(), alive=alive), time.monotonic()
            if not reason:
                return
            since = now if since is None else since
            if now - since > seconds:
                raise Resigned(reason)
            await asyncio.sleep(AGAIN_SECONDS)

    async def end(self) -> None:
        """Forget the run: it is over. Raises ``Deposed``."""
        await self._commit([delete(self._keys.generation)])

    async def _commit(self, then: Sequence[Operation]) -> None:
        while True:
            try:
                if await self._etcd.transact([self._ours], then):
                    return
                raise Deposed
            except FAILURES:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _alive(self) -> frozenset[int]:
        """Return the hosts whose agents keep their leases alive. Raises one of ``FAILURES``."""
        return _numbers(await self._etcd.get_all(self._keys.hosts))


def _numbers(hosts: Mapping[str, Entry]) -> frozenset[int]:
    return frozenset(int(entry.value) for entry in hosts.values() if entry.value)


def _by_machine(decided: Decided | None) -> Counter[int]:
    return Counter() if decided is None else Counter(machine_of(name) for name in decided.generation.workers)


class FencedOutbox:
    """Messages of a coordinator, in their order. Decisions, and what follows them, wait for the fence.

    ``carry_out`` sends messages. Heartbeats never wait, so that nobody misses a coordinator whose etcd is down.
    ``heard`` tells which hosts are connected; if they are few for so many ``seconds``, it is time to resign.
    """

    def __init__(
        self,
        carry_out: Callable[[Iterable[Sent]], None],
        heard: Callable[[], Collection[int]],
        seconds: float = RESIGN_SECONDS,
    ) -> None:
        self._carry_out, self._heard, self._seconds = carry_out, heard, seconds
        self._waiting: deque[tuple[Sequence[Sent], Decided | None]] = deque()
        self._come = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, sent: Sequence[Sent], decided: Decided | None) -> None:
        """Send messages, now or later. ``decided``: the new generation that they announce."""
        if self._waiting or any(message.get("type") in DECISIONS for _, message in sent):
            beats = [each for each in sent if each[1].get("type") == "beat"]
            self._carry_out(beats)
            self._waiting.append(([each for each in sent if each[1].get("type") != "beat"], decided))
            self._empty.clear()
            self._come.set()
        else:
            self._carry_out(sent)

    async def send_all(self, fence: Fence) -> None:
        """Send what waits, each batch once the fence lets it through, for ever. Raises ``Deposed`` or ``Resigned``."""
        while True:
            await self._come.wait()
            while self._waiting:
                sent, decided = self._waiting[0]
                await fence.hear(self._heard, self._seconds)
                await fence.confirm(decided)
                self._carry_out(sent)
                self._waiting.popleft()
            self._come.clear()
            self._empty.set()

    async def emptied(self) -> None:
        """Wait until nothing waits any more."""
        await self._empty.wait()
