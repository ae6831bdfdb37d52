"""The agent: one per machine. It starts and replaces workers, and never takes part in training.

It keeps a connection to the coordinator, and a lifeline (a socket pair) to each of its workers. The first agent, or the
one that is elected, also keeps the coordinator's process alive (``keeper``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from holdfast.cluster import grace, signals, wire
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.desk import COORDINATOR, Desk, Out
from holdfast.cluster.events import Events
from holdfast.cluster.grace import Departure
from holdfast.cluster.health import HealthServer, Readiness, readiness
from holdfast.cluster.keeper import LOOPBACK, CoordinatorKeeper, Keeper, free_port
from holdfast.cluster.local import LocalWorker, LocalWorkers
from holdfast.cluster.local_round import Lineup, LocalRound
from holdfast.cluster.membership import ENDING_SECONDS, GIVEN_UP, new_incarnation
from holdfast.cluster.quorum.keeper import ElectedKeeper
from holdfast.cluster.watch import LOOKS
from holdfast.cluster.wire import Message
from holdfast.cluster.zygote_keeper import ZygoteKeeper
from holdfast.errors import HoldfastError, UsageError

PROGRESS_SECONDS = 3.0  # between two lines that show how far workers are that leave
REPEAT_SECONDS = 0.1  # within which a signal that comes again is the same notice: nobody presses Ctrl-C so fast
NOTICE_SECONDS = 1.0  # a notice to all processes of a job reaches workers and agent within this
START_SECONDS = 120.0  # for its own coordinator to answer: Python's modules may come from a slow file server
REPLACE_AFTER_SECONDS = 2.0  # the longest wait to start a replacement; usually the survivors have recovered before
TOO_FEW = 3  # exit code of a run that has too few workers left: no error, where all were asked to leave

logger = logging.getLogger(__name__)


class Agent:
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
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.host: int | None = None  # this agent's number; None until the coordinator has given one
        self.finishing = False  # a script is over: nobody is replaced any more
        self._say: Callable[[str], None] = (lambda text: None) if settings.quiet else say
        self._complain: Callable[[str], None] = (lambda text: None) if settings.quiet else complain
        self._show_progress = show
        self._notices = signals.notices() if heeds_signals else []
        self._events = Events(settings.events)
        self._incarnation = new_incarnation()
        self._keeper = self._make_keeper()
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
        self._writer: asyncio.StreamWriter | None = None  # to the coordinator; None while there is no connection
        self._unsent: list[Message] = []  # messages since the last hello, while it is on its way
        self._serial = 0  # number of the next worker: a name is never used twice
        self._restarts = 0  # replacements so far
        self._trained: set[str] = set()  # workers that were ever in a generation, as far as this agent was told
        self._slots = settings.workers  # workers that the coordinator may wait for
        self._begun = False  # a generation has formed
        self._over = 0  # the generation in which a script has ended
        self._departure: Departure | None = None  # the plan, once a signal has asked this agent to leave
        self._pressed = 0  # signals so far of which the second ends everything at once
        self._watching: asyncio.Task[None] | None = None  # shows how workers leave
        self._heard = time.monotonic()  # when the coordinator was last heard, or waited for anew
        self._ending: asyncio.TimerHandle | None = None  # ends this agent if a worker whose script is over does not
        self._failed = False  # an error of this agent itself ends it
        self._code: int | None = None  # exit code, once it is known
        self._replacements: list[tuple[int, float]] = []  # (slot, latest time to start its new worker)
        self._recovered = False  # the survivors of the last loss have committed again
        self._done = asyncio.Event()

    @property
    def workers(self) -> dict[str, LocalWorker]:
        """The workers that live on this machine, by name."""
        return self._local.alive

    @property
    def _leaving(self) -> bool:
        return self._departure is not None

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
        if self._writer is not None:
            self._writer.transport.abort()

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
        jobs = [self._talk(), self._local.hear_zygote(), self._local.show_logs(), self._replace()]
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
        if self._writer is not None:
            self._writer.close()

    def _lingers(self) -> None:
        """Say why this agent does not end yet. The coordinator is needed for every change of the other workers."""
        if self.settings.maximum_hosts > 1:
            text = "the coordinator stays here until the run is over; SIGTERM ends it"
            self._say(f"holdfast: this machine's workers are gone; {text}")

    # --- the coordinator -------------------------------------------------------------------------

    async def _talk(self) -> None:
        """Stay connected to the coordinator: connect again whenever the connection is lost."""
        since = time.monotonic()
        while True:
            address = self.address
            if address is None:
                self._nobody_elected(time.monotonic() - since)
                await asyncio.sleep(0.01)
                continue
            try:
                # TCP would try for minutes, although the network may be back much earlier: so try again soon.
                connecting = wire.connect(address, self.settings.token, self._hello, self.settings.tls)
                reader, self._writer = await asyncio.wait_for(connecting, 2 * wire.HANDSHAKE_SECONDS)
                self._connected()
                await self._hear_coordinator(reader)
                since = time.monotonic()
            except wire.Refused as e:
                raise UsageError(f"the coordinator and this agent do not fit: {e}", hint=e.hint) from e
            except OSError as e:
                self._keeper.unreached(address, e)
                self._not_reached(time.monotonic() - since, e)
            self._writer, self._unsent = None, []
            self._pass_on(self._desk.line(f"{address[0]}:{address[1]}"))
            await asyncio.sleep(0.05)

    def _hello(self) -> Message:
        """Return all that a coordinator has to know of this agent and its workers."""
        self._unsent = []
        hello = {"host": self.host, "agent": self._incarnation, "slots": 0 if self._leaving else self._slots}
        hello |= {"begun": self._begun, "run": self._is_run, "round": self._round.number}
        hello["finished"] = self.finishing  # a worker may have ended while there was no connection
        hello["over"] = self._over
        hello["stays"] = self._done.is_set() and self.host is not None  # it has said bye, to keep the coordinator
        return hello | self._desk.hello(time.monotonic())

    def _connected(self) -> None:
        """Send what had to be told since the hello, which is on its way already."""
        for message in self._unsent:
            self._tell(message)
        self._pass_on(self._desk.line(""))

    def _not_reached(self, seconds: float, error: OSError) -> None:
        """Raise ``HoldfastError`` if the first connection has failed for so long that there is no coordinator.

        A coordinator that was reached before may come back: this agent's own is started again if it hangs.
        """
        alone = time.monotonic() - self._heard
        if self._keeper.is_ours:
            if alone > START_SECONDS and self.host is None:
                raise HoldfastError(
                    f"this machine's coordinator does not answer {START_SECONDS:g} s after its start",
                    hint="is Python's file system or this machine overloaded?",
                )
            if alone > START_SECONDS:
                self._heard = time.monotonic()
                self._keeper.kill()
            return
        if self.host is not None:
            if alone > self.settings.patience:
                self._kill_stopped()
            return
        assert self.address is not None
        host, port = self.address
        if self._keeper.port_taken and isinstance(error, wire.NotHoldfast):
            raise UsageError(f"port {port} is in use by another program", hint="choose another --rdzv-endpoint")
        if seconds > self.settings.patience:
            raise UsageError(
                f"no coordinator answers at {host}:{port} for {self.settings.patience:g} s",
                hint="start the first agent on that machine, with the same --rdzv-endpoint",
            )

    def _nobody_elected(self, seconds: float) -> None:
        """Raise ``UsageError`` if nobody has got the role for long. etcd's first answer may take the patience, too."""
        if seconds > 2 * self.settings.patience:
            raise UsageError(
                f"no coordinator was elected for {seconds:.0f} s", hint="does etcd answer, and all machines?"
            )

    def _kill_stopped(self) -> None:
        """Kill workers that are stopped (SIGSTOP), which the coordinator would ask for if it were there.

        Those that replace them end for want of a coordinator, and this agent with them. A stopped one never ends.
        """
        for worker in self.workers.values():
            if worker.is_stopped:
                worker.kill()

    async def _hear_coordinator(self, reader: asyncio.StreamReader) -> None:
        while True:
            line = await self._line_of(reader)
            if not line.endswith(b"\n"):
                return
            message = wire.decode(line)
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
                self._recovered = True
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
                return

    async def _line_of(self, reader: asyncio.StreamReader) -> bytes:
        """Return the coordinator's next line. After a long silence it is hung: if it is ours, kill it to restart it."""
        try:
            line = await asyncio.wait_for(reader.readline(), 3 * self.settings.heartbeat_timeout)
            self._heard = time.monotonic()
            return line
        except TimeoutError:
            self._keeper.kill()
            raise

    def _tell(self, message: Message) -> None:
        if self._writer is None:
            self._unsent.append(message)  # the next hello says it, unless it is just being sent
        elif not self._writer.is_closing():
            self._writer.write(wire.encode(message))

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
            assert self._writer is not None
            self._own_address = self._writer.get_extra_info("sockname")[0]
            if message["waits"]:
                self._restarts = message["round"]
                self._round.wait(message["round"])
            else:
                self._start_all()
        else:
            self._round.repeat()

    def _start_all(self) -> None:
        for slot in range(self.settings.workers):
            self._start(slot)

    def _start_again(self, message: Message) -> None:
        """Start all workers of a script without a ``Run`` once more, as the coordinator has decided."""
        if self._leaving or self._done.is_set() or self.host is None or not self._round.again(message["round"]):
            return
        self._restarts += 1
        self._lineup = Lineup.of(message, self.host)
        self._start_all()

    def _describe(self) -> Message:
        """Return what the coordinator has to know of this agent to begin another round."""
        left = self.settings.max_restarts - self._restarts
        return {"left": left, "address": self._own_address, "master_port": free_port(self._own_address)}

    @property
    def _is_run(self) -> bool:
        """Whether the script is known to have a ``Run``."""
        return self._has_run or self._begun or any(worker.has_run for worker in self.workers.values())

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

    # --- workers ---------------------------------------------------------------------------------

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
        if worker.error is not None and is_final and self._writer is None:
            self._failed = True
            self._end(code, worker.error["text"])  # without the coordinator nobody else would end the run
        if code == 0 and not self._leaving:
            self.finishing = True
        if code == GIVEN_UP and not self.finishing and not self._leaving:  # not a failure: start it again at once
            self._replacements.append((worker.slot, time.monotonic()))
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
            self._recovered = False
            # Wait a little: survivors that recover need the cores, and an error of the script may end the run anyway.
            wait = REPLACE_AFTER_SECONDS if self._begun or worker.error is not None else 0.0
            self._replacements.append((worker.slot, time.monotonic() + wait))
            return
        used_up = f"holdfast: worker {worker.name} is not replaced: --max-restarts is used up"
        self._say(worker.error["text"] if refused and worker.error is not None else used_up)
        left = len(self.workers) + len(self._replacements)  # spares among them
        if left < self._slots:  # tell the coordinator not to wait for this slot
            self._slots = left
            self._tell({"type": "slots", "slots": left})

    async def _replace(self) -> None:
        """Start planned replacements once the survivors have committed again: until then they need the cores."""
        while True:
            await asyncio.sleep(0.01)
            for slot, latest in list(self._replacements):
                if (self._recovered or time.monotonic() >= latest) and not self.finishing and not self._done.is_set():
                    self._replacements.remove((slot, latest))
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
