"""A world: real Runs as fibers, a simulated cluster under them, and whatever a seed does to both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.cluster import faults
from holdfast.cluster.client import Stopped
from holdfast.cluster.group import Group
from holdfast.cluster.links.call import REFUSED_SECONDS
from holdfast.cluster.membership import Generation, Member, machine_of
from holdfast.engine import reduce
from holdfast.errors import HoldfastError
from holdfast.journal import journal
from holdfast.log import log
from holdfast.recovery import arrange, fence
from holdfast.run import label, reports, saver, training
from holdfast.run import process as run_process
from holdfast.run.run import Run
from holdfast.sync import exchange, ssp
from tests.world import wires
from tests.world.cluster import HEARTBEAT, Agent, Client, Coordinator
from tests.world.doubles import Doubles
from tests.world.fibers import Killed, Scheduler

SILENCE = 15.0  # simulated seconds after which a machine that does not answer counts as gone, as in ``cluster.silence``
LIMIT = 600.0  # simulated seconds that a history may take
COMPUTE = 0.004  # simulated seconds, on average, from one fault point to the next


@dataclass(kw_only=True)
class Outcome:
    """What one worker's script has seen, if it came to its end."""

    losses: dict[int, float] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    sha256: str = ""


class Process:
    """One worker. ``frozen``: stopped, as by SIGSTOP. ``dead``: nothing of it runs any more."""

    def __init__(self, world: World, name: str, agent: Agent) -> None:
        self.name, self.frozen, self.dead = name, False, False
        self.outcome = Outcome()
        self.points = 0
        self._world, self._agent = world, agent
        self.run: Run | None = None
        self.fiber = world.scheduler.spawn(name, self._live, self)
        self.client = Client(self, agent, name=name, host=str(agent.host))

    def _live(self) -> None:
        code, error = 1, None
        try:
            self._world.script(self)
            code = 0
        except Stopped as e:
            code = int(e.code or 0)
        except Killed:
            raise
        except HoldfastError as e:
            error = {"text": f"holdfast: {e}", "code": e.exit_code, "final": True}
            code = e.exit_code
            e.add_note(self.name)
            self._world.errors.append(e)
        except BaseException as e:
            self._world.errors.append(e)
        self.end(code, error)

    def connect(self, generation: Generation) -> Group:
        return self._world.connect(generation, self)

    def vanish(self) -> None:
        """Gone with its machine. If it runs at the moment, it ends at its next fault point."""
        self.end(-9, struck=False)

    def kill(self) -> None:
        """SIGKILL."""
        self.end(-9)

    def end(self, code: int, error: dict[str, Any] | None = None, *, struck: bool = True) -> None:
        """The process is gone, with all its fibers and connections."""
        if self.dead:
            return
        self.dead, self.frozen = True, False
        self._world.log("exit-of", worker=self.name, code=code)
        group = None if self.run is None else self.run._cohort.group
        if group is not None and group._backend is not None:
            group._backend.abort()
        for fiber in self._world.scheduler.fibers:
            if fiber.owner is self and fiber is not self._world.scheduler.current:
                fiber.doomed = True
        self.client.ended(code, error)
        current = self._world.scheduler.current
        if current is not None and current.owner is self and code and struck:
            raise Killed


class World:
    """One history. ``script`` is what each worker runs; ``fate`` is asked at every fault point what happens there."""

    def __init__(
        self,
        seed: int,
        script: Callable[[Process], None],
        fate: Callable[[World, Process, str], None],
        *,
        hosts: list[int],
        minimum_hosts: int | None = None,
        maximum_hosts: int = 8,
        elected: bool = False,
        limit: float = LIMIT,
    ) -> None:
        """Make it, with agents on these machines.

        ``limit``: simulated seconds that it may take. ``elected``: the coordinator is a role, which goes to
        another machine when its own is lost.
        """
        self.scheduler = Scheduler(seed)
        self.script, self.fate = script, fate
        self.events: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self.processes: list[Process] = []
        self.slow_until = 0.0
        self._wires: dict[str, wires.Wires] = {}  # by the generation's name: two coordinators may give the same number
        self._separated: set[frozenset[int]] = set()  # pairs of machines that do not reach each other
        self.generations: dict[int, Generation] = {}  # those that began to form, by number
        self._named: dict[str, Generation] = {}
        self.elected, self._limit = elected, limit
        self.agents: list[Agent] = []
        self.coordinator = Coordinator(
            self.scheduler,
            self.log,
            self.latency,
            alive=self._living if elected else None,
            minimum_hosts=len(hosts) if minimum_hosts is None else minimum_hosts,
            maximum_hosts=maximum_hosts,
        )
        self.agents += [Agent(self, self.coordinator, slots) for slots in hosts]
        self.holder = self.agents[0]  # the machine of the coordinator

    # --- what happens in it ----------------------------------------------------------------------

    def log(self, event: str, **fields: Any) -> None:
        fields = {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
        self.events.append({"t": round(self.scheduler.now, 6), "event": event, **fields})

    def write(self, event: str, **fields: Any) -> None:
        """As ``Events`` does, for the runs."""
        self.log(event, **fields)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def latency(self) -> float:
        """Simulated seconds that a message takes; sometimes everything is slow."""
        slow = 20.0 if self.scheduler.now < self.slow_until else 1.0
        return slow * self.scheduler.chance.uniform(0.0002, 0.003)

    def start(self, name: str, agent: Agent) -> Process:
        self.log("started", worker=name)
        self.processes.append(Process(self, name, agent))
        return self.processes[-1]

    def join(self, slots: int) -> None:
        """A new machine comes."""
        self.log("joins", slots=slots)
        self.agents.append(Agent(self, self.coordinator, slots))

    def restart_head(self, seconds: float) -> None:
        """The first machine loses its power, with the coordinator; later it is back, and its agent is started anew."""
        head = next((agent for agent in self.agents if agent.host == 0 and agent.code is None), None)
        if head is None or self.coordinator.roster is None:
            return
        self.log("head", seconds=seconds)
        self.coordinator.crash(seconds, head=True)
        head.vanish()
        self.scheduler.later(seconds, lambda: self.agents.append(Agent(self, self.coordinator, head.slots)))

    def _living(self) -> set[int]:
        """The machines whose agents live."""
        return {agent.host for agent in self.agents if agent.code is None and agent.host is not None}

    def fail_over(self, seconds: float) -> None:
        """The coordinator's machine is lost with it. When its lease has run out, another takes the role."""
        there = [agent for agent in self.agents if agent.code is None and agent is not self.holder]
        if not there or self.coordinator.roster is None or self.coordinator.over:
            return
        self.log("fail-over", host=self.holder.host, seconds=seconds)
        self.coordinator.crash(seconds)
        if self.holder.code is None:
            self.holder.vanish()
        self.holder = self.scheduler.chance.choice(there)

    @property
    def process(self) -> Process:
        """The process that runs at the moment."""
        assert self.scheduler.current is not None
        return self.scheduler.current.owner  # type: ignore[no-any-return]

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.dead and not process.frozen]

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later, if it is still there then."""
        self.log("pauses", worker=process.name, seconds=seconds)
        process.frozen = True

        def wake() -> None:
            if process.frozen and not process.dead:
                process.frozen = False
                process.client.thawed()

        self.scheduler.later(seconds, wake)

    def deadlock(self, process: Process) -> None:
        """Its training thread never gets on; its heartbeats still come."""
        self.log("stuck-at", worker=process.name)
        process.fiber.stuck = True

    def freeze(self, process: Process) -> None:
        """SIGSTOP: it is there, and does nothing."""
        self.log("hangs", worker=process.name)
        process.frozen = True

    def point(self, phase: str, *, step: int | None = None) -> None:
        """A fault point: time passes, and fate may strike."""
        fiber = self.scheduler.current
        if fiber is None:
            return
        process = fiber.owner
        process.points += 1
        self.fate(self, process, phase)
        if process.dead:
            raise Killed
        self.scheduler.pause(self.scheduler.chance.expovariate(1 / COMPUTE))

    def connect(self, generation: Generation, process: Process) -> Group:
        """As ``Client.connect``: connections are made when they are used."""
        rank, name = generation.rank_of(process.name), generation.name
        self.generations[generation.number] = self._named[name] = generation
        if len(generation.members) == 1:
            return Group(generation, rank)
        if name not in self._wires:
            self._wires[name] = wires.Wires(
                self.scheduler,
                self.latency,
                reaches=lambda caller, called: self._is_reached(generation.members[caller], generation.members[called]),
                unanswered=lambda caller, called: self._not_answered(generation, caller, called),
            )
        return Group(generation, rank, wires.Backend(self._wires[name], rank, process))

    def _is_reached(self, caller: Member, called: Member) -> bool:
        dead = {process.client.seat.incarnation for process in self.processes if process.dead}
        lost = dead.intersection((caller.incarnation, called.incarnation))
        return not lost and not self._unreached(caller.worker, [called.worker])

    def _not_answered(self, generation: Generation, caller: int, called: int) -> None:
        """A machine does not answer for a heartbeat, or refuses for a second: ``cluster.links.call`` notices."""
        name, other = generation.workers[caller], generation.workers[called]
        silent = bool(self._unreached(name, [other]))

        def notice() -> None:
            for process in self.alive:
                group = self._group_of(process)
                if process.name == name and group is not None and group.generation.name == generation.name:
                    setattr(group._backend, "unreached" if silent else "refused", (other,))
                    group.abort(f"{other} cannot be reached")

        self.scheduler.later(HEARTBEAT if silent else REFUSED_SECONDS, notice)

    def _group_of(self, process: Process) -> Group | None:
        """The group that a process is in, if it has others in it and is not aborted."""
        group = None if process.run is None else process.run._cohort.group
        return None if group is None or group._backend is None or group._backend.aborted else group

    @property
    def can_cut(self) -> bool:
        """Whether workers of the newest generation are connected."""
        return bool(self._wires) and bool(self._wires[next(reversed(self._wires))].streams)

    def cut(self) -> None:
        """The connection between two workers of the newest generation breaks."""
        if self.can_cut:
            newest = next(reversed(self._wires))
            a, b = self.scheduler.chance.choice(list(self._wires[newest].streams))
            self.log("cut", generation=self._named[newest].number, ranks=[a, b])
            self._wires[newest].cut(a, b)

    # --- partitions ------------------------------------------------------------------------------

    def separate(self, one: int, other: int) -> None:
        """Two machines, by number, do not reach each other any more. Nothing is closed."""
        self.log("separated", hosts=[one, other])
        self._separated.add(frozenset({one, other}))
        for name, streams in self._wires.items():
            workers = self._named[name].workers
            for (a, b), stream in streams.streams.items():
                if self._unreached(workers[a], [workers[b]]):
                    stream.fall_silent(SILENCE)
        self.scheduler.later(SILENCE - 0.001, self._notice_silence)

    def _notice_silence(self) -> None:
        """As ``cluster.silence`` does: the kernel of a machine has not answered for too long."""
        for process in self.alive:
            group = self._group_of(process)
            if group is None:
                continue
            streams = self._wires[group.generation.name].streams
            linked = [group.generation.workers[other] for rank, other in streams if rank == group.rank]
            group._backend.unreached = self._unreached(process.name, linked)
            if group.unreached:
                group.abort("a machine has not answered")

    def reunite(self, one: int, other: int) -> None:
        """Two machines reach each other again, with new connections."""
        self._separated.discard(frozenset({one, other}))

    def isolate(self, machine: int) -> None:
        """A machine reaches nobody: no other one, nor the coordinator."""
        self.log("isolated", host=machine)
        self.coordinator.cut_off(machine)
        for agent in self.agents:
            if agent.host not in (None, machine):
                self.separate(machine, agent.host)

    def end_isolation(self, machine: int) -> None:
        self.coordinator.mend(machine)
        for agent in self.agents:
            if agent.host not in (None, machine):
                self.reunite(machine, agent.host)

    def _unreached(self, worker: str, others: Iterable[str]) -> tuple[str, ...]:
        machine = machine_of(worker)
        return tuple(other for other in others if frozenset({machine, machine_of(other)}) in self._separated)

    def deafen(self, process: Process, seconds: float) -> None:
        """A worker's messages still arrive, and none arrives at it; so much later it notices."""
        group = None if process.run is None else process.run._cohort.group
        if group is not None and group.size > 1:
            self._wires[group.generation.name].deafen(group.rank, seconds)

    # --- its life --------------------------------------------------------------------------------

    def live(self) -> World:
        """Go on until all agents have ended, or the roster has."""
        try:
            self.scheduler.run(
                lambda: all(agent.is_over for agent in self.agents) or self._is_over(), limit=self._limit
            )
        finally:
            self.scheduler.clean_up()
        for fiber in self.scheduler.fibers:
            if fiber.error is not None:
                raise fiber.error
        return self

    def _is_over(self) -> bool:
        if all(agent.is_over for agent in self.agents):
            return True
        return self.coordinator.over and all(process.dead for process in self.processes)


@contextmanager
def inhabited(world: World) -> Iterator[World]:
    """Runs that are made in this context live in the world."""
    doubles = Doubles(world.scheduler)
    plan_layout = arrange.lay_out

    def lay_out(**facts: Any) -> Any:
        faults.point("layout")
        return plan_layout(**facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", world.point)
        patch.setattr(run_process, "membership", lambda label, team: world.process.client)
        patch.setattr(run_process, "runs", [])
        patch.setattr(training, "Events", lambda path: world)
        patch.setattr(arrange, "lay_out", lay_out)
        patch.setenv("HOLDFAST_TRACE", "1")
        patch.setenv("HOLDFAST_WORKER", "")  # set to the worker's name whenever one makes its Run
        patch.setattr(os, "fsync", lambda descriptor: None)  # no power fails in a world
        patch.setattr(label, "code_of_modules", dict)  # the same for all, and slow to find
        for module in (reduce, exchange, ssp, saver, fence, log):
            patch.setattr(module, "threading", doubles.threading)
        for module in (reduce, ssp):
            patch.setattr(module, "queue", doubles.queue)
        patch.setattr(saver, "Work", doubles.work)
        patch.setattr(reports, "time", doubles.time)
        patch.setattr(saver, "time", doubles.time)
        patch.setattr(fence, "time", doubles.time)
        patch.setattr(training, "time", doubles.time)  # the seconds of steps are in rows that joiners are told
        patch.setattr(journal, "time", doubles.time)
        yield world
