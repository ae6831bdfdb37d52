"""The cluster of a world, in simulated time: a coordinator with the real roster, and agents that speak for workers.

Connections to the coordinator are late, keep their order, and may break. A coordinator that crashes comes back with
a new roster, and everybody connects again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from holdfast.cluster import wire
from holdfast.cluster.client import Stopped
from holdfast.cluster.desk import COORDINATOR, Desk, Out
from holdfast.cluster.generations import RosterSettings
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Generation, Standing, machine_of, new_incarnation
from holdfast.cluster.pulse import Still, Where
from holdfast.cluster.quorum.records import decided_of, decided_text
from holdfast.cluster.register import EVENTS, HANG_UP
from holdfast.cluster.roster import Connected, Disconnected, Event, Heard, Roster, Tick
from holdfast.cluster.seat import Over, Seat, Stop
from holdfast.cluster.watch import LOOKS
from holdfast.commit.settle import judge
from holdfast.errors import HoldfastError
from tests.world.fibers import Scheduler

HEARTBEAT = 5.0
STEP_TIMEOUT = "20:60"  # simulated seconds without a sign of progress, in a step and elsewhere
CROWDED = 0.8  # of the tries to connect fail while strangers flood the coordinator
PATIENCE = 30.0  # simulated seconds for which a worker waits for a coordinator that is gone
LOCAL = 0.1  # of what a message takes over the network: from a worker to its agent
RETRY = 0.05  # simulated seconds between two tries to connect
ENDING = 100.0  # simulated seconds for a worker that is sent away to end; an hour in real runs
REPLACE_AFTER = 2.0  # as the agent's REPLACE_AFTER_SECONDS

Message = dict[str, Any]
Log = Callable[..., None]


class Endpoint(Protocol):
    """The far end of a line: an agent."""

    def hello(self) -> Message: ...

    def hear(self, message: Message) -> None: ...

    def disconnected(self) -> None: ...

    @property
    def machine(self) -> int | None:
        """The number of the agent of its machine."""


class Line:
    """A connection to the coordinator, seen from the far end."""

    def __init__(self, coordinator: Coordinator, end: Endpoint, number: int) -> None:
        self._coordinator, self._end, self.number = coordinator, end, number
        self._last = {"up": 0.0, "down": 0.0}
        self._held: list[Callable[[], None]] = []  # what is under way while the network is cut; it comes later
        self._abandoned = False  # the far end has closed it
        self.closed = False

    def _later(self, way: str, callback: Callable[[], None]) -> None:
        scheduler = self._coordinator.scheduler
        self._last[way] = max(self._last[way], scheduler.now + self._coordinator.latency())
        scheduler.at(self._last[way], lambda: self._arrive(callback))

    def _arrive(self, callback: Callable[[], None]) -> None:
        if self.closed:
            return
        if self._coordinator.is_cut_off(self._end):
            self._held.append(callback)
        else:
            callback()

    def mended(self) -> None:
        """The network works again: the kernels send what was lost once more."""
        held, self._held = self._held, []
        for callback in held:
            self._arrive(callback)

    def send(self, message: Message) -> None:
        """From the far end to the coordinator."""
        self._later("up", lambda: self._coordinator.step(Heard(connection=self.number, message=_copy(message))))

    def deliver(self, message: Message) -> None:
        """From the coordinator to the far end."""
        self._later("down", lambda: None if self._abandoned else self._end.hear(_copy(message)))

    def hang_up(self) -> None:
        """The coordinator closes it, after what it has said."""
        self._later("down", self.lose)

    def end(self) -> None:
        """The process at the far end is gone; what it has sent still arrives."""
        self._later("up", self.lose)

    def lose(self) -> None:
        """It breaks: both sides notice, each when it does."""
        if not self.closed:
            self.closed = True
            self._coordinator.lost(self)
            if not self._abandoned:
                self._end.disconnected()

    def give_up(self) -> None:
        """The far end closes it, because it has heard nothing. The coordinator learns of it when the network works."""
        self._abandoned = True
        self._later("up", self.lose)
        self._end.disconnected()


def _copy(message: Message) -> Message:
    return wire.decode(wire.encode(message))


class Coordinator:
    """Hosts the roster, as ``cluster.coordinator`` does.

    ``alive``: if it is elected through etcd, gives the numbers of the machines whose agents keep their leases alive.
    Then generations are kept in etcd, and a coordinator that takes over begins with the newest one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        log: Log,
        latency: Callable[[], float],
        *,
        alive: Callable[[], set[int]] | None = None,
        **settings: Any,
    ) -> None:
        self._alive = alive
        self._stored: str | None = None  # the newest generation, as etcd has it
        self._newest = 0  # the number of the last generation of which nobody was alive
        self.scheduler, self.latency = scheduler, latency
        self._log, self._settings = log, settings
        self._lines: dict[int, Line] = {}
        self._numbers = 0
        self._run = new_incarnation()
        self._starts = 0
        self._timer = 0  # the number of the newest timer: older ones are void
        self.roster: Roster | None = None
        self.over = False
        self._asleep = False
        self.flooded_until = 0.0  # strangers connect as fast as they can
        self._cut_off: set[int] = set()  # machines that do not reach it
        self._missed: list[Event] = []  # what came in while it was asleep
        self.start()

    def start(self) -> None:
        known, alive = None, set() if self._alive is None else self._alive()
        if self._stored is not None:
            known = decided_of(self._stored)
            if not alive.intersection(machine_of(name) for name in known.generation.workers):  # as ``quorum.fence``
                self._newest = known.generation.number
                known, self._stored, self._run = None, None, new_incarnation()
        names: dict[str, Any] = {"run": self._run, "life": new_incarnation(), "first_host": 1000 * self._starts}
        names |= {"recalls": self._alive is not None, "newest": self._newest}
        settings = RosterSettings(heartbeat_timeout=HEARTBEAT, step_timeout=STEP_TIMEOUT, **names, **self._settings)
        self._starts += 1
        self.roster = Roster(settings, judge=judge, now=self.scheduler.now)
        if known is not None:
            self.roster.recall(known, alive)
        self._set_timer()

    def crash(self, seconds: float, *, head: bool = False) -> None:
        """All connections break; another coordinator takes its place later.

        ``head``: its agent is started anew too, and knows nothing of the run.
        """
        if self.over or self.roster is None:
            return
        self._log("coordinator-restart")
        if head:
            self._run, self._starts = new_incarnation(), 0
        self.roster, self._missed = None, []
        for line in list(self._lines.values()):
            line.lose()
        self.scheduler.later(seconds, self.start)

    @property
    def is_awake(self) -> bool:
        return self.roster is not None and not self.over and not self._asleep

    def sleep(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later: it hears of everything when it wakes up."""
        if not self._asleep and self.roster is not None:
            self._log("sleeps", seconds=seconds)
            self._asleep = True
            self.scheduler.later(seconds, self._wake)

    def _wake(self) -> None:
        self._asleep = False
        missed, self._missed = self._missed, []
        for event in missed:
            self.step(event)
        if self.roster is not None and not self.over:
            self.step(Tick())

    def cut_off(self, machine: int) -> None:
        """Nothing from or to a machine arrives; nothing is closed."""
        self._cut_off.add(machine)

    def mend(self, machine: int) -> None:
        self._cut_off.discard(machine)
        for line in list(self._lines.values()):
            line.mended()

    def is_cut_off(self, end: Endpoint) -> bool:
        return end.machine in self._cut_off

    def connect(self, end: Endpoint) -> Line | None:
        """A new connection; None while there is no coordinator, or it does not answer."""
        if self.roster is None or self.over or self._asleep or self.is_cut_off(end):
            return None
        if self.scheduler.now < self.flooded_until and self.scheduler.chance.random() < CROWDED:
            return None
        line = Line(self, end, self._numbers)
        self._numbers += 1
        self._lines[line.number] = line
        hello = _copy(end.hello())
        line._later("up", lambda: self.step(Connected(connection=line.number, hello=hello)))
        return line

    def lost(self, line: Line) -> None:
        self._lines.pop(line.number, None)
        if self.roster is not None:
            number = line.number
            self.scheduler.later(self.latency(), lambda: self.step(Disconnected(connection=number)))

    def step(self, event: Event) -> None:
        roster = self.roster
        if roster is None:
            return
        if self._asleep:
            self._missed += [] if isinstance(event, Tick) else [event]
            return
        before = roster.announced
        sent = roster.step(event, self.scheduler.now)
        if self._alive is not None and roster.announced != before and roster.generation is not None:
            self._stored = decided_text(roster.decided)
        for recipient, message in sent:
            if recipient == EVENTS:
                assert message["event"] != "protocol-error", message
                self._log(**message)
            elif recipient in self._lines:
                line = self._lines[recipient]
                line.hang_up() if message is HANG_UP else line.deliver(message)
        if roster.stopped:
            self.over = True
        self._set_timer()

    def _set_timer(self) -> None:
        assert self.roster is not None
        self._timer += 1
        number, roster = self._timer, self.roster

        def tick() -> None:
            if number == self._timer and roster is self.roster and not self.over:
                self.step(Tick())

        self.scheduler.later(max(0.0, roster.deadline - self.scheduler.now), tick)


class Client:
    """``Membership`` of a simulated worker: the real ``Seat``, which talks to its agent."""

    def __init__(self, process: Any, agent: Agent, *, name: str, host: str) -> None:
        self.worker = name
        self.seat = Seat(worker=name, host=host, label={"what": "a world"}, incarnation=new_incarnation())
        self._process, self._agent, self._scheduler = process, agent, agent.scheduler
        self._alone_since = 0.0
        self._last = {"up": 0.0, "down": 0.0}
        self._held_back: list[Message] = []  # what came in while the process was stopped
        self._on_break: Callable[[int], None] = lambda number: None
        self._say(self.seat.hello())
        self._beat()

    # --- the lifeline ----------------------------------------------------------------------------

    def _later(self, way: str, callback: Callable[[], None]) -> None:
        """In order, and much faster than the network."""
        self._last[way] = max(self._last[way], self._scheduler.now + LOCAL * self._agent.latency())
        self._scheduler.at(self._last[way], callback)

    def _say(self, message: Message) -> None:
        if not self._process.dead:
            said = _copy(message)
            self._later("up", lambda: self._agent.worker_said(self.worker, said))

    def tell(self, message: Message) -> None:
        """The agent says something."""
        said = _copy(message)
        self._later("down", lambda: self._hear(said))

    def ended(self, code: int, error: Message | None) -> None:
        """The process has ended, which its agent sees after all that it has said."""
        self._later("up", lambda: self._agent.ended(self.worker, code, error))

    def _beat(self) -> None:
        if self._process.dead:
            return
        if not self._process.frozen:
            self._say(self.seat.beat() | {"still": self._still().to_json()})
        self._scheduler.later(HEARTBEAT / 5, self._beat)

    def _still(self) -> Still:
        """As ``cluster.pulse`` reports it. A fiber that waits without a limit waits for others."""
        fiber = self._process.fiber
        where: Where = "wait" if fiber.until is None and not fiber.stuck else "step"
        return Still(where=where, seconds=self._scheduler.now - fiber.since)

    def _hear(self, message: Message) -> None:
        if self._process.dead:
            return
        if self._process.frozen:
            self._held_back.append(message)
            return
        was_lost = self.seat.coordinator
        news = self.seat.hear(message)
        if self.seat.coordinator and not was_lost:
            self._alone_since = self._scheduler.now
        if isinstance(news, Over):
            self._on_break(news.number)
        elif isinstance(news, Stop) and not news.waits:
            self._process.end(news.code)
        elif isinstance(news, Stop):
            self._scheduler.later(ENDING, lambda: self._end_at_last(news.code))
        elif message["type"] == "leave" and self.seat.generation is None:
            self._process.end(0)

    def _end_at_last(self, code: int) -> None:
        """The side thread of a worker that was sent away ends it, if it hangs; not if the whole process is stopped."""
        if not self._process.frozen:
            self._process.end(code)

    def thawed(self) -> None:
        """The process runs again: what came in meanwhile is read now."""
        waiting, self._held_back = self._held_back, []
        for each in waiting:
            self._hear(each)

    # --- the contract ----------------------------------------------------------------------------

    def regroup(self, standing: Standing) -> Generation:
        before = self.seat.number
        self._say(self.seat.show(standing))
        self._scheduler.wait(lambda: self.seat.stopped is not None or self.seat.number > before or self._is_alone())
        if self.seat.stopped is None and self.seat.number == before:
            raise HoldfastError("the coordinator is gone")
        if self.seat.stopped is not None:
            raise Stopped(self.seat.stopped.code)
        assert self.seat.generation is not None
        return self.seat.generation

    def _is_alone(self) -> bool:
        return bool(self.seat.coordinator) and self._scheduler.now - self._alone_since > PATIENCE

    def connect(self, generation: Generation, device: torch.device) -> Group:
        return self._process.connect(generation)

    def on_break(self, callback: Callable[[int], None]) -> None:
        self._on_break = callback

    def wishes(self) -> tuple[bool, bool]:
        return self.seat.wishes()

    def doing(self, operation: int, kind: str) -> None:
        self.seat.doing = (operation, kind)

    def formed(self) -> None:
        self.seat.formed()

    def progressed(self, generation: Generation, operation: int) -> None:
        self._say(self.seat.progressed(generation, operation))

    def finished(self) -> None:
        self._say(self.seat.finished())
        self._agent.over = max(self._agent.over, self.seat.number)  # as ``lifeline.report`` tells it

    def bye(self) -> None:
        self._say({"type": "bye"})


class Agent:
    """One machine: starts workers and replaces lost ones, as ``cluster.agent`` does."""

    def __init__(self, world: Any, coordinator: Coordinator, slots: int) -> None:
        self._world, self._coordinator, self.scheduler = world, coordinator, coordinator.scheduler
        self.latency = coordinator.latency
        self._desk = Desk(beat=HEARTBEAT / LOOKS)
        self._asleep = False
        self._missed: list[Callable[[], None]] = []  # what came in while it was asleep
        self.slots, self._serial = slots, 0
        self._line: Line | None = None
        self._incarnation = new_incarnation()
        self.host: int | None = None
        self.code: int | None = None  # how it ended
        self.workers: dict[str, Any] = {}
        self._said_bye = False
        self._trained: set[str] = set()
        self._begun = self._finishing = self.leaving = self._recovered = False
        self.over = 0
        self._replacements: list[float] = []  # when each is started at the latest
        self._heard = 0.0
        self._connect()
        self._listen()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and could say so."""
        return self.code is not None and (self._said_bye or self._coordinator.over)

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    @property
    def machine(self) -> int | None:
        return self.host

    def _listen(self) -> None:
        """Give up a line on which the coordinator has said nothing for long, as ``cluster.agent`` does."""
        if self.is_over:
            return
        if self._line is not None and self.scheduler.now - self._heard > 3 * HEARTBEAT:
            self._line.give_up()
        if self.scheduler.now - self._heard > PATIENCE:
            self._kill_hung()
        self.scheduler.later(HEARTBEAT, self._listen)

    def _kill_hung(self) -> None:
        """The coordinator is gone for good: stopped workers are killed, others that hang end after a day."""
        for worker in list(self.workers.values()):
            if worker.frozen or worker.fiber.stuck:
                worker.kill()

    def hello(self) -> Message:
        slots = 0 if self.leaving else self.slots
        words = {"host": self.host, "agent": self._incarnation, "slots": slots, "run": True, "stays": False}
        words |= {"begun": self._begun, "finished": self._finishing, "over": self.over}
        return words | self._desk.hello(self.scheduler.now)

    def _connect(self) -> None:
        if self.is_over:
            return
        if not self._asleep:
            self._line = self._coordinator.connect(self)
        if self._line is not None:
            self._heard = self.scheduler.now
            self._pass_on(self._desk.line(""))
        elif not self._coordinator.over:
            self.scheduler.later(RETRY, self._connect)
        elif self.host is None:
            self.code = 2  # it came when all was over

    def disconnected(self) -> None:
        self._line = None
        self._when_awake(lambda: self._pass_on(self._desk.line("head:1")))
        self.scheduler.later(RETRY, self._connect)

    def sleep(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later: it passes nothing on meanwhile."""
        if not self._asleep and self.code is None:
            self._world.log("dozes", host=self.host, seconds=seconds)
            self._asleep = True
            self.scheduler.later(seconds, self._wake)

    def _wake(self) -> None:
        self._asleep = False
        missed, self._missed = self._missed, []
        for each in missed:
            each()

    def _when_awake(self, callback: Callable[[], None]) -> None:
        if self._asleep:
            self._missed.append(callback)
        else:
            callback()

    def worker_said(self, name: str, message: Message) -> None:
        """A worker says something to the coordinator."""
        if name in self.workers and self.code is None:
            self._when_awake(lambda: self._pass_on(self._desk.hear(name, message, self.scheduler.now)))

    def _pass_on(self, told: list[Out]) -> None:
        for recipient, message in told:
            if recipient == COORDINATOR:
                self._tell(message)
            elif recipient in self.workers:
                self.workers[recipient].client.tell(message)

    def _tell(self, message: Message) -> None:
        if self._line is not None:
            self._line.send(message)

    def hear(self, message: Message) -> None:
        self._when_awake(lambda: self._hear(message))

    def _hear(self, message: Message) -> None:
        kind = message["type"]
        self._heard = self.scheduler.now
        if self.code is not None:  # its farewell was lost with an earlier coordinator
            self._say_bye()
            return
        self._pass_on(self._desk.take(message))
        if kind == "welcome":
            self._begun = self._begun or message["begun"]
            if message["finishing"]:
                self._finish(message["members"])
        if kind == "beat":
            self._tell({"type": "beat", "starting": {}, "workers": self._desk.beat(self.scheduler.now)})
        elif kind == "welcome" and self.host is None and self.code is None:
            self.host = message["host"]
            for _ in range(self.slots):
                self._start()
        elif kind == "generation":
            self._begun = True
            assert self._desk.generation is not None
            self._trained.update(self._desk.generation.workers)
        elif kind == "recovered":
            self._recovered = True
            self._replace()
        elif kind == "finishing":
            self._finish(message["members"])
        elif kind == "kill" and message["worker"] in self.workers:
            self.workers[message["worker"]].kill()
        elif kind == "stop":
            self._told_to_stop(message["code"])

    def _told_to_stop(self, code: int) -> None:
        if code or (self.leaving and not self.workers):
            self._end(code)
        else:
            self._finish()

    def _finish(self, members: Collection[str] = ()) -> None:
        if not self._finishing:
            self.scheduler.later(ENDING, lambda: self._end(0))
        self._finishing = True
        self._trained.update(members)
        for worker in list(self.workers.values()) if self._trained else ():
            if worker.name not in self._trained:
                worker.kill()
        if not self.workers:
            self._end(0)

    def _end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            for worker in list(self.workers.values()):
                worker.kill()
            self._say_bye()

    def _say_bye(self) -> None:
        if self._line is not None:
            self._said_bye = True
            self._tell({"type": "bye"})

    def drop_lines(self) -> None:
        """The network resets all connections of this machine to the coordinator."""
        if self._line is not None:
            self._line.lose()

    def vanish(self) -> None:
        """The machine is gone: the agent and all its workers at once, and nobody is left to tell."""
        self._world.log("machine", host=self.host)
        self.code, self._said_bye = -9, True
        if self._line is not None:
            self._line.end()
            self._line = None
        for worker in list(self.workers.values()):
            worker.vanish()

    def leave(self) -> None:
        """SIGTERM: its workers leave at the next step boundary."""
        if self.is_over or self.leaving:
            return
        self.leaving = True
        self._replacements.clear()
        self._tell({"type": "slots", "slots": 0})
        for worker in self.workers.values():
            worker.client.tell({"type": "leave"})
        if not self.workers:
            self._end(0)

    def _start(self) -> None:
        name = f"{self.host}.{self._serial}"
        self._serial += 1
        self.workers[name] = self._world.start(name, self)

    def ended(self, name: str, code: int, error: Message | None) -> None:
        """One of its workers has ended."""
        self._when_awake(lambda: self._ended(name, code, error))

    def _ended(self, name: str, code: int, error: Message | None) -> None:
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        report = {"type": "exit", "worker": name, "code": code, "cause": f"ended with {code}", "error": error}
        report["incarnation"] = worker.client.seat.incarnation
        report["finished"] = code == 0 and not self.leaving
        report = _copy(report)
        self._desk.ended(name, report)
        self._tell(report)
        if error is not None and error["final"] and self._line is None:
            self._end(code)  # without the coordinator nobody else would end the run
            self._said_bye = True
        if code == 0 and not self.leaving:
            self._finishing = True
        if code and not self._finishing and not self.leaving and not self.is_over:
            self._recovered = False
            wait = 0.0 if code == 75 else REPLACE_AFTER
            self._replacements.append(self.scheduler.now + wait)
            self.scheduler.later(wait, self._replace)
        if not self.workers and (self.leaving or self._finishing):
            self._end(0)
        elif not self.workers and not self._replacements:
            self._tell({"type": "nobody", "reason": "no worker is left"})

    def _replace(self) -> None:
        for latest in list(self._replacements):
            if (self._recovered or self.scheduler.now >= latest) and not self._finishing and not self.is_over:
                self._replacements.remove(latest)
                self._start()
