"""The agent's workers: the half of the agent that starts them, replaces those that are lost, and lets them leave."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from holdfast.cluster import grace, signals
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.desk import COORDINATOR, Desk, Out
from holdfast.cluster.events import Events
from holdfast.cluster.grace import Departure
from holdfast.cluster.keeper import LOOPBACK, Keeper, free_port
from holdfast.cluster.local import LocalWorker, LocalWorkers
from holdfast.cluster.local_round import Lineup, LocalRound
from holdfast.cluster.membership import GIVEN_UP
from holdfast.cluster.replacements import REPLACE_AFTER_SECONDS, Replacements
from holdfast.cluster.watch import LOOKS
from holdfast.cluster.wire import Message
from holdfast.cluster.zygote_keeper import ZygoteKeeper

PROGRESS_SECONDS = 3.0  # between two lines that show how far workers are that leave
REPEAT_SECONDS = 0.1  # within which a signal that comes again is the same notice: nobody presses Ctrl-C so fast
NOTICE_SECONDS = 1.0  # a notice to all processes of a job reaches workers and agent within this


class AgentWorkers(ABC):
    """The workers of an agent, and what it decides of them. ``Agent`` says what the arguments are.

    What the coordinator has to know goes to ``_tell``. The agent ends with the code that ``_end`` was given first.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        say: Callable[[str], None],
        complain: Callable[[str], None],
        show: Callable[[Message], None],
        zygote: socket.socket | None,
    ) -> None:
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.host: int | None = None  # this agent's number; None until the coordinator has given one
        self.finishing = False  # a script is over: nobody is replaced any more
        self._say: Callable[[str], None] = (lambda text: None) if settings.quiet else say
        self._complain: Callable[[str], None] = (lambda text: None) if settings.quiet else complain
        self._show_progress = show
        self._events = Events(settings.events)
        self._keeper = self._make_keeper()  # before a zygote is started: it may raise
        self._local = LocalWorkers(
            log_dir=settings.log_dir,
            hidden=settings.hidden,
            zygote=ZygoteKeeper(
                zygote, preload=settings.preload, folder=settings.folder, events=self._events, say=self._say
            ),
            events=self._events,
            say=self._say,
            ended=self._ended,
            reported=self._reported,
            said=self._worker_said,
        )
        self._desk = Desk(beat=settings.heartbeat_timeout / LOOKS)
        self._round = LocalRound(
            workers=self._local.alive, tell=self._tell, end=self._local.end, describe=self._describe
        )
        self._has_run = False  # some worker has made a ``Run``, here or elsewhere
        self._lineup = Lineup(group_rank=0, groups=1, master=("", 0))  # told by the coordinator
        self._own_address = LOOPBACK  # this machine's address, as the coordinator reaches it
        self._serial = 0  # number of the next worker: a name is never used twice
        self._restarts = 0  # replacements so far
        self._trained: set[str] = set()  # workers that were ever in a generation, as far as this agent was told
        self._slots = settings.workers  # workers that the coordinator may wait for
        self._begun = False  # a generation has formed
        self._over = 0  # the generation in which a script has ended
        self._departure: Departure | None = None  # the plan, once a signal has asked this agent to leave
        self._pressed = 0  # signals so far of which the second ends everything at once
        self._watching: asyncio.Task[None] | None = None  # shows how workers leave
        self._failed = False  # an error of this agent itself ends it
        self._code: int | None = None  # exit code, once it is known
        self._replacements = Replacements()
        self._done = asyncio.Event()

    @abstractmethod
    def _tell(self, message: Message) -> None:
        """Send a message to the coordinator."""

    @abstractmethod
    def _make_keeper(self) -> Keeper:
        """Return the keeper of the coordinator's process. Raises ``UsageError`` for an endpoint that is of no use."""

    @property
    @abstractmethod
    def _is_alone(self) -> bool:
        """Whether there is no connection to the coordinator."""

    @property
    def workers(self) -> dict[str, LocalWorker]:
        """The workers that live on this machine, by name."""
        return self._local.alive

    @property
    def _leaving(self) -> bool:
        return self._departure is not None

    @property
    def _is_run(self) -> bool:
        """Whether the script is known to have a ``Run``."""
        return self._has_run or self._begun or any(worker.has_run for worker in self.workers.values())

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the agent if one of its coroutines has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = True
            self._end(getattr(error, "exit_code", 1), f"holdfast: {error}")

    def _end(self, code: int, message: str = "") -> None:
        """End the agent with an exit code, unless it has one already. Only the first call counts."""
        if self._done.is_set():
            return
        if message:
            self._complain(message)
        self._code = code if self._code is None else self._code
        self._done.set()

    def _pass_on(self, told: list[Out]) -> None:
        """Send what workers say to the coordinator, and what it says to them."""
        for recipient, message in told:
            if recipient == COORDINATOR:
                self._tell(message)
            elif recipient in self.workers:
                self.workers[recipient].tell(message)

    def _worker_said(self, worker: LocalWorker, message: Message) -> None:
        if worker.rank:
            self._desk.mate(worker.name, worker.rank, time.monotonic())
        else:
            self._pass_on(self._desk.hear(worker.name, message, time.monotonic()))

    # --- starting and replacing ------------------------------------------------------------------

    def _start_all(self) -> None:
        for slot in range(self.settings.workers):
            self._start(slot)

    def _start(self, slot: int) -> None:
        """Start a worker in a slot, under a new name."""
        name = f"{self.host}.{self._serial}"
        self._serial += 1
        settings = self.settings
        environment = settings.worker_environment(
            name=name,
            slot=slot,
            host=self.host or 0,
            address=self._own_address,
            lineup=self._lineup,
            restarts=self._restarts,
        )
        ranks: list[dict[str, str]] = []
        if settings.team > 1:
            port = free_port(LOOPBACK)
            ranks = [settings.team_environment(slot=slot, rank=rank, port=port) for rank in range(settings.team)]
        self._local.start(
            name, slot, command=settings.command, module=settings.module, environment=environment, ranks=ranks
        )

    def _describe(self) -> Message:
        """Return what the coordinator has to know of this agent to begin another round."""
        left = self.settings.max_restarts - self._restarts
        return {"left": left, "address": self._own_address, "master_port": free_port(self._own_address)}

    def _ended(self, worker: LocalWorker, code: int, cause: str) -> None:
        """Tell the coordinator that a worker has ended, and replace it if it is still needed."""
        self._has_run = self._is_run or worker.has_run
        if self.finishing and (worker.orphan or worker.name not in self._trained):
            code = 0  # its exit code is unknown, or it was killed; it had nothing left to do
        report: Message = {"type": "exit", "worker": worker.name, "incarnation": worker.incarnation, "pid": worker.pid}
        report |= {"code": code, "cause": cause, "error": worker.error, "run": self._has_run}
        is_final = worker.error is not None and worker.error["final"]
        if self._round.clearing or not (self._has_run or self._leaving or self.finishing or is_final):
            self._round.ended(worker, code, report)
            return
        report["finished"] = code == 0 and not self._leaving
        self._desk.ended(worker.name, report)
        self._tell(report)
        if worker.error is not None and is_final and self._is_alone:
            self._failed = True
            self._end(code, worker.error["text"])  # without the coordinator nobody else would end the run
        if code == 0 and not self._leaving:
            self.finishing = True
        if code == GIVEN_UP and not self.finishing and not self._leaving:  # not a failure: start it again at once
            self._replacements.plan(worker.slot, at=time.monotonic())
        elif code and not self.finishing and not self._leaving:
            self._plan_replacement(worker, cause)
        if self._departure is not None:
            self._departure.ended(worker.name, code)
        if self.workers:
            return
        if self.finishing or (self._leaving and worker.error is not None):
            code = max(code, 0)  # a negative code means killed by a signal, when it had nothing left to do
            self._end(code, worker.error["text"] if code and worker.error is not None else "")
        elif self._leaving:
            self._depart()
        elif not self._replacements:
            self._tell_nobody()

    def _tell_nobody(self) -> None:
        self._tell({"type": "nobody", "reason": "no worker is left and none may be restarted"})

    def _plan_replacement(self, worker: LocalWorker, cause: str) -> None:
        """Plan a new worker in place of one that failed, if restarts are left."""
        refused = worker.error is not None and worker.error.get("refused")
        if not refused and self._restarts < self.settings.max_restarts:
            if worker.error is None and not (worker.unwanted or worker.condemned):  # else it is told elsewhere
                self._say(f"holdfast: worker {worker.name} was lost ({cause}); another one is started in its place")
            self._restarts += 1
            self._replacements.recovered = False
            # Wait a little: survivors that recover need the cores, and an error of the script may end the run anyway.
            wait = REPLACE_AFTER_SECONDS if self._begun or worker.error is not None else 0.0
            self._replacements.plan(worker.slot, at=time.monotonic() + wait)
            return
        used_up = f"holdfast: worker {worker.name} is not replaced: --max-restarts is used up"
        self._say(worker.error["text"] if refused and worker.error is not None else used_up)
        left = len(self.workers) + len(self._replacements)  # spares among them
        if left < self._slots:  # tell the coordinator not to wait for this slot
            self._slots = left
            self._tell({"type": "slots", "slots": left})

    async def _replace(self) -> None:
        """Start planned replacements when they are due."""
        while True:
            await asyncio.sleep(0.01)
            if not self.finishing and not self._done.is_set():
                for slot in self._replacements.due(time.monotonic()):
                    self._start(slot)

    # --- leaving ---------------------------------------------------------------------------------

    def leave(self, seconds: float) -> None:
        """Let the workers leave as after SIGTERM. ``seconds``: the grace, whatever the settings say."""
        self._asked_to_stop(signal.SIGTERM, seconds)

    def _asked_to_stop(self, number: int, seconds: float | None = None) -> None:
        """Let the workers leave at the next step boundary. A second SIGTERM or SIGINT ends everything at once.

        SIGTERM is how clusters announce that they will take a machine away. ``seconds``: the grace, if it is known.
        """
        if self._departure is not None and time.monotonic() < self._departure.begin + REPEAT_SECONDS:
            return  # the same notice once more: wrappers pass on what the whole process group has got already
        self._pressed += number in signals.IMPATIENT
        if self._departure is not None or self._done.is_set():
            if self._pressed > 1 or (self._done.is_set() and number in signals.IMPATIENT):
                self._stop_at_once(number)
            return
        seconds = self.settings.grace if seconds is None else seconds
        seconds = grace.seconds_of(number, os.environ, time.time()) if seconds is None else seconds
        now, has_run = time.monotonic(), self._is_run
        self._departure = Departure(signal=number, seconds=seconds, begin=now, begun=self._begun, has_run=has_run)
        self._replacements.clear()
        name = self._departure.name
        self._events.write("preempted", host=self.host, signal=name, grace=seconds)
        self._say(f"holdfast: {name}: {self._departure.plan}; {seconds:g} s of grace")
        self._tell({"type": "slots", "slots": 0})
        for worker in self.workers.values():
            worker.tell({"type": "leave"})
            if not has_run:  # its own handler may save something; without one it is killed (``_reported``)
                worker.send_signal(number)
        if not self.workers:
            self._depart()
        self._watching = asyncio.create_task(self._watch_departure(self._departure))
        self._watching.add_done_callback(self._task_ended)

    def _stop_at_once(self, number: int) -> None:
        """End everything that runs here, the coordinator too. The exit code tells if steps are lost."""
        code, text = 128 + number, "stopped at once"
        if self._departure is not None and self._departure.outcome(late=list(self.workers)).is_loss:
            code, text = grace.NOT_SAVED, f"{text}: steps since the last checkpoint are lost, unless others hold them"
        self._end(code, f"holdfast: {text}")
        for worker in self.workers.values():
            worker.kill()
        self._keeper.stop()

    async def _watch_departure(self, plan: Departure) -> None:
        """Show every few seconds how far the workers are, and end what is left of them at the plan's deadline."""
        while not self._done.is_set():
            await asyncio.sleep(min(PROGRESS_SECONDS, max(0.0, plan.deadline - time.monotonic())))
            if time.monotonic() >= plan.deadline:
                self._depart()
            elif self.workers:
                self._say(f"holdfast: {plan.line(time.monotonic())}")

    def _depart(self) -> None:
        """End as planned: say what was saved and what was not. Workers that are still there are late."""
        if self._departure is None or self._done.is_set():
            return
        outcome = self._departure.outcome(late=list(self.workers))
        self._events.write("left", host=self.host, code=outcome.code, saved=outcome.saved, reason=outcome.text)
        text = f"holdfast: {outcome.text}"
        if not outcome.is_loss:
            self._say(text)
        self._end(outcome.code, text if outcome.is_loss else "")

    def _reported(self, worker: LocalWorker, report: Message) -> None:
        """Take in a worker's words: how far it is, how leaving goes, that its script is over, or a signal came."""
        if report["report"] == "signal" and self._departure is not None and not self._is_run:
            worker.kill()  # a script without a Run, and without a handler of its own
        elif report["report"] == "signal":
            explain = functools.partial(self._explain_signal, worker, report["name"])
            asyncio.get_running_loop().call_later(NOTICE_SECONDS, explain)
        elif report["report"] == "run":
            worker.has_run = True
        elif report["report"] == "over":
            self._over = max(self._over, report["generation"])
        elif report["report"] == "finished":
            worker.finished = True
            self.finishing = self.finishing or self._is_run
        elif report["report"] == "progress":
            if not self.settings.quiet:
                self._show_progress(report)
        elif self._departure is not None:
            self._departure.hear(worker.name, report)

    def _explain_signal(self, worker: LocalWorker, name: str) -> None:
        """Say what a signal to a single worker does: nothing. A notice to the whole job has reached this agent too."""
        if not self._leaving and worker.name in self.workers:
            self._say(
                f"holdfast: worker {worker.name} was sent {name} and goes on: send it to the agent (process "
                f"{os.getpid()}) and all workers of this machine leave, or SIGKILL to {worker.pid} to replace this one"
            )
