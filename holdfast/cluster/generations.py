"""Generations: the half of the roster that decides who trains together, and when.

A state machine: what it is told changes it, and what is to be sent goes into the register's outbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.cluster import compose
from holdfast.cluster.membership import GIVEN_UP, Generation, Judge, Member, Standing, worker_order
from holdfast.cluster.register import Peer, Register, Worker
from holdfast.cluster.wire import Message

LAST_WORDS_SECONDS = 1.0  # for the error that ended the last workers to arrive, before the run is declared over
FINISHED: Message = {"type": "stop", "code": 0, "message": "the run is finished"}


@dataclass(frozen=True, kw_only=True)
class RosterSettings:
    """What the run's agents were asked for."""

    minimum_hosts: int = 1
    maximum_hosts: int = 1
    heartbeat_timeout: float = 5.0  # seconds of silence after which a peer counts as lost
    patience: float = 30.0  # seconds to wait for missing hosts
    first_host: int = 0  # more than 0 after a restart of the coordinator: a number is never given twice


class Generations:
    """Forms one generation after the other from the workers in the register; decides with ``compose``.

    ``judge`` is asked whether survivors can carry the run on: nothing here knows what they hold.
    """

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        self.settings = settings
        self.generation: Generation | None = None
        self.stopped = False  # the run is over: nothing is decided any more
        self.absent: dict[str, float] = {}  # members that may come back, and since when they are away
        self._register = Register()
        self.hosts, self.workers = self._register.hosts, self._register.workers
        self._judge = judge
        self._born = self._now = now
        self._begun = False  # a generation has trained, perhaps before our restart
        self._finishing = False  # somebody's script is over
        self._committed = False  # somebody, some time, committed something
        self._breaking = False  # the generation is over, and its members are being called back
        self._called: set[str] = set()  # those who were told so
        self._invited: set[str] = set()  # those who were told that somebody waits to join
        self._announced = 0  # the newest generation that was formed here, and not before our restart
        self._recovered = 0  # the newest generation that has committed something
        self._last_words: tuple[float, str] | None = None  # when the run ends, and why
        self._lost: list[tuple[str, float]] = []  # whose loss the next generation recovers from, and when

    @property
    def members(self) -> list[str]:
        """The workers of the present generation, dead or alive."""
        return self.generation.workers if self.generation is not None else []

    def show_standing(self, worker: Worker, standing: Standing, generation: int) -> None:
        if self.generation is not None and worker.name in self.members:
            # One that never got into the current generation breaks it for the others.
            self._breaking = self._breaking or generation != self.generation.number
        worker.standing = standing
        self.advance()

    def advance(self) -> None:
        """Whatever has just changed, take the next step towards a whole generation."""
        if self.stopped or self.absent or self._last_words is not None:
            return
        if self.generation is None:
            self._try_first()
            return
        present = [name for name in self.members if name in self.workers]
        standings = {n: s for n in present if (s := self.workers[n].standing) is not None}
        self._breaking = self._breaking or any(s.broken for s in standings.values())
        if self._breaking:
            self._call_back(name for name in present if name not in standings)
        if len(standings) == len(present) and (standings or self._breaking):
            self._regroup(standings)
        elif not standings:
            self._invite()

    def _call_back(self, names: Iterable[str]) -> None:
        """Tell members, each once, that their generation is over."""
        assert self.generation is not None
        calling = [name for name in names if name not in self._called]
        self._called.update(calling)
        message = {"type": "regroup", "number": self.generation.number}
        self._register.send_all([self.workers[name] for name in calling], message)

    def _waiting(self) -> list[str]:
        waiting = [w for w in self.workers.values() if w.fresh and w.standing is not None]
        return [w.name for w in waiting if w.name not in self.members]

    def _target(self) -> int:
        return sum(host.slots for host in self.hosts.values())

    def _try_first(self) -> None:
        names = self._waiting()
        readiness = self._readiness(names)
        restarted = self._begun or self.settings.first_host > 0
        if not readiness.ready or (restarted and self._now - self._born <= self.settings.heartbeat_timeout):
            return  # after our own restart those who hold the state may yet report
        if self._begun:
            self._begin_again(names, "coordinator and workers were lost together")
        else:
            self._begin(names, readiness.reason)

    def _readiness(self, names: Iterable[str]) -> compose.Readiness:
        waiting = Counter(worker_order(name)[0] for name in names)
        slots = {number: host.slots for number, host in self.hosts.items()}
        return compose.first_generation(slots=slots, minimum_hosts=self.settings.minimum_hosts, waiting=waiting)

    def _begin(self, names: Iterable[str], reason: str) -> None:
        ordered = sorted(names, key=worker_order)
        for name in ordered[self._target() :]:  # one that never got the state waits like any other
            self.workers[name].fresh = True
        self._announce(ordered[: self._target()], reason)

    def _begin_again(self, names: Iterable[str], lost: str, what: str = "the model") -> None:
        """Nobody has the state: from the last checkpoint on whatever there is, or it is the end."""
        if not self._resumable():
            # Not at once: if an error in the script ended them, their agents are about to say so.
            self._last_words = (
                self._now + LAST_WORDS_SECONDS,
                f"too few workers: {lost}, and nobody is left who holds {what}",
            )
        elif self._readiness(names).ready:
            self._begin(names, f"{lost}: begin again from the last checkpoint")

    def _resumable(self) -> bool:
        """Whether a checkpoint may have the state: as those say who were here, or wait."""
        known = {} if self.generation is None else self.generation.standings
        shown = {name: w.standing for name, w in self.workers.items() if w.standing is not None}
        return self._judge(known | shown, trained=False).resumable

    def _invite(self) -> None:
        """Somebody waits to join: ask the members, each once, to stop at their next boundary."""
        assert self.generation is not None
        if self._waiting() and len(self.members) < self._target() and not self._finishing:
            names = [name for name in self.members if name in self.workers and name not in self._invited]
            self._invited.update(names)
            message = {"type": "pause", "number": self.generation.number}
            self._register.send_all([self.workers[name] for name in names], message)

    def _regroup(self, standings: dict[str, Standing]) -> None:
        assert self.generation is not None
        was_held = any(member.standing.operation for member in self.generation.members)
        judgement = self._judge(standings, trained=was_held or self._committed)
        if not judgement.goes_on and not self._finishing:
            lost = ", ".join(name for name, _ in self._lost) or "all members"
            self._send_away(standings)
            self._register.send_all(
                self.hosts.values(), {"type": "recovered"}
            )  # nobody trains who would need the cores
            what = "some of the layers, nor is there a checkpoint folder" if standings else "the model"
            self._begin_again(self._waiting(), f"{lost} lost", what)
            return
        if self._finishing and not judgement.whole:  # all had voted for the end, and the others are gone
            for name in standings:
                self._dismiss(name, FINISHED)
            return
        self._compose(standings)

    def _compose(self, standings: dict[str, Standing]) -> None:
        waiting = [] if self._finishing else self._waiting()
        made = compose.compose(standings=standings, waiting=waiting, target=self._target(), judge=self._judge)
        for name in made.dismissed:
            self._dismiss(name, {"type": "stop", "code": 0, "message": "left as asked"})
        if made.members:
            self._announce(made.members, made.reason)
        elif standings:
            text = "too few workers: all that held the model were asked to leave"
            staying = [host for host in self.hosts.values() if host.slots]  # those not asked to leave
            self._register.send_all(staying, {"type": "stop", "code": 3, "message": text})
            self.stop(0, made.reason)

    def _send_away(self, standings: dict[str, Standing]) -> None:
        """Survivors hold a part that is of no use, and their scripts are in the middle: their agents start new ones."""
        code = GIVEN_UP if self._resumable() else 3
        for name in standings:
            message = f"worker {name} starts again from the last checkpoint: a part of the state is lost"
            self._dismiss(name, {"type": "stop", "code": code, "message": message})

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
        self._announced = number
        self._called.clear()
        self._invited.clear()
        self._begun = True
        peers: list[Peer] = [*(self.workers[name] for name in self.members), *self.hosts.values()]
        self._register.send_all(peers, {"type": "generation", "generation": self.generation.to_json()})
        hosts = [member.host for member in members]
        self._register.log("generation", number=number, workers=self.members, hosts=hosts, reason=reason)

    def share(self, sender: str, message: Message) -> None:
        """Pass an address on to the other members of the generation that is forming."""
        if self.generation is not None and message["generation"] == self.generation.number:
            others = [self.workers[name] for name in self.members if name != sender and name in self.workers]
            self._register.send_all(others, message)

    def progressed(self, number: int, operation: int) -> None:
        """The first commit of a generation: whoever was lost is recovered from, replacements may start."""
        if self.generation is None or number != self.generation.number:
            return
        self._committed = True
        if self._breaking or self._recovered == number:  # committed before the loss was noticed; or told before
            return
        self._recovered = number
        if self._lost:
            ms = 1000 * (self._now - min(when for _, when in self._lost))
            lost = [name for name, _ in self._lost]
            self._register.log("recovery", lost=lost, generation=number, operation=operation, ms=ms)
            self._lost.clear()
        self._register.send_all(self.hosts.values(), {"type": "recovered"})
        self.advance()  # whoever waits to join, a spare above all, is invited now

    def _dismiss(self, name: str, message: Message) -> None:
        """Send a worker away; what it says from here on is not heard."""
        worker = self.workers[name]
        self._register.send(worker.connection, message)
        self._register.remove(worker)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Somebody's script is over, and all have committed its last step: nobody else is needed."""
        if self._finishing:
            return
        self._finishing = True
        self._register.log("finished")
        self._register.send_all(self.hosts.values(), {"type": "finishing"})
        for name, worker in self.workers.items():
            if name not in self.members:
                self._register.send(worker.connection, FINISHED)

    def stop(self, code: int, message: str) -> None:
        if self.stopped:
            return
        self._register.log("stop", code=code, message=message)
        self._register.send_all(self._register.everybody, {"type": "stop", "code": code, "message": message})
        self.stopped = True
