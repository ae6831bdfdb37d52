"""The agent: one per machine. It starts and replaces workers, and never takes part in training.

It keeps a connection to the coordinator, and a lifeline (a socket pair) to each of its workers. The first agent, or the
one that is elected, also keeps the coordinator's process alive (``keeper``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from holdfast.cluster import signals
from holdfast.cluster.agent_line import AgentLine
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.agent_workers import AgentWorkers
from holdfast.cluster.health import HealthServer, Readiness, readiness
from holdfast.cluster.keeper import CoordinatorKeeper, Keeper
from holdfast.cluster.local_round import Lineup
from holdfast.cluster.membership import ENDING_SECONDS, new_incarnation
from holdfast.cluster.quorum.keeper import ElectedKeeper
from holdfast.cluster.wire import Message

TOO_FEW = 3  # exit code of a run that has too few workers left: no error, where all were asked to leave

logger = logging.getLogger(__name__)


class Agent(AgentWorkers):
    """Runs until its workers are done; ``run()`` returns the exit code.

    ``zygote``: the socket to a zygote that runs already; None: start one. ``say`` shows a line of a worker's output, or
    a notice. ``complain`` shows the error that ends the run. ``show`` gets how far the training is, a few times a
    second (``holdfast.bar``). ``heeds_signals``: signals to this process are notices. Else only ``leave`` is one, and
    the agent may run in any thread.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        say: Callable[[str], None],
        complain: Callable[[str], None] = logger.error,
        show: Callable[[Message], None] = lambda facts: None,
        zygote: socket.socket | None = None,
        heeds_signals: bool = True,
    ) -> None:
        self._incarnation = new_incarnation()
        super().__init__(settings, say=say, complain=complain, show=show, zygote=zygote)
        self._notices = signals.notices() if heeds_signals else []
        self._line = AgentLine(self, self._keeper, settings)
        self._ending: asyncio.TimerHandle | None = None  # ends this agent if a worker whose script is over does not

    @property
    def coordinator(self) -> asyncio.subprocess.Process | None:
        """The coordinator's process, if it runs on this machine."""
        return self._keeper.process

    @property
    def address(self) -> tuple[str, int] | None:
        """The address and port where the coordinator listens; None while that is not known."""
        return self._keeper.address

    def _make_keeper(self) -> Keeper:
        settings = self.settings
        if settings.etcd is None:
            return CoordinatorKeeper(settings.endpoint)
        return ElectedKeeper(
            settings.etcd,
            run=settings.job,
            agent=self._incarnation,
            address=settings.address,
            patience=settings.patience,
            events=self._events,
            say=self._say,
            moved=self._coordinator_moved,
        )

    def _coordinator_moved(self) -> None:
        """Connect to the coordinator where it is now."""
        self._line.abort()

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until the workers are done or the run is stopped; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in self._notices:
            loop.add_signal_handler(number, self._asked_to_stop, number)
        self._events.write("run", command=self.settings.command, workers=self.settings.workers, pid=os.getpid())
        tasks = [asyncio.create_task(job) for job in self._jobs()]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        try:
            await self._done.wait()
        finally:
            await self._clean_up()
            for task in tasks:
                task.cancel()
            self._keeper.close()
        return self._code or 0

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run side by side as long as the agent does."""
        jobs = [self._line.stay_connected(), self._local.hear_zygote(), self._local.show_logs(), self._replace()]
        if self._keeper.serves:
            settings = self.settings
            words = settings.coordinator_options(run=self._incarnation, master_port=self._keeper.master_port)
            jobs.append(self._keeper.keep(words, settings.token, lambda: self._events.write("coordinator-restart")))
        if self.settings.health is not None:
            jobs.append(HealthServer(self.settings.health, self._readiness).serve())
        return jobs

    def _readiness(self) -> Readiness:
        generation = self._desk.generation
        return readiness(
            leaving=self._leaving,
            has_run=self._is_run,
            members=None if generation is None else generation.workers,
            workers=list(self.workers),
            wanted=self.settings.workers,
        )

    async def _clean_up(self) -> None:
        """Wait a little for workers that end by themselves, kill the others, and let the coordinator end."""
        deadline = time.monotonic() + (0.5 if self._code else 5.0)
        while self.workers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for worker in self.workers.values():
            worker.kill()
        self._local.flush_logs()
        self._tell({"type": "bye", "stays": self._keeper.stays})
        await self._keeper.let_end(2.0 if self._failed else None, self._lingers)
        self._line.close()

    def _lingers(self) -> None:
        """Say why this agent does not end yet. The coordinator is needed for every change of the other workers."""
        if self.settings.maximum_hosts > 1:
            text = "the coordinator stays here until the run is over; SIGTERM ends it"
            self._say(f"holdfast: this machine's workers are gone; {text}")

    # --- the coordinator -------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        self._line.tell(message)

    @property
    def _is_alone(self) -> bool:
        return not self._line.is_open

    def line(self, lost: str) -> None:
        """Tell workers that the coordinator is reached, or is not (``AgentLine``)."""
        self._pass_on(self._desk.line(lost))

    def hello(self) -> Message:
        """Return all that a coordinator has to know of this agent and its workers."""
        hello = {"host": self.host, "agent": self._incarnation, "slots": 0 if self._leaving else self._slots}
        hello |= {"begun": self._begun, "run": self._is_run, "round": self._round.number}
        hello["finished"] = self.finishing  # a worker may have ended while there was no connection
        hello["over"] = self._over
        hello["stays"] = self._done.is_set() and self.host is not None  # it has said bye, to keep the coordinator
        return hello | self._desk.hello(time.monotonic())

    def kill_stopped(self) -> None:
        """Kill workers that are stopped (SIGSTOP), which the coordinator would ask for if it were there.

        Those that replace them end for want of a coordinator, and this agent with them. A stopped one never ends.
        """
        for worker in self.workers.values():
            if worker.is_stopped:
                worker.kill()

    def heard(self, message: Message) -> None:
        """Take in what the coordinator says (``AgentLine``)."""
        kind = message["type"]
        self._pass_on(self._desk.take(message))
        if kind == "beat":
            beat = {"type": "beat", "starting": self._local.starting}
            self._tell(beat | {"workers": self._desk.beat(time.monotonic())})
        elif kind == "welcome":
            self._has_run = self._is_run or message["run"]
            self._welcomed(message)
            if message["begun"]:  # what was told while the connection was lost
                self._training_began()
            if message["finishing"]:
                self._finish(message["members"])
        elif kind == "generation":
            assert self._desk.generation is not None
            self._trained.update(self._desk.generation.workers)
            self._training_began()
        elif kind == "recovered":
            self._replacements.recovered = True
        elif kind == "run":
            self._found_run()
        elif kind == "clear":
            self._round.clear(message["round"])
        elif kind == "again":
            self._start_again(message)
        elif kind == "say":
            self._say(message["text"])
        elif kind == "finishing":
            self._finish(message["members"])
        elif kind == "kill" and message["worker"] in self.workers:
            cause, details = message.get("cause", "it was given up"), message.get("details", {})
            self._local.kill_hung(self.workers[message["worker"]], cause, details)
        elif kind == "stop":
            self._told_to_stop(message["code"], message["message"])

    def _welcomed(self, message: Message) -> None:
        """Take this agent's number, and at the first time start the workers."""
        if self._done.is_set():
            if self.host is None or self.settings.maximum_hosts == 1:  # else other machines may be about to come back
                self._tell({"type": "bye", "stays": self._keeper.stays})
        elif self.host is None:
            host: int = message["host"]
            assert self.address is not None
            master = (self.address[0], message["master_port"])
            self._keeper.numbered(host)
            groups = self.settings.first_hosts or self.settings.minimum_hosts
            self.host, self._lineup = host, Lineup(group_rank=message["rank"], groups=groups, master=master)
            self._own_address = self._line.own_address
            if message["waits"]:
                self._restarts = message["round"]
                self._round.wait(message["round"])
            else:
                self._start_all()
        else:
            self._round.repeat()

    def _start_again(self, message: Message) -> None:
        """Start all workers of a script without a ``Run`` once more, as the coordinator has decided."""
        if self._leaving or self._done.is_set() or self.host is None or not self._round.again(message["round"]):
            return
        self._restarts += 1
        self._lineup = Lineup.of(message, self.host)
        self._start_all()

    def _found_run(self) -> None:
        """Take in that the script has a ``Run``: workers that have failed are replaced one by one."""
        self._has_run = True
        if not self._round.clearing:
            for worker, cause in self._round.take_failed():
                self._plan_replacement(worker, cause)
            if not self.workers and not self._replacements:
                self._tell_nobody()

    def _training_began(self) -> None:
        """Start the spares, which must not slow down the start of the workers that train."""
        if not self._begun:
            self._begun = True
            for spare in range(0 if self._leaving else self.settings.spares):
                self._start(self.settings.workers + spare)

    def _told_to_stop(self, code: int, text: str) -> None:
        """End as the coordinator says. Code 0: the run is over, and the workers end by themselves."""
        if self._leaving and code in (0, TOO_FEW):
            if not self.workers:  # else they end by themselves as soon as the last checkpoint is written
                self._depart()
        elif code:
            self._end(code, text if text.startswith(("Traceback", "holdfast")) else f"holdfast: {text}")
        else:
            self._finish()

    def _finish(self, members: Collection[str] = ()) -> None:
        """Note that somebody's script is over: nobody is replaced any more, so without workers this agent is done.

        Workers that have never trained are killed: one that hangs before it has connected would never end.
        """
        self.finishing = True
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(ENDING_SECONDS, self._end, 0)
        self._trained.update(members)
        for worker in self.workers.values() if self._trained else ():
            if worker.name not in self._trained:
                worker.kill()
        if not self.workers:
            self._end(0)
