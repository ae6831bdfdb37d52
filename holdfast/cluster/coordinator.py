"""The coordinator's process: sockets and timers around the roster, which makes all decisions.

It runs beside the first agent, or beside the one that was elected through etcd. No step waits for it: it is needed only
to form generations.
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

from holdfast import titles
from holdfast.cluster import signals, wire
from holdfast.cluster.events import Events
from holdfast.cluster.gate import Gate
from holdfast.cluster.generations import RosterSettings
from holdfast.cluster.membership import Judge, new_incarnation
from holdfast.cluster.quorum.election import DEPOSED, RESIGNED
from holdfast.cluster.quorum.etcd import Etcd, EtcdSettings
from holdfast.cluster.quorum.fence import RESIGN_SECONDS, Deposed, Fence, FencedOutbox, Recalled, Resigned
from holdfast.cluster.quorum.records import Keys
from holdfast.cluster.register import EVENTS, HANG_UP, Sent
from holdfast.cluster.roster import Connected, Disconnected, Event, Heard, Roster, Tick
from holdfast.cluster.tls import TlsSettings

LAST_SECONDS = 0.1  # wait before the sockets close, so that the last messages leave


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(RosterSettings):
    """Settings of the coordinator, which the agent passes on the command line."""

    token: str  # secret of the run
    judge: str = ""  # "module:function" of a ``Judge``, which reads the workers' standings
    events: str | None = None  # path of events.jsonl; None: write no events
    tls: TlsSettings | None = None  # None: no TLS
    etcd: str = ""  # etcd's addresses; empty: this coordinator is the only one, and nobody elects it
    etcd_run: str = ""  # the run's name in etcd
    epoch: int = 0  # the revision of etcd at which its agent got the role


@dataclass(kw_only=True)
class Meter:
    """What the coordinator has done so far: messages and bytes of both directions, and processor time.

    >>> meter = Meter(messages=3, bytes=700)
    >>> meter.count(100)
    >>> meter.messages, meter.bytes
    (4, 800)
    """

    messages: int = 0
    bytes: int = 0

    def count(self, size: int) -> None:
        """Count a message."""
        self.messages += 1
        self.bytes += size

    def read(self) -> dict[str, float]:
        """Return what it shows now."""
        cpu = 1000 * time.process_time()
        return {"coordinator_messages": self.messages, "coordinator_bytes": self.bytes, "coordinator_ms": cpu}


class Coordinator:
    """Carries messages between the roster and the peers that the gate lets in.

    With a ``fence``, messages that decide something wait until etcd has confirmed that this coordinator holds the role,
    and has stored the generation that they announce.
    """

    def __init__(
        self, settings: CoordinatorSettings, fence: Fence | None = None, recalled: Recalled | None = None
    ) -> None:
        self._settings = settings
        self._events = Events(settings.events)
        self._events.write("coordinator", pid=os.getpid(), epoch=settings.epoch)
        self._fence = fence
        resign = max(RESIGN_SECONDS, settings.heartbeat_timeout)
        self._fenced = FencedOutbox(self._carry_out, lambda: self._roster.hosts, resign)
        self._roster = Roster(settings, judge=find_judge(settings.judge), now=time.monotonic())
        if recalled is not None:
            self._roster.recall(recalled.decided, recalled.alive)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._meter = Meter()
        self._before_break = self._meter.read()  # what the meter showed before the generation broke
        self._next = 0  # the number of the next connection
        self._timer: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serve on a listening socket until the run is over, then end the process."""
        settings = self._settings
        if self._fence is not None:
            sending = asyncio.create_task(self._fenced.send_all(self._fence))
            sending.add_done_callback(self._end_without_role)
        self._set_timer()
        async with Gate(listener, token=settings.token, admitted=self._connected, settings=settings.tls):
            await self._over.wait()
            if self._fence is not None:
                await self._fenced.emptied()
                await self._fence.end()
            await asyncio.sleep(LAST_SECONDS)
            os._exit(0)  # nothing is left to clean up, and asyncio would warn of open connections

    # --- events for the roster -------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Message) -> None:
        """Serve one peer from its hello to its end."""
        connection, self._next = self._next, self._next + 1
        self._writers[connection] = writer
        self._meter.count(len(wire.encode(hello)))
        self._step(Connected(connection=connection, hello=hello))
        try:
            await self._hear(connection, reader)
        finally:
            del self._writers[connection]
            self._step(Disconnected(connection=connection))

    async def _hear(self, connection: int, reader: asyncio.StreamReader) -> None:
        """Pass a peer's messages to the roster, until the connection is closed or a line is no message."""
        while True:
            try:
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    return
                self._meter.count(len(line))
                message = wire.decode(line)
            except OSError:
                return
            except ValueError as e:
                self._events.write("protocol-error", error=repr(e))
                return
            self._step(Heard(connection=connection, message=message))

    def _step(self, event: Event) -> None:
        """Give the roster an event, send what it returns, and set the timer to its next deadline."""
        before = self._roster.announced
        if not self._roster.is_recovering:  # survivors often show their standings before the loss is reported
            self._before_break = self._meter.read()
        sent = [self._with_cost(*each) for each in self._roster.step(event, time.monotonic())]
        decided = self._roster.decided if self._roster.announced != before else None
        if self._fence is None:
            self._carry_out(sent)
        else:
            self._fenced.put(sent, decided)
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
                self._meter.count(len(encoded[id(message)]))
                writer.write(encoded[id(message)])

    def _end_without_role(self, sending: asyncio.Task[None]) -> None:
        """End the process if another coordinator has or should have its place, or if etcd refuses it."""
        if sending.cancelled() or (error := sending.exception()) is None:
            return
        if isinstance(error, Resigned):
            self._events.write("resigned", epoch=self._settings.epoch, reason=str(error))
            os._exit(RESIGNED)
        os._exit(DEPOSED if isinstance(error, Deposed) else 1)

    def _with_cost(self, recipient: int, message: wire.Message) -> Sent:
        """Add to the event of a recovery what it has cost this process."""
        if recipient != EVENTS or message["event"] != "recovery":
            return recipient, message
        cost = {name: round(value - self._before_break[name], 3) for name, value in self._meter.read().items()}
        return recipient, message | cost


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
    parser.add_argument("--tls", nargs=4, metavar=("CERT", "KEY", "CA", "NAME"))
    for name in [field.name for field in fields(CoordinatorSettings) if field.name not in ("token", "tls")]:
        kind = str if name == "events" else type(defaults[name])
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=defaults[name])
    arguments = vars(parser.parse_args())
    listener = socket.socket(fileno=arguments.pop("listener"))
    if (files := arguments.pop("tls")) is not None:
        arguments["tls"] = TlsSettings(**dict(zip(("cert", "key", "ca", "name"), files, strict=True)))
    settings = CoordinatorSettings(token=os.environ["HOLDFAST_TOKEN"], **{**arguments, "life": new_incarnation()})
    signals.leave_to_agent()  # both processes get a terminal's Ctrl-C
    titles.set_title("coordinator")

    async def serve() -> None:
        if not settings.etcd:
            await Coordinator(settings).serve(listener)
            return
        async with Etcd(EtcdSettings.given(settings.etcd)) as etcd:
            fence = Fence(etcd, Keys(run=settings.etcd_run), epoch=settings.epoch)
            recalled = await fence.open()
            first, newest = recalled.first_host, recalled.newest
            known = dataclasses.replace(settings, first_host=first, newest=newest, recalls=True)
            await Coordinator(known, fence, recalled).serve(listener)

    try:
        asyncio.run(serve())
    except Deposed:
        raise SystemExit(DEPOSED) from None


if __name__ == "__main__":
    main()
