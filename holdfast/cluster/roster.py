"""The roster: a state machine that knows which machines are connected, and decides which generation comes next.

Events and the time go in, messages come out. It has no socket and no clock, so a test can play any history. It hears of
workers through their agents, who repeat everything it must know when they connect. So the coordinator may be killed and
started again while training goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from holdfast.cluster import announce, compose
from holdfast.cluster.arrivals import Arrivals
from holdfast.cluster.generations import RosterSettings
from holdfast.cluster.membership import Judge, Message, Standing, machine_of
from holdfast.cluster.pulse import Still
from holdfast.cluster.quorum.records import Decided
from holdfast.cluster.register import Host, Sent
from holdfast.cluster.stuck import StepTimeout, StuckWatch

DOUBT_SECONDS = 0.3  # for agents to come to a new coordinator who show no life: they try 20 times a second


@dataclass(frozen=True, kw_only=True)
class Connected:
    """An agent has connected and proved the token. ``hello`` says who it is, and tells of its workers."""

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


class Roster(Arrivals):
    """The connected agents and their workers: takes in events and the time, and gives up who is silent or hangs.

    Its base classes take in what comes (``Arrivals``) and what ends (``Endings``), and decide which workers train
    together (``Generations``).
    """

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        super().__init__(settings, judge=judge, now=now)
        self._stuck = StuckWatch(StepTimeout.parse(settings.step_timeout))
        # Machines of members that are gone, and when they are given up.
        self._doubtful: tuple[float, set[int]] | None = None

    @property
    def deadline(self) -> float:
        """When the next ``Tick`` is due."""
        ends = [] if self._last_words is None else [self._last_words[0]]
        if self.generation is None and self._now < self.first_look:
            ends.append(self.first_look)
        if self._doubtful is not None:
            ends.append(self._doubtful[0])
        return min([self._watch.deadline, *ends])

    def recall(self, decided: Decided | None, alive: Collection[int]) -> None:
        """Begin with the generation that the coordinator before this one has formed, as etcd tells it; None: with none.

        ``alive``: hosts whose agents show signs of life. Workers of the others are given up soon, if they do not come.
        """
        self._rejoined = bool(alive)
        if decided is None:
            return
        self._note_run()
        self._remember(decided.generation)
        self._has_checkpoints = decided.resumable
        gone = {machine for machine in self.absent if machine not in alive}
        self._doubtful = (self._now + DOUBT_SECONDS, gone) if gone else None

    def step(self, event: Event, now: float) -> list[Sent]:
        """Take in one event at the time ``now`` (seconds); return the messages to send, in order.

        Nothing is sent twice for the same cause.
        """
        self._now = now
        if self.stopped:
            return []
        try:
            self._take(event)
        except (KeyError, TypeError, ValueError, AttributeError) as e:  # a malformed message is no reason to stop
            self._register.log("protocol-error", error=repr(e))
            if not isinstance(event, Tick):
                self._register.hang_up(event.connection)
        return self._register.take_out()

    def _take(self, event: Event) -> None:
        if isinstance(event, Tick):
            self._tick()
        elif isinstance(event, Connected):
            self._agent_came(event.connection, event.hello)
        elif event.connection in self._limbo:
            self._heard_in_limbo(event)
        elif (host := self._register.find(event.connection)) is None:
            return  # this host was given up, or has a newer connection
        elif isinstance(event, Disconnected):
            self._disconnected(host)
        else:
            host.heard = self._now
            self._heard(host, event.message)

    def _heard_in_limbo(self, event: Heard | Disconnected) -> None:
        """Take in the answer of an agent that was asked for its generation, or its end."""
        connection = event.connection
        if isinstance(event, Heard) and event.message["type"] != "recalled":
            self._limbo.keep(connection, event.message)
            return
        if isinstance(event, Disconnected):
            self._limbo.remove(connection)
        else:
            told = announce.heard(event.message["generation"], None)
            if self._counts_more(told.run, told.number):
                self._remember(told)
            self._limbo.answered(connection)
        for number, waiting in self._limbo.all:
            if not self._counts_more(*waiting.known):
                self._limbo.remove(number)  # if it was asked: its generation counts no more
                self._enter(number, waiting.hello)
                for message in waiting.said:
                    self._take(Heard(connection=number, message=message))
        self._ask()

    def _heard(self, host: Host, message: Message) -> None:
        kind = message["type"]
        if kind == "beat":
            self._beat(host, message)
        elif kind == "came":
            record = message["worker"]
            self._worker_came(record, record["label"])
            self.advance()
        elif kind == "standing":
            if (worker := self.workers.get(message["worker"])) is not None:
                self.show_standing(worker, Standing(**message["standing"]), message["generation"])
        elif kind == "progress":
            self.progressed(message["generation"], message["operation"])
        elif kind == "finished":
            self.finish(message["over"])
        elif kind == "exit":
            self._worker_ended(message)
        elif kind == "slots":
            self._register.resize(host, message["slots"])
            self.advance()
        elif kind == "nobody":
            self._nobody_left_on(host, message["reason"])
        elif kind == "bye" and "worker" in message:
            self._let_go(message["worker"])
            self.advance()
        elif kind == "bye":
            self._host_done(host, stays=message.get("stays", False))
        elif kind == "cleared":
            self._clear_round(self._rounds.cleared(host.number, message))
        elif kind == "done":
            self._rounds.done(host.number, message["round"])
            self._settle_round()

    def _beat(self, host: Host, message: Message) -> None:
        """Take in an agent's heartbeat: what its workers do, and for how long each has been silent."""
        host.starting = {name: float(age) for name, age in dict(message["starting"]).items()}
        for name, said in dict(message["workers"]).items():
            if (worker := self.workers.get(name)) is None:
                self._look_after(host, name, float(said["silent"]))
            else:
                worker.heard = self._now - float(said["silent"])
                # An operation that was begun in an older generation may be of another kind in this one.
                late = self.generation is not None and said.get("generation", "") != self.generation.name
                worker.doing = None if late or not said["doing"] else (said["doing"][0], said["doing"][1])
                worker.still = Still.from_json(said["still"]) if said["still"] else None

    def _look_after(self, host: Host, name: str, silent: float) -> None:
        """Have a worker killed that was sent away or given up, hangs, and would keep its slot for ever.

        It may have hung after that; or the order to kill it was lost with a connection.
        """
        if silent > self.settings.heartbeat_timeout and name not in host.condemned:
            host.condemned.add(name)
            cause = f"no heartbeat for {silent:.0f} s after it was sent away"
            self._register.send(host.connection, {"type": "kill", "worker": name, "cause": cause})

    # --- time ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Send heartbeats, and give up machines and workers that have been silent for too long."""
        now, watch = self._now, self._watch
        if self._last_words is not None and now >= self._last_words[0]:
            self.stop(3, self._last_words[1])
        if self._doubtful is not None and now >= self._doubtful[0]:
            doubtful, self._doubtful = self._doubtful[1], None
            for machine in sorted(doubtful & self.absent.keys()):
                self._machine_gone(machine, "its host was lost with the coordinator")
        self._end_if_deserted()
        if self.stopped or now < watch.deadline:
            self.advance()  # some decisions wait for time to pass
            return
        awake = watch.look(now)
        self._register.send_all(self._register.everybody, {"type": "beat"})
        if awake:
            self._look_for_silence()
        else:
            for host in self._register.everybody:
                host.heard = now
            for worker in self.workers.values():
                worker.heard = now
            return
        self._look_for_hosts()
        self._settle_round()
        self._look_for_disagreement()
        self._look_for_stuck()
        self.advance()

    def _look_for_silence(self) -> None:
        """Give up machines and workers that have shown no sign of life for too long."""
        now, watch = self._now, self._watch
        cause = f"no heartbeat for {watch.timeout:g} s"
        for number in watch.silent({number: host.heard for number, host in self.hosts.items()}, now):
            host = self.hosts[number]
            self._register.hang_up(host.connection)
            self._strike_out_host(host, cause)
            self._machine_gone(number, cause)
        for machine in watch.silent(self.absent, now):
            self._machine_gone(machine, "did not come back to the coordinator")
        for name in watch.silent({name: worker.heard for name, worker in self.workers.items()}, now):
            self._give_up(name, cause)
        if (late := self._limbo.overdue(now, watch.timeout)) is not None:
            self._register.hang_up(late)
            self._limbo.remove(late)
            self._ask()

    def _give_up(self, name: str, cause: str, **details: Any) -> None:
        """Count a silent worker as lost, and have it killed: a hung process could come back to life later.

        ``details`` are for the event that its agent writes.
        """
        host = self.hosts.get(machine_of(name))
        if host is not None:
            message = {"type": "kill", "worker": name, "cause": cause, "details": details}
            self._register.send(host.connection, message)
        self._strike_out(name, cause)
        self.advance()

    def _look_for_hosts(self) -> None:
        """Stop the run if there have been too few hosts for longer than the patience."""
        out = self._kept_out.doubted
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
        if (text := compose.disagreement(doings, self.joined & {*doings})) is not None:
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
