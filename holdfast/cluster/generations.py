"""Generations: the part of the roster that decides which workers train together, and when.

It is a state machine. Calls change its state, and messages to send go into the register's outbox.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.cluster import compose
from holdfast.cluster.announce import announce
from holdfast.cluster.membership import GIVEN_UP, Generation, Judge, Member, Message, Standing, machine_of
from holdfast.cluster.muster import Muster, Worker
from holdfast.cluster.partition import LONGEST_SECONDS, KeptOut, Refusals, pairs_of, side_that_stays
from holdfast.cluster.quorum.records import Decided
from holdfast.cluster.register import Register
from holdfast.cluster.watch import Watch

TRIES = 20  # generations of the same workers that may fail in a row, if they also take longer than the patience
REPORT_SECONDS = 1.0  # for other machines whose workers train already: they try to connect 20 times a second
LAST_WORDS_SECONDS = 1.0  # wait before a run without workers is over: the error that ended them may still arrive
FINISHED = "the run is finished"


@dataclass(frozen=True, kw_only=True)
class RosterSettings:
    """Settings of the roster, the same as the agents'."""

    minimum_hosts: int = 1  # agents that the run needs to begin and to go on
    maximum_hosts: int = 1  # agents that may take part; more are refused
    first_hosts: int = 0  # agents of the first round of a script without a ``Run``; 0: the minimum
    heartbeat_timeout: float = 5.0  # seconds of silence after which a machine or a worker counts as lost
    patience: float = 30.0  # seconds to wait for missing hosts
    first_host: int = 0  # more than 0 after a restart of the coordinator: a number is never given twice
    step_timeout: str = "auto"  # how long a worker may show no sign of progress: see ``stuck.StepTimeout``
    master_port: int = 0  # a port that was free on the coordinator's machine: MASTER_PORT of all scripts
    run: str = ""  # random; this start of the run, the same for all coordinators that its first agent starts
    life: str = ""  # random; this coordinator process
    head: str = ""  # random; the agent beside the coordinator, for which the first number is kept. Empty: for nobody
    newest: int = 0  # the number of the newest generation that etcd knows: folders refuse those with lower numbers
    recalls: bool = False  # a coordinator begins with what those before it knew, which etcd keeps


class Generations:
    """Forms one generation after the other from the workers in the muster, by the rules in ``compose``.

    ``judge`` decides whether survivors can carry the run on: this class knows nothing of the state they hold.
    ``now``: the time in seconds, of any clock that never goes back.
    """

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        self.settings = settings
        self.run = settings.run  # the run that generations are formed for; another one if this one is taken over
        self.stopped = False  # the run is over: nothing is decided any more
        self.absent: dict[int, float] = {}  # machines of members without a connection, and since when
        self._hung_up: set[int] = set()  # those of them whose connection to this coordinator has closed
        self._register = Register()
        self._muster = Muster()
        self.hosts, self.workers = self._register.hosts, self._muster.workers
        self._judge = judge
        self._born = self._now = now
        self._watch = Watch(timeout=settings.heartbeat_timeout, patience=settings.patience, now=now)
        self._begun = False  # a generation has formed, perhaps before a restart of the coordinator
        self._finishing = False  # some worker's script is over
        self._over = 0  # the newest generation in which that was, as far as known
        self._committed = False  # some worker has committed an operation
        self._breaking = False  # the generation is over, and its members are being called back
        self._uncalled: set[int] = set()  # machines of members that were not told so
        self._uninvited: set[int] = set()  # machines of members that were not told that somebody waits to join
        self.announced = 0  # the newest generation that this coordinator process has formed
        self._newest = settings.newest  # the highest number of this run's generations that was heard of
        self._recovered = 0  # the newest generation that has committed something
        self._last_words: tuple[float, str] | None = None  # when the run will end, and why
        self._lost: list[tuple[str, float]] = []  # members lost since the last recovery, and when
        self._gone: set[str] = set()  # members of the present generation that were lost, or sent away, or are done
        self._kept_out = KeptOut()
        self._refusals = Refusals()
        self._in_vain = 0  # generations of the same workers in a row that have committed nothing
        self._in_vain_since = now
        self._has_checkpoints = False  # a worker has said that the run has a folder of checkpoints
        self.joined: set[str] = set()  # workers that came after the begin, as far as this coordinator knows

    @property
    def generation(self) -> Generation | None:
        """The present generation."""
        return self._muster.generation

    @property
    def members(self) -> list[str]:
        """The workers of the present generation, dead or alive."""
        return self._muster.members

    @property
    def is_recovering(self) -> bool:
        """Whether the generation has broken, or the one that follows a loss has committed nothing yet."""
        return self._breaking or bool(self._lost)

    def show_standing(self, worker: Worker, standing: Standing, generation: str) -> None:
        """Take in a worker's standing. ``generation``: the name of the newest one that it was in."""
        if self.generation is not None and self._muster.is_member(worker.name):
            # A member that has never entered the current generation breaks it for the others.
            self._breaking = self._breaking or generation != self.generation.name or standing.broken
        self._muster.show(worker, standing)
        self.advance()

    def advance(self) -> None:
        """Do what the present state calls for: form a generation, call its members back, or invite joiners.

        It is called after every change. A generation ends for one of two reasons: it breaks, or all members stop at a
        boundary. Either way each member shows its standing, and once all present members have, the next one forms.
        """
        if self.stopped or self._last_words is not None or self._waits_for_absent():
            return
        if self.generation is None:
            self._try_first()
            return
        if self._breaking:
            self._call_back()
        if self._muster.all_have_shown and (self._muster.standings or self._breaking):
            self._regroup({name: s for name in self.members if (s := self._muster.standings.get(name)) is not None})
        elif not self._muster.standings:
            self._invite()

    def _waits_for_absent(self) -> bool:
        """Whether machines of members have no connection at the moment, and may come back.

        One whose connection has closed, while others say that the generation is broken, is lost: its workers have no
        connection either. A coordinator that slept cannot tell.
        """
        if self._breaking and not self._watch.is_dazed(self._now):
            for machine in sorted(self._hung_up & self.absent.keys()):
                self._machine_gone(machine, "connection lost")
        return bool(self.absent)

    def _machine_gone(self, machine: int, cause: str) -> None:
        """Count the workers of a machine without a connection as lost."""
        self.absent.pop(machine, None)
        self._hung_up.discard(machine)
        for name in self._muster.members_on(machine):
            self._strike_out(name, cause)

    def _strike_out(self, name: str, cause: str) -> None:
        """Note that a worker is lost. If it was a member, its generation is over."""
        if name in self._gone:
            return
        member = self._muster.is_member(name)
        self._muster.remove(name)
        self._register.log("failure", worker=name, cause=cause, member=member)
        if member:
            self._gone.add(name)
            self._breaking = True
            machine = machine_of(name)
            if self._gone.issuperset(self._muster.members_on(machine)):
                self._uncalled.discard(machine)  # nobody is left there to be called
            if not self._finishing and name not in dict(self._lost):
                self._lost.append((name, self._now))

    def _call_back(self) -> None:
        """Tell the machines of members, each once, that their generation is over."""
        assert self.generation is not None
        self._tell_once({"type": "regroup", "number": self.generation.number}, self._uncalled)

    def _tell_once(self, message: Message, machines: set[int]) -> None:
        """Send a message to those of these machines that are connected, and take them out of the set."""
        telling = sorted(machines & self.hosts.keys())
        machines.difference_update(telling)
        self._register.send_all([self.hosts[number] for number in telling], message)

    def _waiting(self) -> list[str]:
        """Return the workers that wait to join."""
        out = self._kept_out.now(self._now)
        return [worker.name for worker in self._muster.waiting if worker.machine not in out]

    def _target(self) -> int:
        """Return the number of workers that the run should have."""
        return self._register.slots

    def _try_first(self) -> None:
        """Form the first generation, of a run or after a restart of the coordinator, if everybody is there."""
        out = self._kept_out.now(self._now)
        expected = sum(self._slots().values()) if out else self._register.slots
        if self._muster.waiting_count < expected:
            return  # a quick look, because it is asked for each worker that comes
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
    def _is_restarted(self) -> bool:
        """Whether this coordinator has taken the place of another one."""
        return self.settings.first_host > 0

    @property
    def first_look(self) -> float:
        """The time before which no first generation is formed, because workers that hold the state may still report.

        They do if the coordinator was restarted, and perhaps if the whole first agent was, which does not know it.
        Nobody could report while this coordinator slept: the wait begins anew when it wakes up.
        """
        restarted = self._begun or (self._is_restarted and not self.settings.recalls)
        others = len(self.hosts) < self.settings.maximum_hosts
        wait = self.settings.heartbeat_timeout if restarted else REPORT_SECONDS if others else 0.0
        return max(self._born, self._watch.awake_since(self._now)) + wait

    def _readiness(self, names: Iterable[str]) -> compose.Readiness:
        waiting = Counter(machine_of(name) for name in names)
        return compose.first_generation(slots=self._slots(), minimum_hosts=self.settings.minimum_hosts, waiting=waiting)

    def _begin(self, names: Iterable[str], reason: str) -> None:
        """Announce a generation of fresh workers; those beyond their host's slots wait to join."""
        chosen = compose.first_members(waiting=names, slots=self._slots())
        for name in names:
            self._muster.refresh(name)
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
        """Whether a checkpoint may have the state, as past members or waiting workers say, or have once said."""
        known = {} if self.generation is None else self.generation.standings
        shown = {name: w.standing for name, w in self.workers.items() if w.standing is not None}
        self._has_checkpoints = self._has_checkpoints or self._judge(known | shown, trained=False).resumable
        return self._has_checkpoints

    @property
    def decided(self) -> Decided:
        """The present generation, and what the next coordinator has to know beside it."""
        assert self.generation is not None
        return Decided(generation=self.generation, resumable=self._resumable())

    def _invite(self) -> None:
        """Ask the members, each once, to stop at their next boundary, if somebody waits to join and there is room."""
        assert self.generation is not None
        if self._uninvited and not self._finishing and self._waiting() and len(self.members) < self._target():
            self._tell_once({"type": "pause", "number": self.generation.number}, self._uninvited)

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
                self._dismiss(name, 0, FINISHED)
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
        out = {machine_of(name) for name in names}
        few = len(self.hosts.keys() - self._kept_out.doubted - out) < self.settings.minimum_hosts
        for machine in sorted(out):
            # If the run would end for want of it, it is tried again before that.
            most = self.settings.patience / 2 if few else LONGEST_SECONDS
            seconds = self._kept_out.add(machine, self._now, most)
            self._register.log("partition", host=machine, seconds=seconds)
            text = f"holdfast: other hosts cannot reach host {machine}: it is kept out for {seconds:g} s"
            self._register.send_all(self.hosts.values(), {"type": "say", "text": text})
        for name in names:
            self._dismiss(name, GIVEN_UP, f"worker {name} was given up: other workers cannot reach its machine")

    def _compose(self, standings: dict[str, Standing]) -> None:
        """Announce the next generation from survivors and joiners, and let leavers go."""
        waiting = [] if self._finishing else self._waiting()
        made = compose.compose(standings=standings, waiting=waiting, target=self._target(), judge=self._judge)
        for name in made.dismissed:
            self._dismiss(name, 0, "left as asked")
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
            text = f"worker {name} starts again from the last checkpoint: a part of the state is lost"
            self._dismiss(name, code, text)

    def _announce(self, names: Iterable[str], reason: str) -> None:
        """Form the next generation of these workers, by rank, and tell all machines."""
        number = 1 + max(self._newest, 0 if self.generation is None else self.generation.number)
        names = list(names)
        if self._is_in_vain(names):
            text = f"{', '.join(names)} could not work together {self._in_vain} times in a row"
            self.stop(3, f"{text} (events.jsonl says under 'broken' why)")
            return
        before = self.generation
        members = tuple(self._member(self.workers[name]) for name in names)
        generation = Generation(number=number, members=members, reason=reason, run=self.run, life=self.settings.life)
        for name in names:
            self.workers[name].standing, self.workers[name].doing, self.workers[name].fresh = None, None, False
        self._muster.begin(generation)
        self._breaking = False
        newcomers = {member.worker for member in members if member.standing.operation is None}
        self.joined |= newcomers if len(newcomers) < len(members) else set()
        self.announced = number
        self._gone.clear()
        self._nobody_was_told()
        self._begun = True
        self._tell(generation, before)
        hosts = [member.host for member in members]
        self._register.log("generation", number=number, workers=self.members, hosts=hosts, reason=reason)

    def _nobody_was_told(self) -> None:
        """Note that the members of a new generation were told nothing yet."""
        self._uncalled = {machine_of(name) for name in self.members}
        self._uninvited = {*self._uncalled}

    def _member(self, worker: Worker) -> Member:
        assert worker.standing is not None
        # Whom each could not reach is for this class alone. It would make the standing of each another one.
        standing = dataclasses.replace(worker.standing, unreached=(), refused=())
        return Member(
            worker=worker.name,
            address=worker.address,
            port=worker.port,
            standing=standing,
            host=worker.host,
            incarnation=worker.incarnation,
        )

    def _tell(self, generation: Generation, before: Generation | None) -> None:
        """Tell all machines of a generation: those who know the one before hear what has changed, others everything."""
        knowing = [host for host in self.hosts.values() if before is not None and host.told == before.name]
        others = [host for host in self.hosts.values() if before is None or host.told != before.name]
        for hosts, base in ((knowing, before), (others, None)):
            if hosts:
                self._register.send_all(hosts, announce(generation, base))
        for host in self.hosts.values():
            host.told = generation.name

    def _is_in_vain(self, names: list[str]) -> bool:
        """Whether the same workers have failed for long, without a loss and without one commit: it is no use."""
        again = self.generation is not None and names == self.members and self._recovered < self.generation.number
        self._in_vain = self._in_vain + 1 if again else 0
        self._in_vain_since = self._in_vain_since if again else self._now
        return self._in_vain >= TRIES and self._now - self._in_vain_since >= self.settings.patience

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

    def _dismiss(self, name: str, code: int, text: str, *, refused: bool = False) -> None:
        """Send a worker away. Messages that it still sends are ignored."""
        host = self.hosts.get(machine_of(name))
        if host is not None:
            told = {"type": "dismiss", "worker": name, "code": code, "message": text, "refused": refused}
            self._register.send(host.connection, told)
        self._let_go(name)

    def _let_go(self, name: str) -> None:
        """Forget a worker that is not needed any more: its end is no loss."""
        self._gone.add(name)
        self._muster.remove(name)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, over: int = 0) -> None:
        """Note that a worker's script is over. All have committed its last step, so no new workers are needed.

        ``over``: the generation in which that was. Members of older ones had been given up before: nobody waits for
        them, and what they would train is trained.
        """
        self._over = max(self._over, over)
        if self.generation is not None and self.generation.number < self._over:
            for name in [name for name, worker in self.workers.items() if not worker.fresh]:
                self._dismiss(name, 0, FINISHED)
        if self._finishing:
            return
        self._finishing = True
        self._register.log("finished")
        self._register.send_all(self.hosts.values(), {"type": "finishing", "members": self.members})
        for name in [name for name in self.workers if not self._muster.is_member(name)]:
            self._dismiss(name, 0, FINISHED)

    def stop(self, code: int, message: str) -> None:
        """End the run: tell everybody the exit code and the reason."""
        if self.stopped:
            return
        self._register.log("stop", code=code, message=message)
        self._register.send_all(self._register.everybody, {"type": "stop", "code": code, "message": message})
        self.stopped = True
