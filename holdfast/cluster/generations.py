"""Generations: the half of the roster that decides which workers train together, and when.

It is a state machine. Calls change its state, and messages to send go into the register's outbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.cluster import compose
from holdfast.cluster.membership import (
    GIVEN_UP,
    Generation,
    Judge,
    Member,
    Message,
    Standing,
    machine_of,
    worker_order,
)
from holdfast.cluster.partition import KeptOut, Refusals, pairs_of, side_that_stays
from holdfast.cluster.register import Peer, Register, Worker

TRIES = 20  # generations of the same workers that may fail in a row, if they also take longer than the patience
REPORT_SECONDS = 1.0  # for workers of other machines that train already: they try to connect 20 times a second
LAST_WORDS_SECONDS = 1.0  # wait before a run without workers is over: the error that ended them may still arrive
FINISHED: Message = {"type": "stop", "code": 0, "message": "the run is finished"}


@dataclass(frozen=True, kw_only=True)
class RosterSettings:
    """Settings of the roster, the same as the agents'."""

    minimum_hosts: int = 1  # agents that the run needs to begin and to go on
    maximum_hosts: int = 1  # agents that may take part; more are refused
    heartbeat_timeout: float = 5.0  # seconds of silence after which a peer counts as lost
    patience: float = 30.0  # seconds to wait for missing hosts
    first_host: int = 0  # more than 0 after a restart of the coordinator: a number is never given twice
    step_timeout: str = "auto"  # how long a worker may show no sign of progress: see ``stuck.StepTimeout``
    master_port: int = 0  # a port that was free on the coordinator's machine: MASTER_PORT of all scripts
    run: str = ""  # random; this start of the run, the same for all coordinators that its first agent starts
    life: str = ""  # random; this coordinator process


class Generations:
    """Forms one generation after the other from the workers in the register, by the rules in ``compose``.

    ``judge`` decides whether survivors can carry the run on: this class knows nothing of the state they hold.
    ``now``: the time in seconds, of any clock that never goes back.
    """

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        self.settings = settings
        self.generation: Generation | None = None
        self.run = settings.run  # the run that generations are formed for; another one if this one is taken over
        self.stopped = False  # the run is over: nothing is decided any more
        self.absent: dict[str, float] = {}  # members without a connection that may come back, and since when
        self._register = Register()
        self.hosts, self.workers = self._register.hosts, self._register.workers
        self._judge = judge
        self._born = self._now = now
        self._begun = False  # a generation has formed, perhaps before a restart of the coordinator
        self._finishing = False  # some worker's script is over
        self._committed = False  # some worker has committed an operation
        self._breaking = False  # the generation is over, and its members are being called back
        self._called: set[str] = set()  # members that were told so
        self._invited: set[str] = set()  # members that were told that somebody waits to join
        self._announced = 0  # the newest generation that this coordinator process has formed
        self._recovered = 0  # the newest generation that has committed something
        self._last_words: tuple[float, str] | None = None  # when the run will end, and why
        self._lost: list[tuple[str, float]] = []  # members lost since the last recovery, and when
        self._kept_out = KeptOut()
        self._refusals = Refusals()
        self._in_vain = 0  # generations of the same workers in a row that have committed nothing
        self._in_vain_since = now
        self._given_up: set[str] = set()  # lost with their host, as far as known: their processes may be hung

    @property
    def members(self) -> list[str]:
        """The workers of the present generation, dead or alive."""
        return self.generation.workers if self.generation is not None else []

    def show_standing(self, worker: Worker, standing: Standing, generation: str) -> None:
        """Take in a worker's standing. ``generation``: the name of the newest one that it was in."""
        if self.generation is not None and worker.name in self.members:
            # A member that has never entered the current generation breaks it for the others.
            self._breaking = self._breaking or generation != self.generation.name
        worker.standing = standing
        self.advance()

    def advance(self) -> None:
        """Do what the present state calls for: form a generation, call its members back, or invite joiners.

        It is called after every change. A generation ends for one of two reasons: it breaks, or all members stop at a
        boundary. Either way each member shows its standing, and once all present members have, the next one forms.
        """
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
        """Return the workers that wait to join."""
        out = self._kept_out.now(self._now)
        waiting = [w for w in self.workers.values() if w.fresh and w.standing is not None]
        return [w.name for w in waiting if w.name not in self.members and machine_of(w.name) not in out]

    def _target(self) -> int:
        """Return the number of workers that the run should have."""
        return sum(host.slots for host in self.hosts.values())

    def _try_first(self) -> None:
        """Form the first generation, of a run or after a restart of the coordinator, if everybody is there."""
        names = self._waiting()
        readiness = self._readiness(names)
        if not readiness.ready or self._now < self.first_look:
            return
        if self._begun:
            self._begin_again(names, "coordinator and workers were lost together")
        else:
            self._begin(names, readiness.reason)

    def _slots(self) -> dict[int, int]:
        """Return the workers that each host will have; hosts that leave or are kept out have none and are missing."""
        out = self._kept_out.now(self._now)
        return {number: host.slots for number, host in self.hosts.items() if host.slots and number not in out}

    @property
    def first_look(self) -> float:
        """The time before which no first generation is formed, because workers that hold the state may still report.

        They do if the coordinator was restarted, and perhaps if the whole first agent was, which does not know it.
        """
        restarted = self._begun or self.settings.first_host > 0
        others = len(self.hosts) < self.settings.maximum_hosts
        wait = self.settings.heartbeat_timeout if restarted else REPORT_SECONDS if others else 0.0
        return self._born + wait

    def _readiness(self, names: Iterable[str]) -> compose.Readiness:
        waiting = Counter(machine_of(name) for name in names)
        return compose.first_generation(slots=self._slots(), minimum_hosts=self.settings.minimum_hosts, waiting=waiting)

    def _begin(self, names: Iterable[str], reason: str) -> None:
        """Announce a generation of fresh workers; those beyond their host's slots wait to join."""
        chosen = compose.first_members(waiting=names, slots=self._slots())
        for name in names:
            self.workers[name].fresh = True
        self._announce(chosen, reason)

    def _begin_again(self, names: Iterable[str], lost: str, what: str = "the model") -> None:
        """Begin again from the last checkpoint, because the state is lost; without a checkpoint end the run.

        ``lost`` and ``what``: the workers and the state that are lost, for the message.
        """
        if not self._resumable():
            # Wait a little: if an error in the script ended the workers, their agents are about to report it.
            self._last_words = (
                self._now + LAST_WORDS_SECONDS,
                f"too few workers: {lost}, and nobody is left who holds {what}",
            )
        elif self._readiness(names).ready:
            self._begin(names, f"{lost}: begin again from the last checkpoint")

    def _resumable(self) -> bool:
        """Whether a checkpoint may have the state, as past members or waiting workers say."""
        known = {} if self.generation is None else self.generation.standings
        shown = {name: w.standing for name, w in self.workers.items() if w.standing is not None}
        return self._judge(known | shown, trained=False).resumable

    def _invite(self) -> None:
        """Ask the members, each once, to stop at their next boundary, if somebody waits to join and there is room."""
        assert self.generation is not None
        if self._waiting() and len(self.members) < self._target() and not self._finishing:
            names = [name for name in self.members if name in self.workers and name not in self._invited]
            self._invited.update(names)
            message = {"type": "pause", "number": self.generation.number}
            self._register.send_all([self.workers[name] for name in names], message)

    def _regroup(self, standings: dict[str, Standing]) -> None:
        """Go on with the survivors if they hold the state or can compute it; else begin again, or end."""
        assert self.generation is not None
        standings = self._largest_side(standings)
        was_held = any(member.standing.operation for member in self.generation.members)
        judgement = self._judge(standings, trained=was_held or self._committed)
        if not judgement.goes_on and not self._finishing:
            lost = ", ".join(name for name, _ in self._lost) or "all members"
            self._send_away(standings)
            if self._recovered < self.generation.number:  # told once
                # Nobody trains, so replacements may start at once.
                self._recovered = self.generation.number
                self._register.send_all(self.hosts.values(), {"type": "recovered"})
            what = "some of the layers, nor is there a checkpoint folder" if standings else "the model"
            self._begin_again(self._waiting(), f"{lost} lost", what)
            return
        if self._finishing and not judgement.whole:  # all have voted for the end, so nothing is left to do
            for name in standings:
                self._dismiss(name, FINISHED)
            return
        self._compose(standings)

    def _largest_side(self, standings: dict[str, Standing]) -> dict[str, Standing]:
        """Return the standings of workers that can reach each other; send the others away, if there are any.

        The larger side stays; the smaller one does if only it can carry the run on.
        """
        unreached = {name: standing.unreached for name, standing in standings.items()}
        cut = self._refusals.cut(standings) | pairs_of(unreached)
        stays = side_that_stays(Counter(machine_of(name) for name in standings), cut)
        side = {name: standing for name, standing in standings.items() if machine_of(name) in stays}
        rest = {name: standing for name, standing in standings.items() if name not in side}
        if rest and not self._judge(side, trained=True).goes_on and self._judge(rest, trained=True).goes_on:
            side, rest = rest, side
        self._keep_out(rest)
        return side

    def _keep_out(self, names: Iterable[str]) -> None:
        """Send workers away whose machines others cannot reach. Their agents start new ones, which wait."""
        for machine in sorted({machine_of(name) for name in names}):
            seconds = self._kept_out.add(machine, self._now)
            self._register.log("partition", host=machine, seconds=seconds)
            text = f"holdfast: other hosts cannot reach host {machine}: it is kept out for {seconds:g} s"
            self._register.send_all(self.hosts.values(), {"type": "say", "text": text})
        for name in names:
            message = f"worker {name} was given up: other workers cannot reach its machine"
            self._dismiss(name, {"type": "stop", "code": GIVEN_UP, "message": message})

    def _compose(self, standings: dict[str, Standing]) -> None:
        """Announce the next generation from survivors and joiners, and let leavers go."""
        waiting = [] if self._finishing else self._waiting()
        made = compose.compose(standings=standings, waiting=waiting, target=self._target(), judge=self._judge)
        for name in made.dismissed:
            self._dismiss(name, {"type": "stop", "code": 0, "message": "left as asked"})
        if made.members:
            self._announce(made.members, made.reason)
        elif standings:
            text = "too few workers: all that held the model were asked to leave"
            staying = [host for host in self.hosts.values() if host.slots]  # hosts that were not asked to leave
            self._register.send_all(staying, {"type": "stop", "code": 3, "message": text})
            self.stop(0, made.reason)

    def _send_away(self, standings: dict[str, Standing]) -> None:
        """End the survivors: their part of the state is of no use alone, and their scripts are past the begin.

        If there is a checkpoint, their agents start new workers in their place.
        """
        code = GIVEN_UP if self._resumable() else 3
        for name in standings:
            message = f"worker {name} starts again from the last checkpoint: a part of the state is lost"
            self._dismiss(name, {"type": "stop", "code": code, "message": message})

    def _announce(self, names: Iterable[str], reason: str) -> None:
        """Form the next generation of these workers, by rank, and tell all members and hosts."""
        number = 1 if self.generation is None else self.generation.number + 1
        names = list(names)
        if self._is_in_vain(names):
            text = f"{', '.join(names)} could not work together {self._in_vain} times in a row"
            self.stop(3, f"{text} (events.jsonl says under 'broken' why)")
            return
        members = []
        for name in names:
            worker = self.workers[name]
            assert worker.standing is not None
            members.append(
                Member(
                    worker=name,
                    address=worker.address,
                    standing=worker.standing,
                    host=worker.host,
                    incarnation=worker.incarnation,
                )
            )
            worker.standing, worker.fresh = None, False
        self.generation = Generation(
            number=number, members=tuple(members), reason=reason, run=self.run, life=self.settings.life
        )
        self._breaking = False
        self._announced = number
        self._called.clear()
        self._invited.clear()
        self._begun = True
        peers: list[Peer] = [*(self.workers[name] for name in self.members), *self.hosts.values()]
        self._register.send_all(peers, {"type": "generation", "generation": self.generation.to_json()})
        hosts = [member.host for member in members]
        self._register.log("generation", number=number, workers=self.members, hosts=hosts, reason=reason)
        self.kill_given_up()

    def _is_in_vain(self, names: list[str]) -> bool:
        """Whether the same workers have failed for long, without a loss and without one commit: it is no use."""
        again = self.generation is not None and names == self.members and self._recovered < self.generation.number
        self._in_vain = self._in_vain + 1 if again else 0
        self._in_vain_since = self._in_vain_since if again else self._now
        return self._in_vain >= TRIES and self._now - self._in_vain_since >= self.settings.patience

    def kill_given_up(self) -> None:
        """Have processes killed that were given up with their host, once it is back and nobody needs them.

        A hung one would never end. One that lives may hold the only copy of a layer while no other generation forms.
        """
        for name in sorted(self._given_up - {*self.members}, key=worker_order):
            host = self.hosts.get(machine_of(name))
            if host is not None:
                self._given_up.discard(name)
                self._register.send(host.connection, {"type": "kill", "worker": name})

    def share(self, sender: str, message: Message) -> None:
        """Pass an address on to the other members of the generation that is forming."""
        if self.generation is not None and message["generation"] == self.generation.name:
            others = [self.workers[name] for name in self.members if name != sender and name in self.workers]
            self._register.send_all(others, message)

    def progressed(self, generation: str, operation: int) -> None:
        """Take in the first commit of a generation: recovery is over, and replacements may start."""
        if self.generation is None or generation != self.generation.name:
            return
        number = self.generation.number
        self._committed = True
        if self._breaking or self._recovered == number:  # another loss has been noticed since; or known already
            return
        self._recovered = number
        self._kept_out.reached({machine_of(name) for name in self.members})
        self._refusals = Refusals()
        if self._lost:
            ms = 1000 * (self._now - min(when for _, when in self._lost))
            lost = [name for name, _ in self._lost]
            self._register.log("recovery", lost=lost, generation=number, operation=operation, ms=ms)
            self._lost.clear()
        self._register.send_all(self.hosts.values(), {"type": "recovered"})
        self.advance()  # invites workers that wait to join, spares above all

    def _dismiss(self, name: str, message: Message) -> None:
        """Send a worker away. Messages that it still sends are ignored."""
        worker = self.workers[name]
        self._register.send(worker.connection, message)
        self._register.remove(worker)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Note that a worker's script is over. All have committed its last step, so no new workers are needed."""
        if self._finishing:
            return
        self._finishing = True
        self._register.log("finished")
        self._register.send_all(self.hosts.values(), {"type": "finishing", "members": self.members})
        for name, worker in self.workers.items():
            if name not in self.members:
                self._register.send(worker.connection, FINISHED)

    def stop(self, code: int, message: str) -> None:
        """End the run: tell everybody the exit code and the reason."""
        if self.stopped:
            return
        self._register.log("stop", code=code, message=message)
        self._register.send_all(self._register.everybody, {"type": "stop", "code": code, "message": message})
        self.stopped = True
