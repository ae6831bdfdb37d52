"""Keeps the coordinator's process alive, at one address.

The agent owns the listening socket, so a killed coordinator comes back where it was, and whoever
connects in between only waits a little.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import sys
from collections.abc import Callable

from holdfast.errors import UsageError

LOOPBACK = "127.0.0.1"


class CoordinatorKeeper:
    """The coordinator's address, and its process if this machine is the one to run it."""

    def __init__(self, endpoint: str) -> None:
        """Binds the endpoint if it is one of this machine's addresses, else leaves it to another agent."""
        host, _, port = endpoint.rpartition(":")
        if endpoint and not (host and port.isdigit()):
            raise UsageError(f"'{endpoint}' is not host:port", hint="as in head:29700")
        try:
            found = socket.getaddrinfo(host or LOOPBACK, int(port or 0), type=socket.SOCK_STREAM)
        except OSError as e:
            raise UsageError(f"cannot resolve '{host}': {e}", hint="check --rdzv-endpoint") from e
        family, _, _, _, address = found[0]
        self.address = (str(address[0]), int(address[1]))
        self.process: asyncio.subprocess.Process | None = None
        self.port_taken = False
        self._listener: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(address)
            self._listener.listen(1024)
            self.address = (str(address[0]), int(self._listener.getsockname()[1]))
        except OSError as e:  # another machine's address, or another agent of this run was here first
            self.port_taken = e.errno == errno.EADDRINUSE
            self._listener.close()
            self._listener = None

    @property
    def is_ours(self) -> bool:
        return self._listener is not None

    async def keep(self, options: list[str], token: str, restarted: Callable[[], None]) -> None:
        """Starts the coordinator, and starts it again whenever it dies; returns when it is done."""
        assert self._listener is not None
        for start in itertools.count():
            words = ["--first-host", str(1000 * start), *options]
            self.process = await start_coordinator(self._listener.fileno(), words, token)
            if await self.process.wait() == 0:
                return
            restarted()

    async def let_end(self, patience: float | None) -> None:
        """It ends by itself when no host is left; until then it serves the other machines."""
        if self.process is None:
            return
        try:
            await asyncio.wait_for(self.process.wait(), patience)
        except (TimeoutError, asyncio.CancelledError):
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


async def start_coordinator(listener: int, options: list[str], token: str) -> asyncio.subprocess.Process:
    """Start a coordinator that serves on this listening descriptor."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast.cluster.coordinator", "--listener", str(listener), *options),
        env={**os.environ, "HOLDFAST_TOKEN": token},
        pass_fds=[listener],
    )
