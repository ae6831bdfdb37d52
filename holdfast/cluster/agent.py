"""The agent: one per machine. Starts and replaces workers, never takes part in training."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cluster import wire
from holdfast.cluster.events import Events
from holdfast.cluster.keeper import LOOPBACK, CoordinatorKeeper
from holdfast.cluster.local import LocalWorker, LocalWorkers
from holdfast.cluster.membership import GIVEN_UP
from holdfast.cluster.wire import Message
from holdfast.errors import UsageError

GRACE_SECONDS = 30.0  # for workers to reach a step boundary after they were asked to leave
WRITING_SECONDS = 600.0  # and for what they still write then
REPLACE_AFTER_SECONDS = 2.0  # at the latest; usually as soon as the survivors have recovered
TOKEN_HINT = "set the same HOLDFAST_TOKEN, or --token-file, on every machine"


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What ``holdfast run`` was asked for.

    >>> AgentSettings(command=["train.py"], workers=4).workers
    4
    """

    command: list[str]
    module: bool = False
    workers: int = 1
    spares: int = 0
    hosts: tuple[str, ...] = ()  # the failure domain of each slot; spares take them in turn. Empty: this agent
    judge: str = "holdfast.commit.settle:judge"  # the ``membership.Judge`` of the coordinator, by name
    minimum_hosts: int = 1
    maximum_hosts: int = 1
    endpoint: str = ""  # host:port; empty: this machine alone, any free port
    job: str = "holdfast"
    token: str = field(default_factory=wire.new_token, repr=False)
    max_restarts: int = 100
    heartbeat_timeout: float = 5.0
    patience: float = 30.0
    log_dir: Path = Path("holdfast-logs")
    environment: dict[str, str] = field(default_factory=dict)
    quiet: bool = False

    @property
    def events(self) -> Path:
        return self.log_dir / "events.jsonl"


class Agent:
    """Runs until its workers are done; ``run()`` returns the exit code."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        zygote: socket.socket | None = None,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.host: int | None = None
        self.finishing = False
        self._say: Callable[[str], None] = (lambda text: None) if settings.quiet else say
        self._events = Events(settings.events)
        self._keeper = CoordinatorKeeper(settings.endpoint)
        self._local = LocalWorkers(
            log_dir=settings.log_dir, zygote=zygote, events=self._events, say=self._say, ended=self._ended
        )
        self._own_address = LOOPBACK
        self._writer: asyncio.StreamWriter | None = None
        self._serial = 0
        self._restarts = 0
        self._slots = settings.workers
        self._begun = False
        self._leaving = False
        self._patience: asyncio.TimerHandle | None = None
        self._code: int | None = None
        self._replacements: list[tuple[int, float]] = []  # (slot, at the latest when)
        self._recovered = False
        self._done = asyncio.Event()

    @property
    def workers(self) -> dict[str, LocalWorker]:
        """The workers that live on this machine, by name."""
        return self._local.alive

    @property
    def coordinator(self) -> asyncio.subprocess.Process | None:
        """The coordinator's process, if it runs on this machine."""
        return self._keeper.process

    @property
    def address(self) -> tuple[str, int]:
        """Where the coordinator listens."""
        return self._keeper.address

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        self._events.write("run", command=self.settings.command, workers=self.settings.workers)
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
        jobs = [self._talk(), self._local.hear_zygote(), self._local.show_logs(), self._replace()]
        if self._keeper.is_ours:
            settings = self.settings
            options = {
                "events": settings.events,
                "minimum-hosts": settings.minimum_hosts,
                "maximum-hosts": settings.maximum_hosts,
                "heartbeat-timeout": settings.heartbeat_timeout,
                "patience": settings.patience,
                "judge": settings.judge,
            }
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            jobs.append(self._keeper.keep(words, settings.token, lambda: self._events.write("coordinator-restart")))
        return jobs

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(getattr(error, "exit_code", 1), f"holdfast: {error}")

    def _end(self, code: int, message: str = "") -> None:
        if self._done.is_set():
            return
        if message and not self.settings.quiet:
            print(message, file=sys.stderr, flush=True)
        self._code = code if self._code is None else self._code
        self._done.set()

    async def _clean_up(self) -> None:
        deadline = time.monotonic() + (0.5 if self._code else 5.0)
        while self.workers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for worker in self.workers.values():
            worker.kill()
        self._local.flush_logs()
        self._tell({"type": "bye"})
        await self._keeper.let_end(2.0 if self._code and not self._leaving else None)
        if self._writer is not None:
            self._writer.close()

    # --- the coordinator -------------------------------------------------------------------------

    async def _talk(self) -> None:
        """Keeps the connection to the coordinator."""
        since = time.monotonic()
        while True:
            slots = 0 if self._leaving else self._slots
            hello = {"role": "agent", "host": self.host, "slots": slots, "begun": self._begun}
            hello["finished"] = self.finishing  # a worker may have ended while nobody could be told
            try:
                # Not for minutes, as TCP would try: the way to it may be free again before.
                connecting = wire.connect(self.address, self.settings.token, hello)
                reader, self._writer = await asyncio.wait_for(connecting, 2 * wire.HANDSHAKE_SECONDS)
                await self._hear_coordinator(reader)
                since = time.monotonic()
            except wire.Refused as e:
                raise UsageError(f"the coordinator refuses this agent: {e}", hint=TOKEN_HINT) from e
            except OSError as e:
                self._not_reached(time.monotonic() - since, e)
            self._writer = None
            await asyncio.sleep(0.05)

    def _not_reached(self, seconds: float, error: OSError) -> None:
        if self._keeper.is_ours or self.host is not None:
            return  # ours is about to come back; another machine's may
        host, port = self.address
        if self._keeper.port_taken and isinstance(error, wire.NotHoldfast):
            raise UsageError(f"port {port} is in use by another program", hint="choose another --rdzv-endpoint")
        if seconds > self.settings.patience:
            raise UsageError(
                f"no coordinator answers at {host}:{port} for {self.settings.patience:g} s",
                hint="start the first agent on that machine, with the same --rdzv-endpoint",
            )

    async def _hear_coordinator(self, reader: asyncio.StreamReader) -> None:
        while True:
            line = await self._line_of(reader)
            if not line.endswith(b"\n"):
                return
            message = wire.decode(line)
            kind = message["type"]
            if kind == "beat":
                self._tell({"type": "beat"})
            elif kind == "welcome":
                self._welcomed(message["host"])
            elif kind == "generation":
                self._training_began()
            elif kind == "recovered":
                self._recovered = True
            elif kind == "say":
                self._say(message["text"])
            elif kind == "finishing":
                self.finishing = True
            elif kind == "kill" and message["worker"] in self.workers:
                self.workers[message["worker"]].kill()
            elif kind == "stop":
                self._told_to_stop(message["code"], message["message"])
                return

    async def _line_of(self, reader: asyncio.StreamReader) -> bytes:
        """A coordinator that beats no more is hung: if it is ours, it is killed and comes back."""
        try:
            return await asyncio.wait_for(reader.readline(), 3 * self.settings.heartbeat_timeout)
        except TimeoutError:
            self._keeper.kill()
            raise

    def _tell(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def _welcomed(self, host: int) -> None:
        if self._done.is_set():  # our farewell was lost with an earlier coordinator
            self._tell({"type": "bye"})
        if self.host is None:
            self.host = host
            assert self._writer is not None
            self._own_address = self._writer.get_extra_info("sockname")[0]
            for slot in range(self.settings.workers):
                self._start(slot)

    def _training_began(self) -> None:
        if not self._begun:
            self._begun = True
            for spare in range(self.settings.spares):
                self._start(self.settings.workers + spare)

    def _told_to_stop(self, code: int, text: str) -> None:
        if self._leaving and code == 0 and self.workers:
            # They go by themselves, as soon as they have written what they have begun to write.
            if self._patience is not None:
                self._patience.cancel()
            self._patience = asyncio.get_running_loop().call_later(WRITING_SECONDS, self._end, self._code or 0)
        elif self._leaving:
            self._end(code)  # its own signal has set the exit code already
        elif code:
            self._end(code, text if text.startswith(("Traceback", "holdfast")) else f"holdfast: {text}")
        else:
            self.finishing = True

    # --- workers ---------------------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        name = f"{self.host}.{self._serial}"
        self._serial += 1
        settings, environment = self.settings, self._environment(name, slot)
        self._events.write("started", worker=name, slot=slot, host=environment["HOLDFAST_HOST"])
        self._local.start(name, slot, command=settings.command, module=settings.module, environment=environment)

    def _environment(self, name: str, slot: int) -> dict[str, str]:
        """What scripts expect of torchrun, and what ``client.Place`` reads; the rest is the zygote's."""
        settings, host = self.settings, self.host or 0
        address, port = self.address
        rank = str(host * settings.workers + slot)
        return {
            **settings.environment,
            "RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": str(slot),
            "GROUP_RANK": str(host),
            "WORLD_SIZE": str(settings.workers * settings.minimum_hosts),
            "LOCAL_WORLD_SIZE": str(settings.workers),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port % 65535 + 1),  # free for the script's own use; ours is taken
            "TORCHELASTIC_RUN_ID": settings.job,
            "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "HOLDFAST_WORKER": name,
            "HOLDFAST_HOST": settings.hosts[slot % len(settings.hosts)] if settings.hosts else str(host),
            "HOLDFAST_COORDINATOR": f"{address}:{port}",
            "HOLDFAST_TOKEN": settings.token,
            "HOLDFAST_ADDRESS": self._own_address,
            "HOLDFAST_HEARTBEAT": str(settings.heartbeat_timeout),
            "HOLDFAST_PATIENCE": str(settings.patience),
            "HOLDFAST_EVENTS": str(settings.events.absolute()),
        }

    def _ended(self, worker: LocalWorker, code: int, cause: str) -> None:
        """A worker of this machine is gone: tell, and replace it if it is still needed."""
        if worker.orphan and self.finishing:
            code = 0  # nobody could tell its exit code, and it had nothing left to do
        report = {"type": "exit", "worker": worker.name, "code": code, "cause": cause, "error": worker.error}
        self._tell(report | {"finished": code == 0 and not self._leaving})
        if worker.error is not None and worker.error["final"] and self._writer is None:
            self._end(code, worker.error["text"])  # nobody to judge it: the coordinator is gone
        if code == 0 and not self._leaving:
            self.finishing = True
        if code == GIVEN_UP and not self.finishing and not self._leaving:  # no failure of its own
            self._replacements.append((worker.slot, time.monotonic()))
        elif code and not self.finishing and not self._leaving:
            self._plan_replacement(worker)
        if self.workers:
            return
        code = max(code, 0)  # killed, but with nothing left to do
        if self._leaving or self.finishing:
            self._end(code, worker.error["text"] if code and worker.error is not None else "")
        elif not self._replacements:
            self._tell({"type": "nobody", "reason": "no worker is left and none may be restarted"})

    def _plan_replacement(self, worker: LocalWorker) -> None:
        if worker.error is not None and worker.error.get("refused"):
            self._say(worker.error["text"])
        elif self._restarts >= self.settings.max_restarts:
            self._say(f"holdfast: worker {worker.name} is not replaced: --max-restarts is used up")
            left = len(self.workers) + len(self._replacements)  # spares among them
            if left < self._slots:  # nobody has to wait for this one
                self._slots = left
                self._tell({"type": "slots", "slots": left})
        else:
            self._restarts += 1
            self._recovered = False
            # A script that fails may be about to end the run: no need to start it again meanwhile.
            wait = REPLACE_AFTER_SECONDS if self._begun or worker.error is not None else 0.0
            self._replacements.append((worker.slot, time.monotonic() + wait))

    async def _replace(self) -> None:
        """Forks replacements once the survivors have committed again: until then they need the cores."""
        while True:
            await asyncio.sleep(0.01)
            for slot, latest in list(self._replacements):
                if (self._recovered or time.monotonic() >= latest) and not self.finishing:
                    self._replacements.remove((slot, latest))
                    self._start(slot)

    def _asked_to_stop(self, number: int) -> None:
        """SIGTERM is a preemption notice: workers leave at the next step boundary. Twice: at once."""
        if self._leaving:
            self._end(128 + number, "holdfast: stopped at once")
            for worker in self.workers.values():
                worker.kill()
            self._keeper.kill()
            return
        self._leaving = True
        self._code = 128 + number
        self._replacements.clear()
        name = signal.Signals(number).name
        self._events.write("preempted", host=self.host, signal=name)
        self._say(f"holdfast: {name}: leaving at the next step boundary")
        self._tell({"type": "slots", "slots": 0})
        for worker in self.workers.values():
            worker.ask_to_leave()
        if not self.workers:
            self._end(0)
        self._patience = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end, 128 + number)
