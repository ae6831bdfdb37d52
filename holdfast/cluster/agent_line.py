"""The agent's line to the coordinator: one connection, made again whenever it is lost."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from holdfast.cluster import wire
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.keeper import Keeper
from holdfast.cluster.wire import Message
from holdfast.errors import HoldfastError, UsageError

START_SECONDS = 120.0  # for its own coordinator to answer: Python's modules may come from a slow file server


class Ears(Protocol):
    """What the line needs of its agent."""

    host: int | None  # the agent's number; None until the coordinator has given one

    def hello(self) -> Message:
        """Return all that a coordinator has to know of this agent and its workers."""
        ...

    def heard(self, message: Message) -> None:
        """Take in what the coordinator says."""
        ...

    def line(self, lost: str) -> None:
        """Take in that the coordinator is reached, or is not. ``lost``: its address; empty: it is reached."""
        ...

    def kill_stopped(self) -> None:
        """Kill workers that are stopped, for want of a coordinator who would ask for it."""
        ...


class AgentLine:
    """Keeps the connection to wherever the ``keeper`` says that the coordinator is."""

    def __init__(self, ears: Ears, keeper: Keeper, settings: AgentSettings) -> None:
        self._ears, self._keeper, self._settings = ears, keeper, settings
        self._writer: asyncio.StreamWriter | None = None  # None while there is no connection
        self._unsent: list[Message] = []  # messages since the last hello, while it is on its way
        self._heard = time.monotonic()  # when the coordinator was last heard, or waited for anew

    @property
    def is_open(self) -> bool:
        """Whether there is a connection at the moment."""
        return self._writer is not None

    @property
    def own_address(self) -> str:
        """This machine's address, as the coordinator reaches it. There has to be a connection."""
        assert self._writer is not None
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    def abort(self) -> None:
        """Drop the connection, to connect to where the coordinator is now."""
        if self._writer is not None:
            self._writer.transport.abort()

    def close(self) -> None:
        """Close the connection once all is sent."""
        if self._writer is not None:
            self._writer.close()

    def tell(self, message: Message) -> None:
        """Send a message, now or with the next hello."""
        if self._writer is None:
            self._unsent.append(message)  # the next hello says it, unless it is just being sent
        elif not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    async def stay_connected(self) -> None:
        """Connect again whenever the connection is lost. Raises ``HoldfastError`` if there is no coordinator."""
        since = time.monotonic()
        while True:
            address = self._keeper.address
            if address is None:
                self._nobody_elected(time.monotonic() - since)
                await asyncio.sleep(0.01)
                continue
            try:
                # TCP would try for minutes, although the network may be back much earlier: so try again soon.
                connecting = wire.connect(address, self._settings.token, self._hello, self._settings.tls)
                reader, self._writer = await asyncio.wait_for(connecting, 2 * wire.HANDSHAKE_SECONDS)
                self._connected()
                await self._hear(reader)
                since = time.monotonic()
            except wire.Refused as e:
                raise UsageError(f"the coordinator and this agent do not fit: {e}", hint=e.hint) from e
            except OSError as e:
                self._keeper.unreached(address, e)
                self._not_reached(time.monotonic() - since, e)
            self._writer, self._unsent = None, []
            self._ears.line(f"{address[0]}:{address[1]}")
            await asyncio.sleep(0.05)

    def _hello(self) -> Message:
        self._unsent = []
        return self._ears.hello()

    def _connected(self) -> None:
        """Send what had to be told since the hello, which is on its way already."""
        for message in self._unsent:
            self.tell(message)
        self._ears.line("")

    def _not_reached(self, seconds: float, error: OSError) -> None:
        """Raise ``HoldfastError`` if the first connection has failed for so long that there is no coordinator.

        A coordinator that was reached before may come back: this agent's own is started again if it hangs.
        """
        alone = time.monotonic() - self._heard
        if self._keeper.is_ours:
            if alone > START_SECONDS and self._ears.host is None:
                raise HoldfastError(
                    f"this machine's coordinator does not answer {START_SECONDS:g} s after its start",
                    hint="is Python's file system or this machine overloaded?",
                )
            if alone > START_SECONDS:
                self._heard = time.monotonic()
                self._keeper.kill()
            return
        if self._ears.host is not None:
            if alone > self._settings.patience:
                self._ears.kill_stopped()
            return
        assert self._keeper.address is not None
        host, port = self._keeper.address
        if self._keeper.port_taken and isinstance(error, wire.NotHoldfast):
            raise UsageError(f"port {port} is in use by another program", hint="choose another --rdzv-endpoint")
        if seconds > self._settings.patience:
            raise UsageError(
                f"no coordinator answers at {host}:{port} for {self._settings.patience:g} s",
                hint="start the first agent on that machine, with the same --rdzv-endpoint",
            )

    def _nobody_elected(self, seconds: float) -> None:
        """Raise ``UsageError`` if nobody has got the role for long. etcd's first answer may take the patience, too."""
        if seconds > 2 * self._settings.patience:
            raise UsageError(
                f"no coordinator was elected for {seconds:.0f} s", hint="does etcd answer, and all machines?"
            )

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the coordinator says, until it ends the run or the connection is lost."""
        while True:
            line = await self._line_of(reader)
            if not line.endswith(b"\n"):
                return
            message = wire.decode(line)
            self._ears.heard(message)
            if message["type"] == "stop":
                return

    async def _line_of(self, reader: asyncio.StreamReader) -> bytes:
        """Return the coordinator's next line. After a long silence it is hung: if it is ours, kill it to restart it."""
        try:
            line = await asyncio.wait_for(reader.readline(), 3 * self._settings.heartbeat_timeout)
            self._heard = time.monotonic()
            return line
        except TimeoutError:
            self._keeper.kill()
            raise
