"""The roster: a state machine that knows who is connected, and decides which generation comes next.

Events and the time go in, messages come out. It has no socket and no clock, so a test can play any history. Agents and
workers repeat everything it must know when they connect, so the coordinator may be killed and started again while
training goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.cluster import compose
from holdfast.cluster.generations import Generations, RosterSettings
from holdfast.cluster.labels import difference
from holdfast.cluster.membership import GIVEN_UP, Generation, Judge, Message, Standing, machine_of
from holdfast.cluster.pulse import Still
from holdfast.cluster.register import Host, Peer, Sent, Worker
from holdfast.cluster.stuck import StepTimeout, StuckWatch
from holdfast.cluster.watch import Watch

DONE = "it is done"  # cause of a host's end that is no failure


@dataclass(frozen=True, kw_only=True)
class Connected:
    """An agent or a worker has connected and proved the token. ``hello`` says who it is."""

    connection: int
    hello: Message


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A message has come in."""

    connection: int
    message: Message


@dataclass(frozen=True, kw_only=True)
class Disconnected:
    """A connection is closed, by the other side or by the network."""

    connection: int


@dataclass(frozen=True, kw_only=True)
class Tick:
    """The roster's ``deadline`` has come."""


Event = Connected | Heard | Disconnected | Tick


class Roster(Generations):
    """The connected agents and workers. ``Generations``, the base class, decides which of them train together."""

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        super().__init__(settings, judge=judge, now=now)
        self._watch = Watch(timeout=settings.heartbeat_timeout, patience=settings.patience, now=now)
        self._stuck = StuckWatch(StepTimeout.parse(settings.step_timeout))
        self._errors: list[str] = []  # the last line of each error that ended a worker
        self._exits: dict[str, bool] = {}  # workers that ended with code 0, and whether their scripts were over
        self._next_host = settings.first_host
        self._names: dict[str, str] = {}  # the incarnation of each worker that was ever heard of

    @property
    def deadline(self) -> float:
        """When the next ``Tick`` is due."""
        ends = [] if self._last_words is None else [self._last_words[0]]
        if self.generation is None and self._now < self.first_look:
            ends.append(self.first_look)
        return min([self._watch.deadline, *ends])

    def step(self, event: Event, now: float) -> list[Sent]:
        """Take in one event at the time ``now`` (seconds); return the messages to send, in order.

        Nothing is sent twice for the same cause.
        """
        self._now = now
        if self.stopped:
            return []
        try:
            self._take(event)
        except (KeyError, TypeError, ValueError) as e:  # a peer's malformed message is no reason to stop
            self._register.log("protocol-error", error=repr(e))
            if not isinstance(event, Tick):
                self._register.hang_up(event.connection)
        return self._register.take_out()

    def _take(self, event: Event) -> None:
        if isinstance(event, Tick):
            self._tick()
        elif isinstance(event, Connected):
            hello = event.hello
            (self._agent_came if hello.get("role") == "agent" else self._worker_came)(event.connection, hello)
        elif (peer := self._register.find(event.connection)) is None:
            return  # this peer was given up, or has a newer connection
        elif isinstance(event, Disconnected):
            self._register.remove(peer)
            self._disconnected(peer)
        else:
            peer.heard = self._now
            self._heard(peer, event.message)

    def _heard(self, peer: Peer, message: Message) -> None:
        kind = message["type"]
        if isinstance(peer, Host):
            if kind == "exit":
                self._worker_ended(message)
            elif kind == "slots":
                peer.slots = message["slots"]
                self.advance()
            elif kind == "nobody":
                self._nobody_left_on(peer, message["reason"])
            elif kind == "bye":
                self._host_gone(peer, DONE, stays=message.get("stays", False))
            elif kind == "beat":
                peer.starting = {name: float(age) for name, age in dict(message.get("starting", {})).items()}
        elif kind == "standing":
            self.show_standing(peer, Standing(**message["standing"]), message["generation"])
        elif kind == "store":
            self.share(peer.name, message)
        elif kind == "progress":
            self.progressed(message["generation"], message["operation"])
        elif kind == "beat":
            peer.doing = message["doing"] and (message["doing"][0], message["doing"][1])
            peer.still = Still.from_json(message["still"]) if "still" in message else None
        elif kind == "finished":
            self.finish()
        elif kind == "bye":
            self._register.remove(peer)
            self.advance()

    # --- coming ----------------------------------------------------------------------------------

    def _agent_came(self, connection: int, hello: Message) -> None:
        """Enter an agent, with a new number if it has none yet; refuse it if the run has all its hosts."""
        entry = compose.enter_host(
            number=hello["host"],
            agent=hello["agent"],
            known={host.agent: host.number for host in self.hosts.values()},
            next_number=self._next_host,
            most=self.settings.maximum_hosts,
        )
        if entry.number is None:
            self._register.send(connection, {"type": "stop", "code": 2, "message": entry.reason})
            self._register.hang_up(connection)
            return
        number = entry.number
        self._next_host = max(self._next_host, number + 1)
        host = Host(connection=connection, heard=self._now, number=number, agent=hello["agent"], slots=hello["slots"])
        self._register.add(host)
        self._begun = self._begun or hello["begun"]
        if hello["finished"]:
            self.finish()
        welcome = {"type": "welcome", "host": number, "master_port": self.settings.master_port}
        # It may have missed what follows.
        welcome |= {"begun": self.generation is not None, "finishing": self._finishing, "members": self.members}
        self._register.send(host.connection, welcome)
        self._register.log("host", host=number, slots=host.slots)
        if hello.get("stays"):  # it said so before a restart of the coordinator: others may be about to come back
            self._register.retire(host)
        self.kill_given_up()
        self.advance()

    def _worker_came(self, connection: int, hello: Message) -> None:
        """Enter a worker, new or with a new connection, unless it cannot take part."""
        known = None if hello["generation"] is None else Generation.from_json(hello["generation"])
        worker = Worker(
            connection=connection,
            heard=self._now,
            name=hello["worker"],
            address=hello["address"],
            incarnation=hello["incarnation"],
            label=dict(hello["label"]),
            host=hello["host"],
            fresh=known is None,
            standing=Standing(**hello["standing"]) if hello["standing"] else None,
        )
        if (refusal := self._refuses(worker, known)) is not None:
            self._register.send(connection, {"type": "stop", **refusal})
            self._register.hang_up(connection)
            return
        self._register.add(worker)
        self._names[worker.name] = worker.incarnation
        self.absent.pop(worker.name, None)
        for told in (self._called, self._invited):  # messages on its old connection may be lost: send them again
            told.discard(worker.name)
        self._committed = self._committed or hello["committed"]
        if hello["finished"]:
            self.finish()
        if known is not None:
            self._last_words = None  # somebody who holds the state is back
            self._remember(known)
            self._refuse_joiners_unlike(worker)
            # Another member may wait for an address that was lost with its old connection.
            self._breaking = self._breaking or (known.number == self._announced > self._recovered)
        if worker.standing is not None:
            self.show_standing(worker, worker.standing, known.name if known is not None else "")
        self.advance()

    def _refuses(self, worker: Worker, known: Generation | None) -> Message | None:
        """Return why a worker cannot take part: it was given up, it differs from the others, or the run is over."""
        if self._is_another(worker.name, worker.incarnation):
            return _given_up(worker.name, "another worker had this name before")
        if known is not None:  # a worker that trains already
            return self._refuses_member(worker, known)
        if self._finishing:
            return {"code": 0, "message": "the run is finished"}
        for other in {id(w.label): w for w in self.workers.values()}.values():
            if worker.label == other.label:
                worker.label = other.label  # one object for all that are equal, so that thousands compare quickly
            elif (said := difference(worker.label, other.label)) is not None:
                return _differs(worker.name, other.name, said)
        return None

    def _refuse_joiners_unlike(self, member: Worker) -> None:
        """Send away joiners that train something else: they came while this member had lost its connection."""
        for joiner in [w for w in self.workers.values() if w.fresh]:
            if (said := difference(joiner.label, member.label)) is not None:
                self._dismiss(joiner.name, {"type": "stop", **_differs(joiner.name, member.name, said)})

    def _is_another(self, name: str, incarnation: str) -> bool:
        """Whether a name belongs to another process: an agent that was started anew counts its workers from 0 again."""
        return self._names.get(name, incarnation) != incarnation

    def _refuses_member(self, worker: Worker, known: Generation) -> Message | None:
        """Return why a worker that trains already cannot go on: the run has gone on without it."""
        if self.generation is None:
            return None
        if self._announced and (known.run != self.run or known.number > self.generation.number):
            # It was formed by a coordinator of which this one had heard nothing when it formed its own.
            return _given_up(worker.name, "the run was begun anew without it")
        newer = self._counts_more(known)
        return _given_up(worker.name) if worker.name not in self.members and not newer else None

    def _counts_more(self, known: Generation) -> bool:
        """Whether a generation replaces the one that this coordinator knows: of its own run, then the newest."""
        if self.generation is None:
            return True
        ours = self.settings.run
        return (known.run == ours, known.number) > (self.generation.run == ours, self.generation.number)

    def _remember(self, known: Generation) -> None:
        """Take over, after a restart of the coordinator, the generation that a worker says it is in.

        If the whole first agent was started anew, it is a generation of another run, which goes on under this roster.
        """
        self._begun = True
        if self._counts_more(known):
            self.generation, self.run = known, known.run
            self._names |= {member.worker: member.incarnation for member in known.members}
            for name in [n for n, w in self.workers.items() if self._is_another(n, w.incarnation)]:
                self._dismiss(name, {"type": "stop", **_given_up(name, "another worker had this name before")})
            self.absent = {w: self._now for w in known.workers if w not in self.workers}
            for name in [n for n, w in self.workers.items() if not w.fresh and n not in known.workers]:
                self._dismiss(name, {"type": "stop", **_given_up(name)})
            for name in [name for name in self.absent if name in self._exits]:  # told before anybody knew of it
                self._ended_well(name)

    # --- going -----------------------------------------------------------------------------------

    def _disconnected(self, peer: Peer) -> None:
        """Take in a closed connection. It is a loss only if the worker's agent is gone too.

        Otherwise the network may have closed it, or the worker because the coordinator did not answer. The agent knows
        whether the process has ended, and reports it at once. A living worker connects again, and training goes on.
        """
        if isinstance(peer, Host):
            self._host_gone(peer, "connection lost", silent=self._watch.is_dazed(self._now))
        elif peer.name in self._exits:
            self._ended_well(peer.name)
        elif self._watch.is_dazed(self._now) or machine_of(peer.name) in self.hosts:
            self.absent[peer.name] = self._now
        else:
            self._given_up.add(peer.name)
            self._worker_gone(peer.name, "connection lost")

    def _host_gone(self, host: Host, cause: str, *, silent: bool = False, stays: bool = False) -> None:
        """Strike out a host. Its workers have their own connections; only the target shrinks by its slots.

        Workers whose lines were lost before are given up: nobody is left who could tell that they live. Not if the
        coordinator itself was ``silent``: then all may come back. ``stays``: its agent still keeps the coordinator.
        """
        if stays:
            self._register.retire(host)
        else:
            self._register.remove(host)
        self._register.log("host-gone", host=host.number, cause=cause)
        for name in [] if silent else [name for name in self.absent if machine_of(name) == host.number]:
            self._given_up.add(name)
            self._worker_gone(name, cause)
        if not self.hosts and (cause == DONE or self._finishing):
            self.stopped = True
        self.advance()

    def _worker_gone(self, name: str, cause: str) -> None:
        """Strike out a worker that is lost. If it was a member, its generation is over."""
        if name in self.workers:
            self._register.remove(self.workers[name])
        self.absent.pop(name, None)
        member = name in self.members
        self._register.log("failure", worker=name, cause=cause, member=member)
        if member and not self._finishing:
            self._lost.append((name, self._now))
        self._breaking = self._breaking or member
        self.advance()

    def _worker_ended(self, report: Message) -> None:
        """Take in an agent's report that a worker has ended. The worker's connection may still be open."""
        self._register.log("exit", **{k: v for k, v in report.items() if k not in ("type", "incarnation")})
        if self._is_another(report["worker"], report["incarnation"]):
            return  # it was refused, because its name belongs to another
        self._given_up.discard(report["worker"])
        worker, error = self.workers.get(report["worker"]), report["error"]
        if report["code"] == 0 and error is None:
            self._exits[report["worker"]] = report["finished"]
            if report["worker"] not in self.workers:  # else its last messages may still arrive on its connection
                self._ended_well(report["worker"])
            return
        if worker is not None:
            self._register.hang_up(worker.connection)
        if worker is not None or report["worker"] in self.absent:
            self._worker_gone(report["worker"], report["cause"])
        if error is None:
            return
        if error["final"]:
            if not error.get("refused") or self.generation is None:  # a refused joiner does not end the training
                self.stop(error["code"], error["text"])
            return
        self._judge_error(report["worker"], error)

    def _ended_well(self, name: str) -> None:
        """Take in that a worker has ended with code 0 without a bye: it was lost with the connection."""
        self.absent.pop(name, None)
        if self._exits[name] and name in self.members:
            self.finish()
        elif name in self.members:
            self._worker_gone(name, "it has ended")
        self.advance()

    def _judge_error(self, name: str, error: Message) -> None:
        """Stop the run for an error of the script, or tell the hosts that it goes on."""
        last = (error["text"].strip() or "no error text").splitlines()[-1]
        verdict = compose.judge_error(error=last, earlier=self._errors, alive=len(self.workers))
        self._errors.append(last)
        if verdict.stop:
            self.stop(error["code"], f"{error['text'].rstrip()}\nstopped: {verdict.reason}")
        else:
            notice = f"holdfast: worker {name} failed ({last}); {verdict.reason}"
            self._register.send_all(self.hosts.values(), {"type": "say", "text": notice})

    def _nobody_left_on(self, host: Host, reason: str) -> None:
        """Take in that a host has no worker and may start none: end the run, or let that host go."""
        if not self.workers:
            self.stop(3, self._last_words[1] if self._last_words is not None else f"too few workers: {reason}")
        else:  # the run goes on without this machine
            self._register.send(host.connection, {"type": "stop", "code": 3, "message": f"too few workers: {reason}"})

    # --- time ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Send heartbeats, and give up peers that have been silent for too long."""
        now, watch = self._now, self._watch
        if self._last_words is not None and now >= self._last_words[0]:
            self.stop(3, self._last_words[1])
        if self.stopped or now < watch.deadline:
            self.advance()  # some decisions wait for time to pass
            return
        awake = watch.look(now)
        self._register.send_all(self._register.everybody, {"type": "beat"})
        if not awake:
            for peer in self._register.everybody:
                peer.heard = now
            return
        cause = f"no heartbeat for {watch.timeout:g} s"
        # Giving one up may send others away, so each is looked for once more.
        for name in watch.silent({name: worker.heard for name, worker in self.workers.items()}, now):
            if name in self.workers:
                self._register.hang_up(self.workers[name].connection)
                self._give_up(name, cause)
        for number in watch.silent({number: host.heard for number, host in self.hosts.items()}, now):
            if number in self.hosts:
                self._register.hang_up(self.hosts[number].connection)
                self._host_gone(self.hosts[number], cause)
        for name in watch.silent(self.absent, now):
            if name in self.absent:
                self._give_up(name, "did not come back to the coordinator")
        self._look_for_hosts()
        self._look_for_disagreement()
        self._look_for_stuck()
        self.advance()

    def _give_up(self, name: str, cause: str, **details: Any) -> None:
        """Count a silent worker as lost, and have it killed: a hung process could come back to life later.

        ``details`` are for the event that its agent writes.
        """
        message = {"type": "kill", "worker": name, "cause": cause, "details": details}
        self._register.send_all(self.hosts.values(), message)
        self._worker_gone(name, cause)

    def _look_for_hosts(self) -> None:
        """Stop the run if there have been too few hosts for longer than the patience."""
        out = self._kept_out.now(self._now)
        # A host that leaves counts as long as it is there; but a run does not begin with it.
        here = len(self.hosts.keys() - out if self._begun else self._slots())
        needed = self.settings.minimum_hosts
        enough = here and self._finishing
        if self._watch.too_few(needed if enough else here, needed, self._now):
            cut_off = f"; others cannot reach {len(out)}" if out else ""
            text = f"{here} of at least {needed} hosts for {self.settings.patience:g} s{cut_off}"
            self.stop(3, f"too few workers: {text} (start more agents, or lower --nnodes)")

    def _look_for_disagreement(self) -> None:
        """Stop the run if members are at different kinds of the same operation."""
        workers = self.workers
        doings = {n: d for n in self.members if n in workers and (d := workers[n].doing) is not None}
        if (text := compose.disagreement(doings)) is not None:
            self.stop(2, text)

    def _look_for_stuck(self) -> None:
        """Give up a worker that hangs although its heartbeats come, or that hangs before it has connected.

        While nobody has connected, nobody knows whether the script will ever make a ``Run``. So then those who have
        not are left alone, unless the user has set a limit.
        """
        if self.stopped:
            return
        workers = self.workers
        starting = {n: age for host in self.hosts.values() for n, age in host.starting.items() if n not in workers}
        if not (workers or self._begun or self._stuck.is_set):
            starting = {}
        stills = {name: worker.still for name, worker in workers.items() if worker.still is not None}
        stuck = self._stuck.look(stills, members=self.members, starting=starting, now=self._now)
        if stuck is None:
            self._look_for_stall()
            return
        worker = workers.get(stuck.worker)
        operation, doing = (None, "") if worker is None or worker.doing is None else worker.doing
        kind = stuck.where if stuck.where in ("script", "start") else doing
        details = {"operation": operation, "kind": kind, "seconds": stuck.seconds, "limit": stuck.limit}
        # Its line stays open: it would connect again, and end before it has written its stacks.
        self._give_up(stuck.worker, stuck.cause, **details)

    def _look_for_stall(self) -> None:
        """End a generation whose members wait for each other, while none of them waits for the roster."""
        members = [self.workers[name] for name in self.members if name in self.workers]
        waiting = [worker.still for worker in members if worker.still is not None and worker.standing is None]
        if len(waiting) == len(self.members) and self._stuck.stalled(waiting, self._now):
            assert self.generation is not None
            self._register.log("stalled", generation=self.generation.number, seconds=min(s.seconds for s in waiting))
            self._breaking = True


def _given_up(name: str, reason: str = "it counted as lost") -> Message:
    return {"code": GIVEN_UP, "message": f"worker {name} was given up: {reason}"}


def _differs(name: str, other: str, said: str) -> Message:
    text = f"worker {name} does not train the same as {other}: {said}"
    return {"code": 2, "message": f"{text} (start every worker with the same script and settings)", "refused": True}
