"""The coordinator's process: one authenticated connection per agent and worker.

It runs beside the first agent and is never on the path of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass

from holdfast.cluster import wire
from holdfast.cluster.events import Events
from holdfast.cluster.membership import Standing
from holdfast.cluster.roster import DONE, Host, Peer, Roster, Worker
from holdfast.cluster.watch import Watch
from holdfast.cluster.wire import Message

STRANGERS = 128  # connections that have not shown the token yet; more are turned away at once


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the agent tells its coordinator."""

    token: str
    minimum_hosts: int = 1
    maximum_hosts: int = 1
    heartbeat_timeout: float = 5.0
    patience: float = 30.0  # how long to wait for missing hosts
    first_host: int = 0
    events: str | None = None


class Coordinator:
    """Listens, lets in whoever knows the token, and passes messages between the roster and its peers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._roster = Roster(
            minimum_hosts=settings.minimum_hosts,
            events=Events(settings.events),
            first_host=settings.first_host,
            grace=settings.heartbeat_timeout,
        )
        self._watch = Watch(self._roster, heartbeat_timeout=settings.heartbeat_timeout, patience=settings.patience)
        self._strangers = 0

    async def serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listener, limit=wire.SERVER_LIMIT)
        watching = asyncio.create_task(self._watch.run())
        async with server:
            await self._roster.stopped.wait()
            await asyncio.sleep(0.1)  # lets the last messages leave before the sockets close
            watching.cancel()
            os._exit(0)  # nothing is left to clean up, and asyncio would complain of open connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        serve = self._serve_agent if hello.get("role") == "agent" else self._serve_worker
        try:
            await serve(hello, reader, writer)
        except (KeyError, TypeError, ValueError) as e:
            self._roster.events.write("protocol-error", error=repr(e))
        finally:
            writer.close()

    async def _hear(self, reader: asyncio.StreamReader, peer: Peer) -> Message | None:
        """The peer's next message; None once the connection is closed."""
        try:
            line = await reader.readline()
        except OSError:
            return None
        peer.heard = time.monotonic()
        return wire.decode(line) if line.endswith(b"\n") else None

    # --- agents ----------------------------------------------------------------------------------

    async def _serve_agent(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        roster, most = self._roster, self._settings.maximum_hosts
        if hello["host"] is None and len(roster.hosts) >= most:
            text = f"the run has all of its {most} hosts"
            writer.write(wire.encode({"type": "stop", "code": 2, "message": text}))
            return
        host = roster.add_host(writer, hello)
        try:
            while (message := await self._hear(reader, host)) is not None:
                self._from_agent(host, message)
        finally:
            if roster.hosts.get(host.number) is host:
                roster.host_gone(host.number, "connection lost")

    def _from_agent(self, host: Host, message: Message) -> None:
        kind = message["type"]
        if kind == "exit":
            self._roster.worker_ended(message)
        elif kind == "slots":
            host.slots = message["slots"]
            self._roster.advance()
        elif kind == "nobody":
            self._roster.nobody_left_on(host, message["reason"])
        elif kind == "bye":
            self._roster.host_gone(host.number, DONE)

    # --- workers ---------------------------------------------------------------------------------

    async def _serve_worker(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        standing = Standing(**hello["standing"]) if hello["standing"] else None
        worker = Worker(
            writer=writer,
            name=hello["worker"],
            address=hello["address"],
            label=hello["label"],
            host=hello["host"],
            fresh=hello["generation"] is None,
            standing=standing,
        )
        if (refusal := self._roster.add_worker(worker, hello)) is not None:
            worker.send({"type": "stop", **refusal})
            return
        try:
            while (message := await self._hear(reader, worker)) is not None:
                self._from_worker(worker, message)
        finally:
            if self._roster.workers.get(worker.name) is worker:
                self._watch.disconnected(worker.name)

    def _from_worker(self, worker: Worker, message: Message) -> None:
        kind, roster = message["type"], self._roster
        if kind == "standing":
            roster.show_standing(worker, Standing(**message["standing"]), message["generation"])
        elif kind == "store":
            roster.share(worker.name, message)
        elif kind == "progress":
            roster.recovered(message["generation"], message["operation"])
        elif kind == "beat":
            worker.doing = message["doing"] and (message["doing"][0], message["doing"][1])
        elif kind == "finished":
            roster.finish()
        elif kind == "bye":
            roster.worker_left(worker.name)


def main() -> None:
    """``python -m holdfast.cluster.coordinator``: serves on a socket inherited from the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener", type=int, required=True)
    for name, value in asdict(Settings(token="")).items():
        if name != "token":
            kind = str if name == "events" else type(value)
            parser.add_argument("--" + name.replace("_", "-"), type=kind, default=value)
    arguments = vars(parser.parse_args())
    listener = socket.socket(fileno=arguments.pop("listener"))
    settings = Settings(token=os.environ["HOLDFAST_TOKEN"], **arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # these are the agent's to handle
        signal.signal(number, signal.SIG_IGN)

    async def serve() -> None:
        await Coordinator(settings).serve(listener)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
