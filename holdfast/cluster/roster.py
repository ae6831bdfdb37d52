"""Who is there, and which generation comes next: the coordinator's knowledge, without its sockets.

Everything here can be told again by those who connect, so the coordinator may be killed and started
again while training goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.cluster import compose, wire
from holdfast.cluster.events import Events
from holdfast.cluster.membership import (
    GIVEN_UP,
    Generation,
    Member,
    Standing,
    lost_units,
    may_be_replayed,
    worker_order,
)
from holdfast.cluster.wire import Message

DONE = "it is done"
LAST_WORDS_SECONDS = 1.0


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
    host: str = ""  # its failure domain
    fresh: bool = True  # it has never been in a generation
    standing: Standing | None = None  # None while it trains
    doing: tuple[int, str] | None = None


def _given_up(name: str) -> Message:
    return {"code": GIVEN_UP, "message": f"worker {name} was given up for lost"}


class Roster:
    """Keeps the list of the living, decides with ``compose``, tells everybody."""

    def __init__(self, *, minimum_hosts: int, events: Events, first_host: int = 0, grace: float = 5.0) -> None:
        self.minimum_hosts = minimum_hosts
        self._born = time.monotonic()
        self._grace = grace  # for those who hold the state to find us after our restart
        self.events = events
        self.hosts: dict[int, Host] = {}
        self.workers: dict[str, Worker] = {}
        self.absent: dict[str, float] = {}  # members that may come back, and since when they are away
        self.generation: Generation | None = None
        self.begun = False
        self.finishing = False
        self.stopped = asyncio.Event()
        self._committed = False  # somebody, some time, committed something
        self._resumable = False  # a lost state can be had again from a checkpoint
        self._breaking = False
        self._errors: list[str] = []
        self._last_words = ""  # why the run is about to end
        self._lost: list[tuple[str, float]] = []  # whose loss the next generation recovers from, and when
        self._next_host = first_host  # higher after each restart: a number is never given twice

    @property
    def members(self) -> list[str]:
        return self.generation.workers if self.generation is not None else []

    def everybody(self) -> list[Peer]:
        return [*self.workers.values(), *self.hosts.values()]

    # --- coming ----------------------------------------------------------------------------------

    def add_host(self, writer: asyncio.StreamWriter, hello: Message) -> Host:
        number = self._next_host if hello["host"] is None else hello["host"]
        self._next_host = max(self._next_host, number + 1)
        host = Host(writer=writer, number=number, slots=hello["slots"])
        self.hosts[number] = host
        self.begun = self.begun or hello["begun"]
        host.send({"type": "welcome", "host": number})
        self.events.write("host", host=number, slots=host.slots)
        self.advance()
        return host

    def add_worker(self, worker: Worker, hello: Message) -> Message | None:
        """Takes a worker in, or returns why not."""
        known = None if hello["generation"] is None else Generation.from_json(hello["generation"])
        if (refusal := self._refuses(worker, known)) is not None:
            return refusal
        self.workers[worker.name] = worker
        self.absent.pop(worker.name, None)
        self._committed = self._committed or hello["committed"]
        if hello["finished"]:
            self.finish()
        if known is not None:
            self._remember(known)
        if worker.standing is not None:
            self.show_standing(worker, worker.standing, known.number if known is not None else 0)
        self.advance()
        return None

    def _refuses(self, worker: Worker, known: Generation | None) -> Message | None:
        """It was given up, it differs from the others, or the run is over."""
        if known is not None:  # a worker that trains already
            current = 0 if self.generation is None else self.generation.number
            given_up = worker.name not in self.members and known.number <= current
            return _given_up(worker.name) if given_up else None
        if self.finishing:
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
            self.absent = {w: now for w in known.workers if w not in self.workers}
            for name in [n for n, w in self.workers.items() if not w.fresh and n not in known.workers]:
                self.workers.pop(name).send({"type": "stop", **_given_up(name)})

    # --- going -----------------------------------------------------------------------------------

    def host_gone(self, number: int, cause: str) -> None:
        """Its workers have connections of their own; what goes with the host is its share of the target."""
        del self.hosts[number]
        self.events.write("host-gone", host=number, cause=cause)
        if not self.hosts and (cause == DONE or self.finishing):
            self.stopped.set()
        self.advance()

    def worker_gone(self, name: str, cause: str) -> None:
        self.workers.pop(name, None)
        self.absent.pop(name, None)
        member = name in self.members
        self.events.write("failure", worker=name, cause=cause, member=member)
        if member and not self.finishing:
            self._lost.append((name, time.time()))
        self._breaking = self._breaking or member
        self.advance()

    def worker_left(self, name: str) -> None:
        self.workers.pop(name, None)
        self.advance()

    def worker_ended(self, report: Message) -> None:
        """An agent saw one of its workers end; its connection may or may not have been closed yet."""
        self.events.write("exit", **{k: v for k, v in report.items() if k != "type"})
        worker, error = self.workers.get(report["worker"]), report["error"]
        if worker is not None and report["code"] == 0 and error is None:
            return  # its last words may still be on its own line: a farewell, or the end of it, which tells the rest
        if worker is not None:
            worker.writer.transport.abort()
        if worker is not None or report["worker"] in self.absent:
            self.worker_gone(report["worker"], report["cause"])
        if error is None:
            return
        if error["final"]:
            if not error.get("refused") or self.generation is None:  # else training goes on without it
                self.stop(error["code"], error["text"])
            return
        last = error["text"].strip().splitlines()[-1]
        verdict = compose.judge_error(error=last, earlier=self._errors, alive=len(self.workers))
        self._errors.append(last)
        if verdict.stop:
            self.stop(error["code"], f"{error['text'].rstrip()}\nstopped: {verdict.reason}")
        else:
            notice = f"holdfast: worker {report['worker']} failed ({last}); {verdict.reason}"
            for host in self.hosts.values():
                host.send({"type": "say", "text": notice})

    def nobody_left_on(self, host: Host, reason: str) -> None:
        if not self.workers:
            self.stop(3, self._last_words or f"too few workers: {reason}")
        else:  # the run goes on without this machine
            host.send({"type": "stop", "code": 3, "message": f"too few workers: {reason}"})

    # --- generations -----------------------------------------------------------------------------

    def show_standing(self, worker: Worker, standing: Standing, generation: int) -> None:
        if self.generation is not None and worker.name in self.members:
            # One that never got into the current generation breaks it for the others.
            self._breaking = self._breaking or generation != self.generation.number
        worker.standing = standing
        self._resumable = self._resumable or standing.resumable
        self.advance()

    def advance(self) -> None:
        """Whatever has just changed, take the next step towards a whole generation."""
        if self.stopped.is_set() or self.absent:
            return
        if self.generation is None:
            self._try_first()
            return
        present = [name for name in self.members if name in self.workers]
        standings = {n: s for n in present if (s := self.workers[n].standing) is not None}
        self._breaking = self._breaking or any(s.broken for s in standings.values())
        if self._breaking:
            for name in present:
                if name not in standings:
                    self.workers[name].send({"type": "regroup", "number": self.generation.number})
        if len(standings) == len(present) and (standings or self._breaking):
            self._regroup(standings)
        elif not standings:
            self._invite()

    def _waiting(self) -> list[str]:
        waiting = [w for w in self.workers.values() if w.fresh and w.standing is not None]
        return [w.name for w in waiting if w.name not in self.members]

    def _target(self) -> int:
        return sum(host.slots for host in self.hosts.values())

    def _try_first(self) -> None:
        names = self._waiting()
        readiness = self._readiness(names)
        if readiness.ready and self.begun:  # we are restarted: those who hold the state may yet report
            if time.monotonic() - self._born > self._grace:
                self._begin_again(names, "coordinator and workers were lost together")
        elif readiness.ready:
            self._begin(names, readiness.reason)

    def _readiness(self, names: Iterable[str]) -> compose.Readiness:
        waiting = Counter(worker_order(name)[0] for name in names)
        slots = {number: host.slots for number, host in self.hosts.items()}
        return compose.first_generation(slots=slots, minimum_hosts=self.minimum_hosts, waiting=waiting)

    def _begin(self, names: Iterable[str], reason: str) -> None:
        ordered = sorted(names, key=worker_order)
        for name in ordered[self._target() :]:  # one that never got the state waits like any other
            self.workers[name].fresh = True
        self._announce(ordered[: self._target()], reason)

    def _begin_again(self, names: Iterable[str], lost: str, what: str = "the model") -> None:
        """Nobody has the state: from the last checkpoint on whatever there is, or it is the end."""
        if not self._resumable:
            # Not at once: if an error in the script ended them, their agents are about to say so.
            self._last_words = f"too few workers: {lost}, and nobody is left who holds {what}"
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.stop, 3, self._last_words)
        elif self._readiness(names).ready:
            self._begin(names, f"{lost}: begin again from the last checkpoint")

    def _invite(self) -> None:
        """Somebody waits to join: ask the members to stop at their next boundary."""
        assert self.generation is not None
        if self._waiting() and len(self.members) < self._target() and not self.finishing:
            for name in self.members:
                if name in self.workers:
                    self.workers[name].send({"type": "pause", "number": self.generation.number})

    def _regroup(self, standings: dict[str, Standing]) -> None:
        if self._state_is_lost(standings) and not self.finishing:
            lost = ", ".join(name for name, _ in self._lost) or "all members"
            self._send_away(standings)
            for host in self.hosts.values():  # nobody trains who would need the cores
                host.send({"type": "recovered"})
            what = "some of the layers, nor is there a checkpoint folder" if standings else "the model"
            self._begin_again(self._waiting(), f"{lost} lost", what)
            return
        if self.finishing and lost_units(standings.values()):  # all had voted for the end, and the others are gone
            for name in standings:
                self.workers.pop(name).send({"type": "stop", "code": 0, "message": "the run is finished"})
            return
        waiting = [] if self.finishing else self._waiting()
        composition = compose.compose(standings=standings, waiting=waiting, target=self._target())
        for name in composition.dismissed:
            self.workers.pop(name).send({"type": "stop", "code": 0, "message": "left as asked"})
        if composition.members:
            self._announce(composition.members, composition.reason)
        elif standings:
            for host in self.hosts.values():
                if host.slots:  # one that was not asked to leave
                    text = "too few workers: all that held the model were asked to leave"
                    host.send({"type": "stop", "code": 3, "message": text})
            self.stop(0, composition.reason)

    def _state_is_lost(self, standings: dict[str, Standing]) -> bool:
        """Whether there was a trained state, and nobody has it, or some part of it, any more."""
        assert self.generation is not None
        was_held = any(member.standing.operation for member in self.generation.members)
        nobody = all(s.operation is None for s in standings.values())
        if (was_held or self._committed) and nobody:
            return True
        return bool(lost_units(standings.values())) and not may_be_replayed(standings.values())

    def _send_away(self, standings: dict[str, Standing]) -> None:
        """Survivors hold a part that is of no use, and their scripts are in the middle: their agents start new ones."""
        for name in standings:
            message = f"worker {name} starts again from the last checkpoint: a part of the state is lost"
            code = GIVEN_UP if self._resumable else 3
            self.workers.pop(name).send({"type": "stop", "code": code, "message": message})

    def _announce(self, names: Iterable[str], reason: str) -> None:
        number = 1 if self.generation is None else self.generation.number + 1
        members = []
        for name in names:
            worker = self.workers[name]
            assert worker.standing is not None
            members.append(Member(worker=name, address=worker.address, standing=worker.standing, host=worker.host))
            worker.standing, worker.fresh = None, False
        self.generation = Generation(number=number, members=tuple(members), reason=reason)
        self._breaking = False
        self.begun = True
        message = {"type": "generation", "generation": self.generation.to_json()}
        for peer in [*(self.workers[name] for name in self.members), *self.hosts.values()]:
            peer.send(message)
        hosts = [member.host for member in members]
        self.events.write("generation", number=number, workers=self.members, hosts=hosts, reason=reason)

    def share(self, sender: str, message: Message) -> None:
        """An address for the other members of the generation that is forming."""
        if self.generation is not None and message["generation"] == self.generation.number:
            for name in self.members:
                if name != sender and name in self.workers:
                    self.workers[name].send(message)

    def recovered(self, number: int, operation: int) -> None:
        """The first commit of a generation: whoever was lost is recovered from, replacements may start."""
        if self.generation is None or number != self.generation.number:
            return
        self._committed = True
        if self._breaking:  # it was committed before the loss was noticed
            return
        if self._lost:
            ms = 1000 * (time.time() - min(when for _, when in self._lost))
            lost = [name for name, _ in self._lost]
            self.events.write("recovery", lost=lost, generation=number, operation=operation, ms=ms)
            self._lost.clear()
        for host in self.hosts.values():
            host.send({"type": "recovered"})
        self.advance()  # whoever waits to join, a spare above all, is invited now

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Somebody's script is over, and all have committed its last step: nobody else is needed."""
        if self.finishing:
            return
        self.finishing = True
        self.events.write("finished")
        for host in self.hosts.values():
            host.send({"type": "finishing"})
        for name, worker in self.workers.items():
            if name not in self.members:
                worker.send({"type": "stop", "code": 0, "message": "the run is finished"})

    def stop(self, code: int, message: str) -> None:
        if self.stopped.is_set():
            return
        self.events.write("stop", code=code, message=message)
        for peer in self.everybody():
            peer.send({"type": "stop", "code": code, "message": message})
        self.stopped.set()
