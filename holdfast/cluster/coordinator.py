"""The coordinator: one authenticated connection per worker, and the numbering of generations.

It runs in a process of its own beside the first agent and is never on the path of a step. All it knows
can be told again by those who connect, so it may be killed and started again while training goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from holdfast.cluster import compose, wire
from holdfast.cluster.events import Events
from holdfast.cluster.membership import Generation, Member, Standing, worker_order
from holdfast.cluster.wire import Message

GIVEN_UP = 75  # exit code of a worker that comes back after it was replaced; its agent starts a new one
DONE = "it is done"
STRANGERS = 128  # connections that have not shown the token yet; more are turned away at once


@dataclass(kw_only=True)
class Peer:
    """A connected agent or worker."""

    writer: asyncio.StreamWriter
    heard: float = field(default_factory=time.monotonic)

    def send(self, message: Message) -> None:
        if not self.writer.is_closing():
            self.writer.write(wire.encode(message))


@dataclass(kw_only=True)
class Host(Peer):
    number: int
    slots: int


@dataclass(kw_only=True)
class Worker(Peer):
    name: str
    address: str
    label: str
    standing: Standing | None = None  # None while it trains
    doing: tuple[int, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    token: str
    minimum_hosts: int = 1
    maximum_hosts: int = 1
    heartbeat_timeout: float = 5.0
    patience: float = 30.0  # how long to wait for hosts, or for members after our own restart
    events: str | None = None


class Coordinator:
    """Holds the connections, decides with ``compose``, tells everybody."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.events = Events(settings.events)
        self.hosts: dict[int, Host] = {}
        self.workers: dict[str, Worker] = {}
        self.generation: Generation | None = None
        self.begun = False
        self.finishing = False
        self.stopped = asyncio.Event()
        self._errors: list[str] = []
        self._committed = False  # somebody, some time, committed something
        self._breaking = False
        self._lost: list[tuple[str, float]] = []  # whose loss the next generation recovers from, and when
        self._absent: dict[str, float] = {}  # members that have yet to come back after our restart
        self._few_since: float | None = None
        self._interval = settings.heartbeat_timeout / 5
        self._awake = time.monotonic()
        self._dazed_until = 0.0
        self._strangers = 0
        self._next_host = 0

    # --- connections -----------------------------------------------------------------------------

    async def serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listener, limit=wire.SERVER_LIMIT)
        watch = asyncio.create_task(self._watch())
        async with server:
            await self.stopped.wait()
            await asyncio.sleep(0.2)  # lets the last messages leave before the sockets close
        watch.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= STRANGERS:
            writer.close()
            return
        self._strangers += 1
        try:
            hello = await wire.accept(reader, writer, self.settings.token)
        except wire.Refused:
            writer.close()
            return
        finally:
            self._strangers -= 1
        handle = self._serve_agent if hello.get("role") == "agent" else self._serve_worker
        try:
            await handle(hello, reader, writer)
        except (KeyError, TypeError, ValueError) as e:
            self.events.write("protocol-error", error=repr(e))
        finally:
            writer.close()

    async def _messages(self, reader: asyncio.StreamReader, peer: Peer) -> Iterable[Message] | None:
        try:
            line = await reader.readline()
        except (OSError, ValueError):
            return None
        peer.heard = time.monotonic()
        return [wire.decode(line)] if line.endswith(b"\n") else None

    async def _serve_agent(
        self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        number = hello["host"]
        if number is None:
            if len(self.hosts) >= self.settings.maximum_hosts:
                text = f"the run has all of its {self.settings.maximum_hosts} hosts"
                writer.write(wire.encode({"type": "stop", "code": 2, "message": text}))
                return
            number = self._next_host
        self._next_host = max(self._next_host, number + 1)
        host = Host(writer=writer, number=number, slots=hello["slots"])
        self.hosts[number] = host
        self.begun = self.begun or hello["begun"]
        host.send({"type": "welcome", "host": number})
        self.events.write("host", host=number, slots=host.slots)
        self._advance()
        while (messages := await self._messages(reader, host)) is not None:
            for message in messages:
                self._from_agent(host, message)
        if self.hosts.get(number) is host:
            self._host_gone(number, "connection lost")

    def _from_agent(self, host: Host, message: Message) -> None:
        if message["type"] == "exit":
            self._exited(message)
        elif message["type"] == "slots":
            host.slots = message["slots"]
            self._advance()
        elif message["type"] == "bye":
            self._host_gone(host.number, DONE)
        elif message["type"] == "nobody":
            self._nobody_left(host, message["reason"])

    async def _serve_worker(
        self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name = hello["worker"]
        standing = Standing(**hello["standing"]) if hello["standing"] else None
        worker = Worker(
            writer=writer, name=name, address=hello["address"], label=hello["label"], standing=standing
        )
        if (refusal := self._refuses(worker, hello)) is not None:
            worker.send({"type": "stop", **refusal})
            return
        self.workers[name] = worker
        self._absent.pop(name, None)
        if hello["finished"]:
            self._finish()
        if hello["generation"] is not None:
            self._remember(Generation.from_json(hello["generation"]))
        self._advance()
        while (messages := await self._messages(reader, worker)) is not None:
            for message in messages:
                self._from_worker(worker, message)
        if self.workers.get(name) is worker:
            self._disconnected(name)

    def _refuses(self, worker: Worker, hello: Message) -> Message | None:
        """Why a worker may not come in: it was given up, it differs, or the run is over."""
        known = hello["generation"]
        if known is not None and self.generation is not None and not self._absent:
            if worker.name not in self.generation.workers and known["number"] < self.generation.number:
                return {"code": GIVEN_UP, "message": f"worker {worker.name} was given up for lost"}
        if self.finishing and known is None:
            return {"code": 0, "message": "the run is finished"}
        other = next((w for w in self.workers.values() if w.label != worker.label), None)
        if other is not None:
            text = (
                f"worker {worker.name} does not train the same as {other.name}: {worker.label} against "
                f"{other.label} (start every worker with the same script, settings and thread count)"
            )
            return {"code": 2, "message": text, "refused": True}
        return None

    def _remember(self, known: Generation) -> None:
        """After our own restart: the workers tell which generation runs."""
        self.begun = True
        if self.generation is None or known.number > self.generation.number:
            self.generation = known
            now = time.monotonic()
            self._absent = {w: now for w in known.workers if w not in self.workers}

    def _from_worker(self, worker: Worker, message: Message) -> None:
        kind = message["type"]
        if kind == "standing":
            if self.generation is not None and message["generation"] != self.generation.number:
                if worker.name in self.generation.workers:
                    self._breaking = True  # it never got into the current generation
            worker.standing = Standing(**message["standing"])
            self._advance()
        elif kind == "store":
            self._share(worker.name, message)
        elif kind == "progress":
            self._recovered(message["generation"], message["operation"])
        elif kind == "finished":
            self._finish()
        elif kind == "beat":
            worker.doing = message["doing"] and (message["doing"][0], message["doing"][1])
        elif kind == "bye":
            self.workers.pop(worker.name, None)
            self._advance()

    def _share(self, sender: str, message: Message) -> None:
        if self.generation is not None and message["generation"] == self.generation.number:
            for name in self.generation.workers:
                if name != sender and name in self.workers:
                    self.workers[name].send(message)

    def _disconnected(self, name: str) -> None:
        """A closed connection is a death, unless we were the one who did not answer."""
        now = time.monotonic()
        if now < self._dazed_until or now - self._awake > 2 * self._interval:
            del self.workers[name]
            self._absent[name] = now
        else:
            self._gone(name, "connection lost")

    # --- losses ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Notices silence: a hung worker, a host that vanished without a word."""
        while True:
            await asyncio.sleep(self._interval)
            before, now = self._awake, time.monotonic()
            self._awake = now
            for peer in [*self.workers.values(), *self.hosts.values()]:
                peer.send({"type": "beat"})
            if now - before > 2 * self._interval:  # we were asleep ourselves: nobody's silence counts
                self._dazed_until = now + self.settings.heartbeat_timeout
                for peer in [*self.workers.values(), *self.hosts.values()]:
                    peer.heard = now
                continue
            self._look_for_silence(now)
            self._look_for_absence(now)
            self._look_for_disagreement()

    def _look_for_silence(self, now: float) -> None:
        limit = self.settings.heartbeat_timeout
        for name, worker in list(self.workers.items()):
            if now - worker.heard > limit:
                worker.writer.transport.abort()
                self._kill(name)
                self._gone(name, f"no heartbeat for {limit:g} s")
        for number, host in list(self.hosts.items()):
            if now - host.heard > limit:
                host.writer.transport.abort()
                self._host_gone(number, f"no heartbeat for {limit:g} s")

    def _look_for_absence(self, now: float) -> None:
        for name, since in list(self._absent.items()):
            if now - since > self.settings.heartbeat_timeout:
                del self._absent[name]
                self._gone(name, "did not come back to the restarted coordinator")
        few = len(self.hosts) < self.settings.minimum_hosts and not self.finishing
        self._few_since = (self._few_since or now) if few else None
        if self._few_since is not None and now - self._few_since > self.settings.patience:
            text = (
                f"{len(self.hosts)} of at least {self.settings.minimum_hosts} hosts for "
                f"{self.settings.patience:g} s (start more agents, or lower --nnodes)"
            )
            self._stop(3, f"too few workers: {text}")

    def _host_gone(self, number: int, cause: str) -> None:
        """Its workers have connections of their own; what goes with the host is its share of the target."""
        del self.hosts[number]
        self.events.write("host-gone", host=number, cause=cause)
        if not self.hosts and cause == DONE:
            self.stopped.set()
        self._advance()

    def _look_for_disagreement(self) -> None:
        members = self.generation.workers if self.generation is not None else []
        doings = {n: d for n in members if n in self.workers and (d := self.workers[n].doing) is not None}
        if (text := compose.disagreement(doings)) is not None:
            self._stop(2, text)

    def _kill(self, worker: str) -> None:
        for host in self.hosts.values():
            host.send({"type": "kill", "worker": worker})

    def _gone(self, name: str, cause: str) -> None:
        self.workers.pop(name, None)
        member = self.generation is not None and name in self.generation.workers
        self.events.write("failure", worker=name, cause=cause, member=member)
        if member and not self.finishing:
            self._lost.append((name, time.time()))
        if member:
            self._breaking = True
        self._advance()

    def _exited(self, message: Message) -> None:
        """An agent saw one of its workers end; its connection may or may not have been closed yet."""
        self.events.write("exit", **{k: v for k, v in message.items() if k != "type"})
        name, error = message["worker"], message["error"]
        worker = self.workers.get(name)
        if worker is not None:
            worker.writer.transport.abort()
            self._gone(name, message["cause"])
        if error is None:
            return
        if error["final"] and error.get("refused") and self.generation is not None:
            return  # training goes on without it
        if error["final"]:
            self._stop(error["code"], error["text"])
            return
        last = error["text"].strip().splitlines()[-1]
        verdict = compose.judge_error(error=last, earlier=self._errors, alive=len(self.workers))
        self._errors.append(last)
        if verdict.stop:
            self._stop(verdict.exit_code, f"{error['text'].rstrip()}\nstopped: {verdict.reason}")

    def _nobody_left(self, host: Host, reason: str) -> None:
        if not self.workers:
            self._stop(3, f"too few workers: {reason}")
        else:  # the run goes on without this machine
            host.send({"type": "stop", "code": 3, "message": f"too few workers: {reason}"})

    # --- generations -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Whatever has just changed, take the next step towards a whole generation."""
        if self.stopped.is_set() or self._absent:
            return
        if self.generation is None:
            self._try_first()
            return
        members = [name for name in self.generation.workers if name in self.workers]
        standings = {n: s for n in members if (s := self.workers[n].standing) is not None}
        self._breaking = self._breaking or any(s.broken for s in standings.values())
        if self._breaking:
            for name in members:
                if name not in standings:
                    self.workers[name].send({"type": "regroup", "number": self.generation.number})
        if len(standings) == len(members) and (standings or self._breaking):
            self._regroup(standings)
        elif not standings:
            self._invite()

    def _waiting(self) -> list[str]:
        members = self.generation.workers if self.generation else []
        return [n for n, w in self.workers.items() if n not in members and w.standing is not None]

    def _target(self) -> int:
        return sum(host.slots for host in self.hosts.values())

    def _try_first(self) -> None:
        waiting: dict[int, int] = {}
        for name in self._waiting():
            host = worker_order(name)[0]
            waiting[host] = waiting.get(host, 0) + 1
        slots = {number: host.slots for number, host in self.hosts.items()}
        readiness = compose.first_generation(
            slots=slots, minimum_hosts=self.settings.minimum_hosts, waiting=waiting
        )
        if readiness.ready and self.begun:  # we are restarted, and those who held the state are gone
            self._stop(3, "too few workers: coordinator and workers were lost together")
        elif readiness.ready:
            names = sorted(self._waiting(), key=worker_order)[: self._target()]
            self._announce(names, readiness.reason)

    def _invite(self) -> None:
        assert self.generation is not None
        if self._waiting() and len(self.generation.workers) < self._target() and not self.finishing:
            for name in self.generation.workers:
                if name in self.workers:
                    self.workers[name].send({"type": "pause", "number": self.generation.number})

    def _regroup(self, standings: dict[str, Standing]) -> None:
        assert self.generation is not None
        if self._state_is_lost(standings) and not self.finishing:
            lost = ", ".join(name for name, _ in self._lost) or "all members"
            self._stop(3, f"too few workers: {lost} lost, and nobody is left who holds the model")
            return
        waiting = [] if self.finishing else self._waiting()
        composition = compose.compose(standings=standings, waiting=waiting, target=self._target())
        for name in composition.dismissed:
            self.workers.pop(name).send({"type": "stop", "code": 0, "message": "left as asked"})
        if composition.members:
            self._announce(composition.members, composition.reason)
        elif standings:
            self._stop(0, composition.reason)

    def _state_is_lost(self, standings: dict[str, Standing]) -> bool:
        """Whether there was a trained state, and nobody has it any more."""
        assert self.generation is not None
        was_held = any(member.standing.operation is not None for member in self.generation.members)
        return (was_held or self._committed) and all(s.operation is None for s in standings.values())

    def _announce(self, names: Iterable[str], reason: str) -> None:
        number = 1 if self.generation is None else self.generation.number + 1
        members = []
        for name in names:
            worker = self.workers[name]
            assert worker.standing is not None
            members.append(Member(worker=name, address=worker.address, standing=worker.standing))
            worker.standing = None
        self.generation = Generation(number=number, members=tuple(members), reason=reason)
        self._breaking = False
        self.begun = True
        for peer in [*(self.workers[m.worker] for m in members), *self.hosts.values()]:
            peer.send({"type": "generation", "generation": self.generation.to_json()})
        self.events.write("generation", number=number, workers=self.generation.workers, reason=reason)

    def _recovered(self, number: int, operation: int) -> None:
        """The first commit of a generation: whoever was lost is recovered from, replacements may start."""
        if self.generation is None or number != self.generation.number:
            return
        self._committed = True
        if self._lost:
            since = min(when for _, when in self._lost)
            lost = [name for name, _ in self._lost]
            ms = 1000 * (time.time() - since)
            self.events.write("recovery", lost=lost, generation=number, operation=operation, ms=ms)
            self._lost.clear()
        for host in self.hosts.values():
            host.send({"type": "recovered"})

    def _finish(self) -> None:
        if self.finishing:
            return
        self.finishing = True
        self.events.write("finished")
        members = self.generation.workers if self.generation else []
        for host in self.hosts.values():
            host.send({"type": "finishing"})
        for name, worker in self.workers.items():
            if name not in members:
                worker.send({"type": "stop", "code": 0, "message": "the run is finished"})

    def _stop(self, code: int, message: str) -> None:
        if self.stopped.is_set():
            return
        self.events.write("stop", code=code, message=message)
        for peer in [*self.workers.values(), *self.hosts.values()]:
            peer.send({"type": "stop", "code": code, "message": message})
        self.stopped.set()


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle

    async def serve() -> None:
        await Coordinator(settings).serve(listener)
        os._exit(0)  # nothing is left to clean up, and asyncio would complain of connections still open

    asyncio.run(serve())


if __name__ == "__main__":
    main()
