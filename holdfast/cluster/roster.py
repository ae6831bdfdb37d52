"""The roster: a state machine that knows which machines are connected, and decides which generation comes next.

Events and the time go in, messages come out. It has no socket and no clock, so a test can play any history. It hears of
workers through their agents, who repeat everything it must know when they connect. So the coordinator may be killed and
started again while training goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from holdfast.cluster import announce, compose
from holdfast.cluster.generations import FINISHED, Generations, RosterSettings
from holdfast.cluster.labels import Label, difference
from holdfast.cluster.membership import GIVEN_UP, Generation, Judge, Message, Standing, machine_of
from holdfast.cluster.muster import Worker
from holdfast.cluster.pulse import Still
from holdfast.cluster.quorum.records import Decided
from holdfast.cluster.register import Host, Sent
from holdfast.cluster.rounds import Failure, Rounds
from holdfast.cluster.stuck import StepTimeout, StuckWatch

DONE = "it is done"  # cause of a host's end that is no failure
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


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """Why a worker cannot take part."""

    code: int
    text: str
    refused: bool = False  # it differs from the others


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """An agent that is not entered yet: its hello, and what it has said since."""

    hello: Message
    said: list[Message] = field(default_factory=list)

    @property
    def known(self) -> tuple[str, int]:
        """The run and the number of the generation that it knows."""
        return self.hello["generation"]["run"], self.hello["generation"]["number"]


class Roster(Generations):
    """The connected agents and their workers. ``Generations``, the base class, decides which of them train together."""

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        super().__init__(settings, judge=judge, now=now)
        self._stuck = StuckWatch(StepTimeout.parse(settings.step_timeout))
        self._errors: list[str] = []  # the last line of each error that ended a worker
        self._next_host = settings.first_host
        self._labels: dict[str, Label] = {}  # those that differ, and fit together; by the first worker that had each
        self._names: dict[str, str] = {}  # the incarnation of each worker that was ever heard of
        self._has_run = False  # a worker has come, or its agent says so: the script has a ``Run``
        self._rounds = Rounds()  # of a script without one
        self._rejoined = False  # there are agents whose workers were started under another coordinator, as etcd knows
        self._born = now
        self._limbo: dict[int, _Waiting] = {}  # agents who know of a generation that this roster does not
        self._asked: tuple[int, float] | None = None  # which of them was asked for it, and when
        self._deserted = False  # the last host is done
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

    # --- coming ----------------------------------------------------------------------------------

    def _agent_came(self, connection: int, hello: Message) -> None:
        """Enter an agent; or, if its workers are in a generation that this roster does not know, ask for that first.

        One of those who know it is asked: it may be large.
        """
        known = hello["generation"]
        if known is not None and known["run"] == self.run:
            self._newest = max(self._newest, known["number"])
        if known is not None and self._counts_more(known["run"], known["number"]):
            self._limbo[connection] = _Waiting(hello=hello)
            self._ask()
        else:
            self._enter(connection, hello)

    def _ask(self) -> None:
        """Ask an agent for the generation that it knows, unless one was asked."""
        if self._asked is None and self._limbo:
            newest = max(self._limbo, key=lambda number: self._limbo[number].known[1])
            self._asked = (newest, self._now)
            self._register.send(newest, {"type": "recall"})

    def _heard_in_limbo(self, event: Heard | Disconnected) -> None:
        """Take in the answer of an agent that was asked for its generation, or its end."""
        connection = event.connection
        if isinstance(event, Heard) and event.message["type"] != "recalled":
            self._limbo[connection].said.append(event.message)
            return
        if isinstance(event, Disconnected):
            del self._limbo[connection]
        else:
            told = announce.heard(event.message["generation"], None)
            if self._counts_more(told.run, told.number):
                self._remember(told)
        if self._asked is not None and self._asked[0] == connection:
            self._asked = None
        for number, waiting in list(self._limbo.items()):
            if not self._counts_more(*waiting.known):
                del self._limbo[number]
                self._enter(number, waiting.hello)
                for message in waiting.said:
                    self._take(Heard(connection=number, message=message))
        if self._asked is not None and self._asked[0] not in self._limbo:
            self._asked = None  # its generation counts no more: it was entered without it
        self._ask()

    def _enter(self, connection: int, hello: Message) -> None:
        """Enter an agent, with a new number if it has none yet; refuse it if the run has all its hosts."""
        entry = compose.enter_host(
            number=hello["host"],
            agent=hello["agent"],
            known=self._register.numbers,
            next_number=self._next_number(hello["agent"]),
            most=self.settings.maximum_hosts,
        )
        if entry.number is None:
            self._register.send(connection, {"type": "stop", "code": 2, "message": entry.reason})
            self._register.hang_up(connection)
            return
        number, known = entry.number, hello["generation"]
        self._next_host = max(self._next_host, number + 1)
        host = Host(connection=connection, heard=self._now, number=number, agent=hello["agent"], slots=hello["slots"])
        host.told = "" if known is None else f"{known['number']}/{known['life']}"
        self._register.add(host)
        self._begun = self._begun or hello["begun"]
        self._committed = self._committed or hello["committed"]
        if hello["begun"] or hello["run"]:
            self._note_run()
        if hello["finished"]:
            self.finish(hello["over"])
        self._welcome(host, hello)
        if self._muster.members_on(number):  # messages on its old connection may be lost: send them again
            self._uncalled.add(number)
            self._uninvited.add(number)
        self._workers_came(number, hello)
        if hello["stays"]:  # it said so before a restart of the coordinator: others may be about to come back
            self._register.retire(host)
        self.advance()

    def _welcome(self, host: Host, hello: Message) -> None:
        """Tell an agent its number, and what it may have missed."""
        welcome = {"type": "welcome", "host": host.number, "master_port": self.settings.master_port}
        # A run that etcd knows from an earlier start has higher numbers, but its scripts' ranks begin with 0 as ever.
        welcome["rank"] = host.number - (self.settings.first_host if self.settings.recalls else 0)
        # Only at the end does it need the names of all. Else, after a restart, all names would go to all machines.
        members = self.members if self._finishing else []
        welcome |= {"begun": self.generation is not None, "finishing": self._finishing, "members": members}
        welcome |= {"run": self._has_run, "round": self._rounds.number, "waits": self._waits_for_round()}
        self._register.send(host.connection, welcome)
        self._register.log("host", host=host.number, slots=host.slots)
        if self._missed_round(hello):
            self._register.send(host.connection, {"type": "clear", "round": hello["round"]})

    def _workers_came(self, machine: int, hello: Message) -> None:
        """Take in what an agent tells of its workers: who has ended, who lives. Members that it leaves out are lost."""
        for name in self._muster.workers_on(machine):  # those of its old connection: it tells of them anew
            self._muster.remove(name)
        self._hung_up.discard(machine)
        self.absent[machine] = self._now  # until all is told, so that nothing is decided before
        for report in hello["exits"]:
            self._worker_ended(report)
        for record in hello["workers"]:
            self._worker_came(record, hello["labels"][record["label"]])
        del self.absent[machine]
        for name in self._muster.members_on(machine):
            if name not in self.workers:
                self._strike_out(name, "it has ended while the coordinator was away")

    def _next_number(self, agent: str) -> int:
        """Return the number that an agent gets if it is new. The first agent's is kept for it.

        Scripts without a ``Run`` have their rank 0 on host 0, at the coordinator's address.
        """
        head, first = self.settings.head, self.settings.first_host
        if head and agent != head:
            return max(self._next_host, first + 1)
        return first if head else self._next_host

    def _worker_came(self, record: Message, label: Label) -> None:
        """Enter a worker, new or known from before, unless it cannot take part."""
        self._note_run()
        known = record["generation"]  # the name of the newest generation that it was in
        shown = record["standing"]
        worker = Worker(
            name=record["worker"],
            address=record["address"],
            port=record["port"],
            incarnation=record["incarnation"],
            label=dict(label),
            host=record["host"],
            fresh=not known,
            heard=self._now - float(record["silent"]),
        )
        if (refusal := self._refuses(worker, known)) is not None:
            self._refuse(worker, refusal)
            return
        self._muster.add(worker)
        self._gone.discard(worker.name)  # a member whose machine counted as lost is back, before the others went on
        self._names[worker.name] = worker.incarnation
        if known:
            self._last_words = None  # somebody who holds the state is back
            self._refuse_joiners_unlike(worker)
        if shown is not None:
            self.show_standing(worker, Standing(**shown["standing"]), shown["generation"])

    def _refuse(self, worker: Worker, why: _Refusal) -> None:
        """Send a worker away that cannot take part. One that is silent hangs, and would not hear it."""
        host = self.hosts.get(worker.machine)
        if host is not None and self._now - worker.heard > self.settings.heartbeat_timeout:
            self._register.send(host.connection, {"type": "kill", "worker": worker.name, "cause": why.text})
        self._dismiss(worker.name, why.code, why.text, refused=why.refused)

    def _refuses(self, worker: Worker, known: str) -> _Refusal | None:
        """Return why a worker cannot take part: it was given up, it differs from the others, or the run is over."""
        if self._is_another(worker.name, worker.incarnation):
            return _given_up(worker.name, "another worker had this name before")
        if known:  # a worker that trains already
            return self._refuses_member(worker.name, int(known.partition("/")[0]))
        if self._finishing:
            return _Refusal(code=0, text=FINISHED)
        if not self.workers:
            self._labels.clear()  # nobody is left who trains something else
        for name, label in self._labels.items():
            if worker.label == label:
                worker.label = label
                return None
            if (said := difference(worker.label, label)) is not None:
                return _differs(worker.name, name, said)
        self._labels[worker.name] = worker.label
        return None

    def _refuse_joiners_unlike(self, member: Worker) -> None:
        """Send away joiners that train something else: they came while this member had lost its connection."""
        for joiner in self._muster.waiting:
            if (said := difference(joiner.label, member.label)) is not None:
                self._refuse(joiner, _differs(joiner.name, member.name, said))

    def _is_another(self, name: str, incarnation: str) -> bool:
        """Whether a name belongs to another process: an agent that was started anew counts its workers from 0 again."""
        return self._names.get(name, incarnation) != incarnation

    def _refuses_member(self, name: str, number: int) -> _Refusal | None:
        """Return why a worker that trains already cannot go on: the run has gone on, or has ended, without it."""
        if number < self._over:
            return _Refusal(code=0, text=FINISHED)
        if self.generation is None or self._muster.is_member(name):
            return None
        begun_anew = self.announced and number > self.generation.number
        return _given_up(name, "the run was begun anew without it") if begun_anew else _given_up(name)

    def _counts_more(self, run: str, number: int) -> bool:
        """Whether a generation replaces the one that this coordinator knows: of its own run, then the newest.

        Not if this coordinator has formed its own: the others had not come in time.
        """
        if self.generation is None:
            return True
        ours = self.settings.run
        newer = (run == ours, number) > (self.generation.run == ours, self.generation.number)
        return newer and not self.announced

    def _remember(self, known: Generation) -> None:
        """Take over, after a restart of the coordinator, the generation that an agent tells of.

        If the whole first agent was started anew, it is a generation of another run, which goes on under this roster.
        """
        self._begun = True
        self.run = known.run
        self._names |= {member.worker: member.incarnation for member in known.members}
        for name in [n for n, w in self.workers.items() if self._is_another(n, w.incarnation)]:
            self._refuse(self.workers[name], _given_up(name, "another worker had this name before"))
        self._muster.begin(known)
        self._gone.clear()
        self._nobody_was_told()
        machines = sorted({machine_of(name) for name in known.workers})
        self.absent = {machine: self._now for machine in machines if machine not in self.hosts}
        for name in [n for n in known.workers if machine_of(n) in self.hosts and n not in self.workers]:
            self._strike_out(name, "its machine was started anew")
        for name in [n for n, w in self.workers.items() if not w.fresh and not self._muster.is_member(n)]:
            self._refuse(self.workers[name], _given_up(name))

    # --- going -----------------------------------------------------------------------------------

    def _disconnected(self, host: Host) -> None:
        """Take in a closed connection. It is no loss yet: the network may have closed it, and the agent comes back.

        Training does not need it. ``_waits_for_absent`` says when it is a loss.
        """
        self._strike_out_host(host, "connection lost")
        if any(name not in self._gone for name in self._muster.members_on(host.number)):
            self.absent[host.number] = self._now
            self._hung_up.add(host.number)
        self.advance()

    def _host_done(self, host: Host, *, stays: bool) -> None:
        """Take in that an agent ends, or only keeps the coordinator from now on (``stays``)."""
        self._strike_out_host(host, DONE, stays=stays)
        self._machine_gone(host.number, "its agent has ended")
        self.advance()

    def _strike_out_host(self, host: Host, cause: str, *, stays: bool = False) -> None:
        """Strike out a host, and forget its workers: it tells of them when it comes back."""
        if stays:
            self._register.retire(host)
        else:
            self._register.remove(host)
        for name in self._muster.workers_on(host.number):
            self._muster.remove(name)
        self._register.log("host-gone", host=host.number, cause=cause)
        self._deserted = not self.hosts and (cause == DONE or self._finishing)
        self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        """End the run if the last host is done, unless others may come: soon after a restart not all are back."""
        others = bool(self.absent or self._limbo) or (self._is_restarted and self._now < self.first_look)
        if self._deserted and not self.hosts and (self._finishing or not others):
            self.stopped = True

    def _worker_ended(self, report: Message) -> None:
        """Take in an agent's report that a worker has ended."""
        self._register.log("exit", **{k: v for k, v in report.items() if k not in ("type", "incarnation")})
        name, error = report["worker"], report["error"]
        if self._is_another(name, report["incarnation"]):
            return  # it was refused, because its name belongs to another
        if report.get("run"):
            self._note_run()
        ends_round = report["code"] and "round" in report and not report["cleared"]
        if ends_round and not self._has_run and not (error is not None and error["final"]):
            failure = Failure(who=f"worker {name}", cause=report["cause"], error=error)
            if not (self._begun or self._finishing):
                self._clear_round(self._rounds.failed(report["round"], failure))
            return
        is_known = name in self.workers or (self._muster.is_member(name) and machine_of(name) in self.absent)
        if report["code"] == 0 and error is None:
            self._ended_well(name, finished=report["finished"], is_known=is_known)
        elif is_known:
            self._strike_out(name, report["cause"])
        self.advance()
        if error is not None:
            self._judge_error(name, error, cleared=bool(report.get("cleared")))

    def _ended_well(self, name: str, *, finished: bool, is_known: bool) -> None:
        """Take in that a worker has ended with code 0: the run is over, or it was asked to leave."""
        if finished and self._muster.is_member(name):
            self._let_go(name)
            self.finish()
        elif is_known and self._muster.is_member(name):
            self._strike_out(name, "it has ended")
        else:
            self._let_go(name)

    def _judge_error(self, name: str, error: Message, *, cleared: bool) -> None:
        """Stop the run for an error of the script, or tell the hosts that it goes on."""
        if error["final"]:
            if not error.get("refused") or self.generation is None:  # a refused joiner does not end the training
                self.stop(error["code"], error["text"])
            return
        if cleared:
            return
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

    # --- scripts without a Run -------------------------------------------------------------------

    def _note_run(self) -> None:
        """Note that the script has a ``Run``, and tell the hosts: from here on lost workers are replaced one by one."""
        if not self._has_run:
            self._has_run = True
            self._register.send_all(self.hosts.values(), {"type": "run"})

    def _waits_for_round(self) -> bool:
        """Whether a new host waits for the next round, since the present one has other members, or is over.

        The first round has no list of members: who comes late to it starts at once, as scripts with a ``Run`` need it.
        """
        goes_on = self._rounds.number > 0 or self._rounds.clearing or self._rejoined
        return goes_on and not (self._has_run or self._begun)

    def _missed_round(self, hello: Message) -> bool:
        """Whether an agent that comes back is still in a round that was over meanwhile."""
        rounds = self._rounds
        known = hello["host"] is not None and "round" in hello and not self._has_run
        return known and (hello["round"] < rounds.number or (rounds.clearing and hello["round"] == rounds.number))

    def _clear_round(self, is_new: bool) -> None:
        """Have all hosts kill what is left of a round that has failed, if they were not told yet."""
        if is_new:
            self._register.send_all(self.hosts.values(), {"type": "clear", "round": self._rounds.number})
        self._settle_round()

    def _settle_round(self) -> None:
        """End the run if all workers have ended well; begin the next round, or end the run, after one that failed."""
        hosts = self._slots().keys()
        if not self._has_run and self._rounds.is_over(hosts) and self._all_have_come(len(hosts)):
            self.finish()
        if not self._rounds.settled(hosts):
            return
        verdict = self._rounds.verdict()
        if verdict.stop:
            self.stop(verdict.code, verdict.text)
        elif len(hosts) >= self.settings.minimum_hosts:
            order = self._rounds.begin(hosts)
            self._register.log("restart", round=order["round"], hosts=order["hosts"], reason=verdict.text)
            self._register.send_all(self.hosts.values(), {"type": "say", "text": f"holdfast: {verdict.text}"})
            self._register.send_all([self.hosts[number] for number in hosts], order)

    def _all_have_come(self, hosts: int) -> bool:
        """Whether the first round has all its hosts, or has waited long enough for them.

        A short script may be over on one host before another one has started.
        """
        needed = self.settings.first_hosts or self.settings.minimum_hosts
        return self._rounds.number > 0 or hosts >= needed or self._now - self._born > self.settings.patience

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
        if self._asked is not None and now - self._asked[1] > watch.timeout:
            self._register.hang_up(self._asked[0])
            del self._limbo[self._asked[0]]
            self._asked = None
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


def _given_up(name: str, reason: str = "it counted as lost") -> _Refusal:
    return _Refusal(code=GIVEN_UP, text=f"worker {name} was given up: {reason}")


def _differs(name: str, other: str, said: str) -> _Refusal:
    text = f"worker {name} does not train the same as {other}: {said}"
    return _Refusal(code=2, text=f"{text} (start every worker with the same script and settings)", refused=True)
