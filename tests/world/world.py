"""A world: real Runs as fibers, a simulated cluster under them, and whatever a seed does to both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from holdfast.cluster import faults
from holdfast.cluster import group as group_module
from holdfast.cluster.client import Stopped
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Generation, machine_of
from holdfast.commit import cohort as cohort_module
from holdfast.engine import reduce
from holdfast.errors import Broken, HoldfastError
from holdfast.log import log
from holdfast.recovery import arrange
from holdfast.run import reports, saver
from holdfast.run import run as run_module
from holdfast.run.run import Run
from holdfast.sync import exchange, ssp
from tests.world import wires
from tests.world.cluster import HEARTBEAT, Agent, Client, Coordinator
from tests.world.doubles import Doubles
from tests.world.fibers import Killed, Scheduler

SILENCE = 15.0  # simulated seconds after which a machine that does not answer counts as gone, as in ``cluster.silence``
LIMIT = 600.0  # simulated seconds that any history may take
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
        self.client = Client(self, world.coordinator, name=name, host=str(agent.host))

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
            self._world.errors.append(e)
        except BaseException as e:
            self._world.errors.append(e)
        self.end(code, error)

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
        self.client.end()
        self._world.scheduler.later(self._world.latency(), lambda: self._agent.ended(self.name, code, error))
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
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.script, self.fate = script, fate
        self.events: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self.processes: list[Process] = []
        self.slow_until = 0.0
        self._wires: dict[int, wires.Wires] = {}
        self._separated: set[frozenset[int]] = set()  # pairs of machines that do not reach each other
        self.generations: dict[int, Generation] = {}  # those that began to form, by number
        self.coordinator = Coordinator(
            self.scheduler,
            self.log,
            self.latency,
            minimum_hosts=len(hosts) if minimum_hosts is None else minimum_hosts,
            maximum_hosts=maximum_hosts,
        )
        self.agents = [Agent(self, self.coordinator, slots) for slots in hosts]

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

    def connect(self, generation: Generation, worker: str, store: Any, device: torch.device) -> Group:
        """As ``group.form``: everybody shows its address, then all are connected."""
        rank, size = generation.rank_of(worker), len(generation.members)
        self.generations[generation.number] = generation
        if store is None:
            return Group(generation, rank)
        store.put(f"address of {rank}", b"here")
        for other in range(size):
            store.take(f"address of {other}")
        self._call(generation, rank, store)
        number = generation.number
        if number not in self._wires:
            self._wires[number] = wires.Wires(self.scheduler, size, self.latency)
        return Group(generation, rank, wires.Backend(self._wires[number], rank, self.process))

    def cut(self) -> None:
        """The connection between two workers of the newest generation breaks."""
        if self._wires:
            number = max(self._wires)
            a, b = self.scheduler.chance.choice(list(self._wires[number].streams))
            self.log("cut", generation=number, ranks=[a, b])
            self._wires[number].cut(a, b)

    # --- partitions ------------------------------------------------------------------------------

    def separate(self, one: int, other: int) -> None:
        """Two machines, by number, do not reach each other any more. Nothing is closed."""
        self.log("separated", hosts=[one, other])
        self._separated.add(frozenset({one, other}))
        for number, streams in self._wires.items():
            workers = self.generations[number].workers
            for (a, b), stream in streams.streams.items():
                if self._unreached(workers[a], [workers[b]]):
                    stream.fall_silent(SILENCE)
        self.scheduler.later(SILENCE - 0.001, self._notice_silence)

    def _notice_silence(self) -> None:
        """As ``cluster.silence`` does: the kernel of a machine has not answered for too long."""
        for process in self.alive:
            group = None if process.run is None else process.run._cohort.group
            if group is not None and group._backend is not None and not group._backend.aborted:
                group.unreached = self._unreached(process.name, group.generation.workers)
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

    def _call(self, generation: Generation, rank: int, store: Any) -> None:
        """Connect to the members of lower rank, as Gloo does; the others call this one."""
        workers = generation.workers
        if self._unreached(workers[rank], workers):
            called = self._unreached(workers[rank], workers[:rank])
            self.scheduler.wait(lambda: store.closed, HEARTBEAT if called else 60.0)
            raise Broken("some cannot be reached", unreached=() if store.closed else called)

    def deafen(self, process: Process, seconds: float) -> None:
        """A worker's messages still arrive, and none arrives at it; so much later it notices."""
        group = None if process.run is None else process.run._cohort.group
        if group is not None and group.size > 1:
            self._wires[group.generation.number].deafen(group.rank, seconds)

    # --- its life --------------------------------------------------------------------------------

    def live(self) -> World:
        """Go on until all agents have ended, or the roster has."""
        try:
            self.scheduler.run(lambda: all(agent.is_over for agent in self.agents) or self._is_over(), limit=LIMIT)
        finally:
            self.scheduler.clean_up()
        for fiber in self.scheduler.fibers:
            if fiber.error is not None:
                raise fiber.error
        return self

    def _is_over(self) -> bool:
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
        patch.setattr(group_module, "wait_for", wires.wait_for)
        patch.setattr(cohort_module.Cohort.__init__, "__kwdefaults__", {"connect": world.connect})
        patch.setattr(run_module, "_membership", lambda label: world.process.client)
        patch.setattr(run_module, "_runs", [])
        patch.setattr(run_module, "Events", lambda path: world)
        patch.setattr(arrange, "lay_out", lay_out)
        patch.setenv("HOLDFAST_TRACE", "1")
        patch.setenv("HOLDFAST_WORKER", "")  # set to the worker's name whenever one makes its Run
        for module in (reduce, exchange, ssp, saver, log):
            patch.setattr(module, "threading", doubles.threading)
        for module in (reduce, ssp):
            patch.setattr(module, "queue", doubles.queue)
        patch.setattr(saver, "Work", doubles.work)
        patch.setattr(reports, "time", doubles.time)
        patch.setattr(saver, "time", doubles.time)
        yield world
