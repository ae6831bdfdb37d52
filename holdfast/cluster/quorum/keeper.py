"""The keeper of an elected coordinator: an agent's lease, its part in the election, and the process if it is elected.

It has the same face as ``cluster.keeper.CoordinatorKeeper``, which keeps the coordinator of a run without etcd.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from holdfast.cluster import keeper
from holdfast.cluster.events import Events
from holdfast.cluster.quorum.election import (
    Action,
    Campaign,
    CoordinatorEnded,
    Election,
    EtcdSilent,
    Event,
    Follow,
    LeaseGone,
    PortRefused,
    Resign,
    Rested,
    Revoke,
    Seen,
    Serve,
    StepDown,
)
from holdfast.cluster.quorum.etcd import FAILURES, Etcd, EtcdSettings, EtcdUnreachable, created_at, put
from holdfast.cluster.quorum.records import Address, Holder, Keys
from holdfast.errors import UsageError

LEASE_SECONDS = 2  # the shortest that etcd grants with its default settings
BEATS = 4  # signs of life within one lease
AGAIN_SECONDS = 0.1  # between two tries while etcd does not answer
RESIGNS = "holdfast: most workers do not reach the coordinator here: this machine leaves the role to another"


class ElectedKeeper:
    """An agent's candidacy for the coordinator's role.

    ``agent``: its incarnation. ``address``: this machine's, for the others; "": as etcd sees it. ``patience``: seconds
    that etcd may take to answer at the start. ``say`` shows a line. ``moved`` is called when the coordinator is
    somewhere else.
    """

    serves = True  # ``keep`` has to run
    stays = False  # a leaving agent gives the role back, and need not stay for it
    port_taken = False

    def __init__(
        self,
        settings: EtcdSettings,
        *,
        run: str,
        agent: str,
        address: str,
        patience: float,
        events: Events,
        say: Callable[[str], None],
        moved: Callable[[], None],
    ) -> None:
        self.address: Address | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.master_port = 0
        self._settings, self._keys, self._agent = settings, Keys(run=run), agent
        self._own_address = address or _address_towards(settings.endpoints)
        self._patience, self._told, self._say, self._moved = patience, events, say, moved
        self._etcd = Etcd(settings)
        self._election = Election(agent=agent, lease=0)
        self._lease = 0
        self._void = False  # the lease is not to be used any more, whatever etcd says
        self._host = ""  # this agent's number, once it has one
        self._shown = ""  # the same, as etcd knows it
        self._listener: socket.socket | None = None
        self._happened: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = asyncio.Event()  # the coordinator's process does not run
        self._ended.set()
        self._epoch = 0
        self._words: list[str] = []
        self._token = ""
        self._restarted: Callable[[], None] = lambda: None
        self._following: asyncio.Task[None] | None = None  # the watch, at one member of etcd
        self._looked = 0.0  # when it was last begun anew because the coordinator could not be reached
        self._waiting: asyncio.Task[None] | None = None  # for the end of the coordinator's process

    @property
    def is_ours(self) -> bool:
        """Whether this agent runs the coordinator at the moment."""
        return self._election.serves

    # --- the agent's calls -----------------------------------------------------------------------

    async def keep(self, words: list[str], token: str, restarted: Callable[[], None]) -> None:
        """Take part in the election until this is cancelled. ``words``: the coordinator's command line.

        Raises ``UsageError`` if etcd refuses this client, or does not answer at the start.
        """
        self._words, self._token, self._restarted = words, token, restarted
        async with self._etcd:
            await self._enter()
            jobs = [self._stay_alive(), self._watch(), self._act()]
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(job)

    def numbered(self, host: int) -> None:
        """Take in the number of this agent's host: a new coordinator knows by it whose workers may come back."""
        self._host = str(host)

    def unreached(self, address: Address, error: OSError) -> None:
        """Take in that the coordinator could not be reached at this address. It may be somewhere else by now."""
        if isinstance(error, ConnectionRefusedError):
            self._happened.put_nowait(PortRefused(address=address))
        now = time.monotonic()
        if self._following is not None and now - self._looked > LEASE_SECONDS:
            self._looked = now
            self._following.cancel()  # its connection may have died in silence: look anew

    async def let_end(self, patience: float | None, lingers: Callable[[], None]) -> None:
        """Give the role back, after a moment in which a run that is over ends by itself."""
        self._election.over = True
        try:
            await asyncio.wait_for(self._ended.wait(), keeper.LINGER_SECONDS)
        except TimeoutError:
            pass
        self.stop()
        await self._ended.wait()
        try:
            async with Etcd(self._settings) as etcd:  # ``keep``'s own may be in the middle of something
                await etcd.revoke(self._lease)
        except FAILURES:
            pass  # then the lease runs out, if there is one

    def stop(self) -> None:
        """Kill the coordinator's process for good."""
        self._election.over = True
        self.kill()

    def kill(self) -> None:
        """Kill the coordinator's process, if it runs here."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def close(self) -> None:
        """Close the listening socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- side by side ----------------------------------------------------------------------------

    async def _enter(self) -> None:
        """Get a lease. Raises ``UsageError`` if etcd does not answer within the patience."""
        began = time.monotonic()
        while not self._lease:
            try:
                await self._renew()
            except EtcdUnreachable as e:
                if time.monotonic() - began > self._patience:
                    raise UsageError(str(e)) from e
                await asyncio.sleep(AGAIN_SECONDS)
        self._election = Election(agent=self._agent, lease=self._lease)

    async def _renew(self) -> None:
        """Get a new lease, and show under it that this host is alive."""
        self._lease = await self._etcd.grant(LEASE_SECONDS)
        await self._show_host()

    async def _show_host(self) -> None:
        host = self._host
        await self._etcd.transact([], [put(self._keys.host(self._agent), host, lease=self._lease)])
        self._shown = host

    async def _replace_lease(self) -> None:
        """Give up the lease, and with it the role if this agent has it, and get another one."""
        await self._etcd.revoke(self._lease)
        await self._renew()
        self._void = False
        self._happened.put_nowait(LeaseGone(lease=self._lease))

    async def _stay_alive(self) -> None:
        """Keep the lease alive; get another if it is gone. An etcd that is down is waited for."""
        asked, answered, silent = self._etcd.member, time.monotonic(), False
        while True:
            await asyncio.sleep(LEASE_SECONDS / BEATS)
            if asked != self._etcd.member and self._following is not None:
                asked = self._etcd.member
                self._following.cancel()  # the member that it asked may be cut off, and would never tell it
            try:
                await self._show_life()
                answered, silent = time.monotonic(), False
            except FAILURES as e:
                if not silent:
                    self._say(f"holdfast: {e}; training goes on, but nobody can join or be replaced until it answers")
                silent = True
                if self.is_ours and time.monotonic() - answered > self._patience:
                    self._give_up_role()

    async def _show_life(self) -> None:
        """Keep the lease alive, or get another, and show the number of this agent's host."""
        if self._void or not await self._etcd.keep_alive(self._lease):
            await self._replace_lease()
            self._told.write("lease-gone", agent=self._agent)
        elif self._shown != self._host:
            await self._show_host()

    def _give_up_role(self) -> None:
        """Stop the coordinator here: nothing that it decides counts. Whoever waits for it, waits for a bounded time."""
        patience = f"{self._patience:g} s"
        self._say(
            f"holdfast: etcd has not answered for {patience}: this machine gives up the coordinator's role; training "
            f"goes on, but a change waits {patience} more for a coordinator, and then ends the run here"
        )
        self._void = True
        self._happened.put_nowait(EtcdSilent())

    async def _watch(self) -> None:
        """Follow the key ``coordinator``, at the member of etcd that answers."""
        while True:
            self._following = asyncio.create_task(self._follow())
            try:
                await asyncio.wait([self._following])
            finally:
                self._following.cancel()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _follow(self) -> None:
        try:
            async for entry in self._etcd.watch(self._keys.coordinator):
                holder = None if entry is None else Holder.of_text(entry.value, entry.created)
                self._happened.put_nowait(Seen(holder=holder))
        except FAILURES:
            pass  # it begins again

    async def _act(self) -> None:
        """Do what the election says."""
        while True:
            event = await self._happened.get()
            for action in self._election.step(event, time.monotonic()):
                while True:
                    try:
                        await self._do(action)
                        break
                    except FAILURES:
                        await asyncio.sleep(AGAIN_SECONDS)

    async def _do(self, action: Action) -> None:
        if isinstance(action, Campaign):
            await self._campaign()
        elif isinstance(action, Serve):
            await self._serve(action.epoch)
        elif isinstance(action, StepDown):
            self.kill()
            await self._ended.wait()
            self.close()
        elif isinstance(action, Revoke):
            await self._etcd.revoke(action.lease)
        elif isinstance(action, Resign):
            self._say(RESIGNS)
            self._void = True  # with the next sign of life it gets another lease
            asyncio.get_running_loop().call_later(action.rest, self._happened.put_nowait, Rested())
        elif isinstance(action, Follow) and action.address != self.address:
            self.address = action.address
            self._moved()

    async def _campaign(self) -> None:
        """Try to get the role. The watch tells who has it then."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._own_address else socket.AF_INET
            self._listener = socket.create_server((self._own_address, 0), family=family, backlog=1024)
        port = int(self._listener.getsockname()[1])
        holder = Holder(agent=self._agent, lease=self._lease, address=(self._own_address, port))
        self.master_port = keeper.free_port(self._own_address)
        key = self._keys.coordinator
        await self._etcd.transact([created_at(key, 0)], [put(key, holder.to_text(), lease=self._lease)])

    async def _serve(self, epoch: int) -> None:
        """Start the coordinator's process, and wait for its end beside everything else."""
        assert self._listener is not None
        if epoch == self._epoch:
            self._restarted()
        self._epoch = epoch
        words = ["--etcd", ",".join(self._settings.endpoints), "--etcd-run", self._keys.run]
        words += ["--epoch", str(self._epoch), *self._words, "--master-port", str(self.master_port)]
        self.process = await keeper.start_coordinator(self._listener.fileno(), words, self._token)
        self._ended.clear()
        self._told.write("elected", agent=self._agent, epoch=self._epoch, address=self.address)
        self._waiting = asyncio.create_task(self._wait_for(self.process.wait()))

    async def _wait_for(self, end: Awaitable[int]) -> None:
        code = await end
        self._ended.set()
        self._happened.put_nowait(CoordinatorEnded(code=code))


def _address_towards(endpoints: Sequence[str]) -> str:
    """Return this machine's address, as a host of another machine sees it when it is called.

    The first endpoint that there is a way to says it: one member of etcd may be gone for good, and its name with it.
    """
    why = ""
    for endpoint in endpoints:
        parts = urlsplit(endpoint)
        try:
            family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: the kernel only looks up the route
                return str(probe.getsockname()[0])
        except OSError as e:
            why = why or f"cannot resolve '{parts.hostname}': {e}"
    raise UsageError(why, hint="check --rdzv-endpoint")
