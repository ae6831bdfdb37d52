"""The keeper of the coordinator's process: it restarts the coordinator, always at the same address.

The agent owns the listening socket and hands it to each coordinator process. So a killed coordinator comes back at
the same address, and a connection made in between only waits a little.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from holdfast.cluster import signals
from holdfast.errors import UsageError

LOOPBACK = "127.0.0.1"  # the address of a run on one machine
LINGER_SECONDS = 0.5  # a coordinator that serves nobody else has ended by then
Resolve = Callable[..., list[Any]]  # ``socket.getaddrinfo``
HOSTS_PER_START = 1000  # host numbers for each start of the coordinator: it forgets the ones it gave before


class Keeper(Protocol):
    """What an agent needs to know of the coordinator, and can do for it.

    There are two: ``CoordinatorKeeper`` for one coordinator at a fixed address, and ``quorum.keeper.ElectedKeeper`` for
    a role that goes from agent to agent.
    """

    address: tuple[str, int] | None  # where the coordinator listens; None: nobody knows yet
    process: asyncio.subprocess.Process | None  # the coordinator's, if it runs here
    master_port: int  # a port for the scripts' MASTER_PORT, if the coordinator is ours
    port_taken: bool  # another program, or another agent of this run, listens at the endpoint

    @property
    def serves(self) -> bool:
        """Whether ``keep`` has to run on this machine."""
        ...

    @property
    def is_ours(self) -> bool:
        """Whether this agent runs the coordinator at the moment."""
        ...

    @property
    def stays(self) -> bool:
        """Whether this agent keeps the coordinator for the others when its own workers are gone."""
        ...

    async def keep(self, options: list[str], token: str, restarted: Callable[[], None]) -> None:
        """Run the coordinator on this machine, whenever that is this agent's task."""
        ...

    def numbered(self, host: int) -> None:
        """Take in the number that this agent's host has got."""
        ...

    def unreached(self, address: tuple[str, int], error: OSError) -> None:
        """Take in that the coordinator could not be reached at this address."""
        ...

    async def let_end(self, patience: float | None, lingers: Callable[[], None]) -> None:
        """Let the coordinator end, or give its role back: this agent ends."""
        ...

    def stop(self) -> None:
        """Kill the coordinator's process for good."""
        ...

    def kill(self) -> None:
        """Kill the coordinator's process, if it runs here. It is started again."""
        ...

    def close(self) -> None:
        """Close the listening socket."""
        ...


class CoordinatorKeeper:
    """The coordinator's address, and its process if this machine is the one to run it."""

    def __init__(self, endpoint: str, resolve: Resolve = socket.getaddrinfo) -> None:
        """Bind the endpoint ("host:port", or "") if it is an address of this machine, else leave it to another agent.

        Raises ``UsageError`` for an endpoint that is malformed or cannot be resolved.
        """
        host, _, port = endpoint.rpartition(":")
        if endpoint and not (host and port.isdigit()):
            raise UsageError(f"'{endpoint}' is not host:port", hint="as in head:29700")
        if endpoint and not 0 < int(port) < 2**16:
            raise UsageError(f"port {port} of '{endpoint}' is not between 1 and 65535", hint="as in head:29700")
        try:
            found = resolve(host or LOOPBACK, int(port or 0), type=socket.SOCK_STREAM)
        except OSError as e:
            raise UsageError(f"cannot resolve '{host}': {e}", hint="check --rdzv-endpoint") from e
        self._name, self._resolve = host, resolve
        self._asking: asyncio.Future[None] | None = None  # for the name's address
        family, _, _, _, address = found[0]
        self.address: tuple[str, int] | None = (str(address[0]), int(address[1]))
        self.process: asyncio.subprocess.Process | None = None
        self.port_taken = False  # another program, or another agent of this run, listens at the endpoint
        self._stopping = False  # it is not to be restarted any more
        self._over = asyncio.Event()  # it has ended for good
        self.master_port = 0  # a port for the scripts' MASTER_PORT, if the coordinator is ours
        self._listener: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(address)
            self._listener.listen(1024)
            self.address = (str(address[0]), int(self._listener.getsockname()[1]))
            self.master_port = free_port(str(address[0]))
        except OSError as e:  # the address of another machine, or another agent of this run has bound it
            self.port_taken = e.errno == errno.EADDRINUSE
            self._listener.close()
            self._listener = None

    @property
    def is_ours(self) -> bool:
        """Whether this agent runs the coordinator."""
        return self._listener is not None

    serves = stays = is_ours

    def numbered(self, host: int) -> None:
        """Do nothing: nobody else has to know."""

    def unreached(self, address: tuple[str, int], error: OSError) -> None:
        """Ask for the name's address again: a first machine that was started anew may have another one, as pods do."""
        if self._name and not self.is_ours and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().run_in_executor(None, self._ask, address[1])

    def _ask(self, port: int) -> None:
        """Take the address that the name has now. This may take long, and so has a thread of its own."""
        try:
            found = self._resolve(self._name, port, type=socket.SOCK_STREAM)[0][4]
        except OSError:
            return  # it is not known at the moment
        self.address = (str(found[0]), port)

    async def keep(self, options: list[str], token: str, restarted: Callable[[], None]) -> None:
        """Start the coordinator, and again whenever it dies; return when it has ended with code 0, or for ``stop``.

        ``restarted`` is called before each new start.
        """
        assert self._listener is not None
        try:
            for start in itertools.count():
                words = ["--first-host", str(HOSTS_PER_START * start), *options]
                self.process = await start_coordinator(self._listener.fileno(), words, token)
                if await self.process.wait() == 0 or self._stopping:
                    return
                restarted()
        finally:
            self._over.set()

    async def let_end(self, patience: float | None, lingers: Callable[[], None]) -> None:
        """Wait for the coordinator to end for good, and kill it after ``patience`` seconds (None: never).

        It ends by itself when no host is left. Until then it serves the other machines, and is restarted if it dies.
        ``lingers`` is called if that takes a while.
        """
        if self.process is None:
            return
        try:
            if not await self._is_over(LINGER_SECONDS):
                lingers()
                await self._is_over(patience)
        finally:  # also if this is cancelled
            self.stop()
        await self._over.wait()

    async def _is_over(self, seconds: float | None) -> bool:
        """Wait so long for the coordinator to end for good; return whether it has."""
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Kill the coordinator's process for good."""
        self._stopping = True
        self.kill()

    def kill(self) -> None:
        """Kill the coordinator's process, if it runs here."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def close(self) -> None:
        """Close the listening socket."""
        if self._listener is not None:
            self._listener.close()


def free_port(address: str) -> int:
    """Return a TCP port of an address of this machine that nobody listens on at the moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


async def start_coordinator(listener: int, options: list[str], token: str) -> asyncio.subprocess.Process:
    """Start a coordinator that serves on this listening descriptor."""
    with signals.held():
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast.cluster.coordinator", "--listener", str(listener), *options),
            env={**os.environ, "HOLDFAST_TOKEN": token},
            pass_fds=[listener],
        )
