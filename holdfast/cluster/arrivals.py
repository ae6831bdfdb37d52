"""Arrivals: the part of the roster that takes in agents that connect, and the workers that they tell of."""

from __future__ import annotations

from holdfast.cluster import compose
from holdfast.cluster.admission import Refusal, given_up, unlike
from holdfast.cluster.endings import Endings
from holdfast.cluster.generations import FINISHED, RosterSettings
from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Generation, Judge, Message, Standing, machine_of
from holdfast.cluster.muster import Worker
from holdfast.cluster.register import Host


class Arrivals(Endings):
    """Enters agents and workers, or sends them away. What they know of the run counts, if it is the newest."""

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        super().__init__(settings, judge=judge, now=now)
        self._next_host = settings.first_host

    def _agent_came(self, connection: int, hello: Message) -> None:
        """Enter an agent; or, if its workers are in a generation that this roster does not know, ask for that first.

        One of those who know it is asked: it may be large.
        """
        known = hello["generation"]
        if known is not None and known["run"] == self.run:
            self._newest = max(self._newest, known["number"])
        if known is not None and self._counts_more(known["run"], known["number"]):
            self._limbo.add(connection, hello)
            self._ask()
        else:
            self._enter(connection, hello)

    def _ask(self) -> None:
        """Ask an agent for the generation that it knows, unless one was asked."""
        if (asked := self._limbo.ask(self._now)) is not None:
            self._register.send(asked, {"type": "recall"})

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
        self._admission.note(worker)
        if known:
            self._last_words = None  # somebody who holds the state is back
            self._refuse_joiners_unlike(worker)
        if shown is not None:
            self.show_standing(worker, Standing(**shown["standing"]), shown["generation"])

    def _refuse(self, worker: Worker, why: Refusal) -> None:
        """Send a worker away that cannot take part. One that is silent hangs, and would not hear it."""
        host = self.hosts.get(worker.machine)
        if host is not None and self._now - worker.heard > self.settings.heartbeat_timeout:
            self._register.send(host.connection, {"type": "kill", "worker": worker.name, "cause": why.text})
        self._dismiss(worker.name, why.code, why.text, refused=why.refused)

    def _refuses(self, worker: Worker, known: str) -> Refusal | None:
        """Return why a worker cannot take part: it was given up, it differs from the others, or the run is over."""
        if self._admission.is_another(worker.name, worker.incarnation):
            return given_up(worker.name, "another worker had this name before")
        if known:  # a worker that trains already
            return self._refuses_member(worker.name, int(known.partition("/")[0]))
        if self._finishing:
            return Refusal(code=0, text=FINISHED)
        return self._admission.compare(worker, alone=not self.workers)

    def _refuse_joiners_unlike(self, member: Worker) -> None:
        """Send away joiners that train something else: they came while this member had lost its connection."""
        for joiner in self._muster.waiting:
            if (refusal := unlike(joiner, member)) is not None:
                self._refuse(joiner, refusal)

    def _refuses_member(self, name: str, number: int) -> Refusal | None:
        """Return why a worker that trains already cannot go on: the run has gone on, or has ended, without it."""
        if number < self._over:
            return Refusal(code=0, text=FINISHED)
        if self.generation is None or self._muster.is_member(name):
            return None
        begun_anew = self.announced and number > self.generation.number
        return given_up(name, "the run was begun anew without it") if begun_anew else given_up(name)

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
        self._admission.note_members(known.members)
        for name in [n for n, w in self.workers.items() if self._admission.is_another(n, w.incarnation)]:
            self._refuse(self.workers[name], given_up(name, "another worker had this name before"))
        self._muster.begin(known)
        self._gone.clear()
        self._nobody_was_told()
        machines = sorted({machine_of(name) for name in known.workers})
        self.absent = {machine: self._now for machine in machines if machine not in self.hosts}
        for name in [n for n in known.workers if machine_of(n) in self.hosts and n not in self.workers]:
            self._strike_out(name, "its machine was started anew")
        for name in [n for n, w in self.workers.items() if not w.fresh and not self._muster.is_member(n)]:
            self._refuse(self.workers[name], given_up(name))
