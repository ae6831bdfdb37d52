"""The coordinator's process: sockets and timers around the roster, which makes all decisions.

It runs beside the first agent. No step waits for it: it is needed only to form generations.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from holdfast.cluster import signals, wire
from holdfast.cluster.events import Events
from holdfast.cluster.generations import RosterSettings
from holdfast.cluster.membership import Judge, new_incarnation
from holdfast.cluster.register import EVENTS, HANG_UP, Sent
from holdfast.cluster.roster import Connected, Disconnected, Event, Heard, Roster, Tick

STRANGERS = 128  # connections without a proven token at a time: a stranger cannot take more memory than that
LAST_SECONDS = 0.1  # wait before the sockets close, so that the last messages leave


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(RosterSettings):
    """Settings of the coordinator, which the agent passes on the command line."""

    token: str  # secret of the run
    judge: str = ""  # "module:function" of a ``Judge``, which reads the workers' standings
    events: str | None = None  # path of events.jsonl; None: write no events


class Coordinator:
    """Accepts connections that prove the token, and carries messages between the roster and its peers."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._events = Events(settings.events)
        roster = dataclasses.replace(settings, life=new_incarnation())
        self._roster = Roster(roster, judge=find_judge(settings.judge), now=time.monotonic())
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._next = 0  # the number of the next connection
        self._strangers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serve on a listening socket until the run is over, then end the process."""
        server = await asyncio.start_server(self._connected, sock=listener, limit=wire.SERVER_LIMIT)
        self._set_timer()
        async with server:
            await self._over.wait()
            await asyncio.sleep(LAST_SECONDS)
            os._exit(0)  # nothing is left to clean up, and asyncio would warn of open connections

    # --- events for the roster -------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from the handshake to its end."""
        if self._strangers >= STRANGERS:
            writer.close()
            return
        self._strangers += 1
        try:
            hello = await wire.accept(reader, writer, self._settings.token)
        except wire.Refused:
            writer.close()
            return
        finally:
            self._strangers -= 1
        connection, self._next = self._next, self._next + 1
        self._writers[connection] = writer
        self._step(Connected(connection=connection, hello=hello))
        try:
            await self._hear(connection, reader)
        finally:
            del self._writers[connection]
            writer.close()
            self._step(Disconnected(connection=connection))

    async def _hear(self, connection: int, reader: asyncio.StreamReader) -> None:
        """Pass a peer's messages to the roster, until the connection is closed or a line is no message."""
        while True:
            try:
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    return
                message = wire.decode(line)
            except OSError:
                return
            except ValueError as e:
                self._events.write("protocol-error", error=repr(e))
                return
            self._step(Heard(connection=connection, message=message))

    def _step(self, event: Event) -> None:
        """Give the roster an event, send what it returns, and set the timer to its next deadline."""
        self._carry_out(self._roster.step(event, time.monotonic()))
        if self._roster.stopped:
            self._over.set()
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer to the roster's next deadline. asyncio's clock is ``time.monotonic``, as the roster's."""
        if self._timer is not None:
            self._timer.cancel()
        if self._roster.stopped:
            return
        self._timer = asyncio.get_running_loop().call_at(self._roster.deadline, self._step, Tick())

    # --- messages from the roster ----------------------------------------------------------------

    def _carry_out(self, sent: Iterable[Sent]) -> None:
        """Send messages and write events. A message to thousands is one object, which is encoded once."""
        encoded: dict[int, bytes] = {}  # by the message's identity
        for recipient, message in sent:
            if recipient == EVENTS:
                self._events.write(**message)
                continue
            writer = self._writers.get(recipient)
            if writer is None or writer.is_closing():
                continue
            if message is HANG_UP:
                _hang_up(writer)
            else:
                if id(message) not in encoded:
                    encoded[id(message)] = wire.encode(message)
                writer.write(encoded[id(message)])


def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection: at once if the other side has not read everything, since it may never read."""
    if writer.transport.get_write_buffer_size():
        writer.transport.abort()
    else:
        writer.close()


def find_judge(name: str) -> Judge:
    """Import a ``Judge`` by its "module:function". Raises ``ImportError`` or ``AttributeError`` if there is none.

    It is passed by name, so that the cluster layer imports nothing that lies above it.
    """
    module, _, function = name.partition(":")
    judge: Judge = getattr(importlib.import_module(module), function)
    return judge


def main() -> None:
    """Run ``python -m holdfast.cluster.coordinator``: serve on a socket inherited from the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener", type=int, required=True)
    defaults = asdict(CoordinatorSettings(token=""))
    for name in [field.name for field in fields(CoordinatorSettings) if field.name != "token"]:
        kind = str if name == "events" else type(defaults[name])
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=defaults[name])
    arguments = vars(parser.parse_args())
    listener = socket.socket(fileno=arguments.pop("listener"))
    settings = CoordinatorSettings(token=os.environ["HOLDFAST_TOKEN"], **arguments)
    signals.leave_to_agent()  # both processes get a terminal's Ctrl-C

    async def serve() -> None:
        await Coordinator(settings).serve(listener)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
