"""The agent: one per machine. Starts and replaces workers, never takes part in training.

It owns the listening socket of the coordinator, so that a killed coordinator comes back at the same
address with nobody turned away in between.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cluster import wire
from holdfast.cluster.events import Events
from holdfast.cluster.wire import Message
from holdfast.errors import UsageError

GRACE_SECONDS = 30.0  # for workers to reach a step boundary after they were asked to leave
REPLACE_AFTER_SECONDS = 2.0  # at the latest; usually as soon as the survivors have recovered
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What ``holdfast run`` was asked for."""

    command: list[str]
    module: bool = False
    workers: int = 1
    spares: int = 0
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


@dataclass(kw_only=True)
class LocalWorker:
    name: str
    slot: int
    lifeline: socket.socket
    log: Path
    pid: int | None = None
    shown: int = 0  # bytes of its log already on the console
    error: Message | None = None
    orphan: bool = False  # the zygote that forked it has ended


class Agent:
    """Runs until its workers are done. ``run()`` returns the exit code.

    >>> AgentSettings(command=["train.py"], workers=4).workers
    4
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        zygote: socket.socket | None = None,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        self.settings = settings
        self.host: int | None = None
        self.workers: dict[str, LocalWorker] = {}
        self.coordinator: asyncio.subprocess.Process | None = None
        self._say = say
        self._zygote = zygote
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] = (LOOPBACK, 0)
        self._port_taken = False
        self._own_address = LOOPBACK
        self._writer: asyncio.StreamWriter | None = None
        self._serial = 0
        self._restarts = 0
        self._begun = False
        self._finishing = False
        self._leaving = False
        self._code: int | None = None
        self._replacements: list[tuple[int, float]] = []  # (slot, at the latest when)
        self._recovered = asyncio.Event()
        self._done = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        self.events = Events(settings.log_dir / "events.jsonl")

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        self._listen()
        if self._zygote is None:
            self._zygote = start_zygote()
        self._zygote.setblocking(False)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        self._tasks = [asyncio.create_task(job()) for job in self._jobs()]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        try:
            await self._done.wait()
        finally:
            await self._clean_up()
        return self._code or 0

    def _jobs(self) -> list[Callable[[], Any]]:
        jobs: list[Callable[[], Any]] = [self._talk, self._hear_zygote, self._show_logs, self._replace]
        return jobs + ([self._keep_coordinator] if self._listener is not None else [])

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
            self._kill(worker)
        self._flush_logs()
        self._tell({"type": "bye"})
        await self._let_coordinator_end()
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._listener is not None:
            self._listener.close()

    async def _let_coordinator_end(self) -> None:
        """It ends by itself when no host is left; until then it serves the other machines."""
        if self.coordinator is None:
            return
        try:
            patience = 2.0 if self._code and not self._leaving else None
            await asyncio.wait_for(self.coordinator.wait(), patience)
        except (TimeoutError, asyncio.CancelledError):
            self.coordinator.kill()
            await self.coordinator.wait()

    # --- the coordinator -------------------------------------------------------------------------

    def _listen(self) -> None:
        """Binds the coordinator's address if it is one of this machine's, else joins it as a client."""
        host, _, port = self.settings.endpoint.rpartition(":")
        host = host or LOOPBACK
        if self.settings.endpoint and not port.isdigit():
            raise UsageError(f"'{self.settings.endpoint}' is not host:port", hint="try head:29700")
        try:
            addresses = socket.getaddrinfo(host, int(port or 0), type=socket.SOCK_STREAM)
        except OSError as e:
            raise UsageError(f"cannot resolve '{host}': {e}", hint="check --rdzv-endpoint") from e
        family, _, _, _, address = addresses[0]
        self._address = (str(address[0]), int(address[1]))
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as e:
            listener.close()  # another machine's address, or another agent of this run is here first
            self._port_taken = e.errno == errno.EADDRINUSE
        else:
            listener.listen(1024)
            self._listener = listener
            self._address = (str(address[0]), int(listener.getsockname()[1]))

    async def _keep_coordinator(self) -> None:
        """Starts the coordinator, and starts it again whenever it dies."""
        assert self._listener is not None
        settings = self.settings
        descriptor = self._listener.fileno()
        while not self._done.is_set():
            self.coordinator = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "holdfast.cluster.coordinator"),
                *("--listener", str(descriptor), "--events", str(settings.log_dir / "events.jsonl")),
                *("--minimum-hosts", str(settings.minimum_hosts)),
                *("--maximum-hosts", str(settings.maximum_hosts)),
                *("--heartbeat-timeout", str(settings.heartbeat_timeout)),
                *("--patience", str(settings.patience)),
                env={**os.environ, "HOLDFAST_TOKEN": settings.token},
                pass_fds=[descriptor],
            )
            if await self.coordinator.wait() == 0 or self._done.is_set():
                return
            self.events.write("coordinator-restart")

    async def _talk(self) -> None:
        """Keeps the connection to the coordinator."""
        since = time.monotonic()
        while True:
            hello = {
                "role": "agent",
                "host": self.host,
                "slots": self._slots(),
                "begun": self._begun,
            }
            try:
                reader, self._writer = await wire.connect(self._address, self.settings.token, hello)
                await self._hear_coordinator(reader)
            except wire.Refused as e:
                raise UsageError(f"the coordinator refuses this agent: {e}", hint=TOKEN_HINT) from e
            except OSError as e:
                self._not_reached(time.monotonic() - since, e)
            else:
                since = time.monotonic()
            self._writer = None
            await asyncio.sleep(0.05)

    def _not_reached(self, seconds: float, error: OSError) -> None:
        if self._listener is not None or self.host is not None:
            return  # ours is about to come back; another machine's may
        host, port = self._address
        if self._port_taken and isinstance(error, wire.NotHoldfast):
            raise UsageError(f"port {port} is in use by another program", hint="choose another --rdzv-endpoint")
        if seconds > self.settings.patience:
            raise UsageError(
                f"no coordinator answers at {host}:{port} for {self.settings.patience:g} s",
                hint="start the first agent on that machine, with the same --rdzv-endpoint",
            )

    def _slots(self) -> int:
        return 0 if self._leaving else self.settings.workers

    async def _hear_coordinator(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = wire.decode(line)
            kind = message["type"]
            if kind == "welcome":
                self._welcomed(message["host"])
            elif kind == "generation":
                self._training_began()
            elif kind == "recovered":
                self._recovered.set()
            elif kind == "finishing":
                self._finishing = True
            elif kind == "beat":
                self._tell({"type": "beat"})
            elif kind == "kill" and message["worker"] in self.workers:
                self._kill(self.workers[message["worker"]])
            elif kind == "stop":
                self._stop(message)
                return

    def _tell(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def _welcomed(self, host: int) -> None:
        if self.host is None:
            self.host = host
            assert self._writer is not None
            self._own_address = self._writer.get_extra_info("sockname")[0]
            for slot in range(self.settings.workers):
                self._start(slot)

    def _training_began(self) -> None:
        if not self._begun:
            self._begun = True
            for slot in range(self.settings.spares):
                self._start(self.settings.workers + slot)

    def _stop(self, message: Message) -> None:
        code, text = message["code"], message["message"]
        if self._leaving:
            self._end(code)  # its own signal has set the exit code already
        elif code:
            self._end(code, text if text.startswith(("Traceback", "holdfast")) else f"holdfast: {text}")
        else:
            self._finishing = True

    # --- workers ---------------------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        assert self._zygote is not None
        name = f"{self.host}.{self._serial}"
        self._serial += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log = self.settings.log_dir / f"worker-{name}.log"
        worker = LocalWorker(name=name, slot=slot, lifeline=ours, log=log)
        if log.exists():
            worker.shown = log.stat().st_size
        self.workers[name] = worker
        order = {
            "worker": name,
            "log": str(log.absolute()),
            "folder": os.getcwd(),
            "module": self.settings.module,
            "arguments": self.settings.command,
            "environment": self._environment(name, slot),
        }
        socket.send_fds(self._zygote, [json.dumps(order).encode()], [theirs.fileno()])
        theirs.close()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear_worker, worker)

    def _environment(self, name: str, slot: int) -> dict[str, str]:
        settings = self.settings
        slots = settings.workers
        host = self.host or 0
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **settings.environment,
            "RANK": str(host * slots + slot),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": str(slots * settings.minimum_hosts),
            "LOCAL_WORLD_SIZE": str(slots),
            "GROUP_RANK": str(host),
            "ROLE_RANK": str(host * slots + slot),
            "MASTER_ADDR": self._address[0],
            "MASTER_PORT": str(self._address[1] + 1),
            "TORCHELASTIC_RUN_ID": settings.job,
            "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "HOLDFAST_WORKER": name,
            "HOLDFAST_COORDINATOR": f"{self._address[0]}:{self._address[1]}",
            "HOLDFAST_TOKEN": settings.token,
            "HOLDFAST_ADDRESS": self._own_address,
            "HOLDFAST_HEARTBEAT": str(settings.heartbeat_timeout),
            "HOLDFAST_EVENTS": str((settings.log_dir / "events.jsonl").absolute()),
        }

    def _hear_worker(self, worker: LocalWorker) -> None:
        try:
            data = worker.lifeline.recv(2**17)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            worker.error = json.loads(data)
        else:
            asyncio.get_running_loop().remove_reader(worker.lifeline.fileno())
            if worker.orphan and worker.name in self.workers:
                self._ended(worker, 0 if self._finishing else 1, "ended; its zygote had ended before it")

    async def _hear_zygote(self) -> None:
        assert self._zygote is not None
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(self._zygote, 2**16)
            if not data:
                self._replace_zygote()
                continue
            message = json.loads(data)
            if "started" in message and message["started"] in self.workers:
                self.workers[message["started"]].pid = message["pid"]
            elif "exited" in message:
                self._exited(message["exited"], message["code"])

    def _replace_zygote(self) -> None:
        """Its workers live on without it; only how they end is no longer told."""
        self.events.write("zygote-restart")
        for worker in self.workers.values():
            worker.orphan = True
        self._zygote = start_zygote()
        self._zygote.setblocking(False)

    def _exited(self, pid: int, code: int) -> None:
        worker = next((w for w in self.workers.values() if w.pid == pid), None)
        if worker is not None:
            self._hear_worker(worker)
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self._ended(worker, code, cause)

    def _ended(self, worker: LocalWorker, code: int, cause: str) -> None:
        asyncio.get_running_loop().remove_reader(worker.lifeline.fileno())
        worker.lifeline.close()
        self._show(worker)
        del self.workers[worker.name]
        report = {"worker": worker.name, "code": code, "cause": cause, "error": worker.error}
        self._tell({"type": "exit", **report})
        if code == 0:
            self._finishing = self._finishing or not self._leaving
        if code and not self._finishing and not self._leaving:
            if worker.error is not None and worker.error.get("refused"):
                self._say(worker.error["text"])
            else:
                self._plan_replacement(worker)
        self._look_for_the_end(code)

    def _plan_replacement(self, worker: LocalWorker) -> None:
        if self._restarts >= self.settings.max_restarts:
            self._say(f"holdfast: worker {worker.name} is not replaced: --max-restarts is used up")
            return
        self._restarts += 1
        self._recovered.clear()
        wait = REPLACE_AFTER_SECONDS if self._begun else 0.0
        self._replacements.append((worker.slot, time.monotonic() + wait))

    async def _replace(self) -> None:
        """Forks replacements once the survivors have committed again: until then they need the cores."""
        while True:
            await asyncio.sleep(0.01)
            due = self._recovered.is_set()
            now = time.monotonic()
            for slot, latest in list(self._replacements):
                if (due or now >= latest) and not self._finishing and not self._leaving:
                    self._replacements.remove((slot, latest))
                    self._start(slot)

    def _look_for_the_end(self, code: int) -> None:
        if self.workers:
            return
        if self._leaving:
            self._end(0)
        elif self._finishing:
            self._end(code)
        elif not self._replacements:
            self._tell({"type": "nobody", "reason": "no worker is left and none may be restarted"})

    def _kill(self, worker: LocalWorker) -> None:
        if worker.pid is not None:
            try:
                os.kill(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _asked_to_stop(self, number: int) -> None:
        """SIGTERM is a preemption notice: workers leave at the next step boundary. Twice: at once."""
        if self._leaving:
            self._end(128 + number, "holdfast: stopped at once")
            for worker in self.workers.values():
                self._kill(worker)
            if self.coordinator is not None and self.coordinator.returncode is None:
                self.coordinator.kill()
            return
        self._leaving = True
        self._code = 128 + number
        self._replacements.clear()
        self.events.write("preempted", host=self.host, signal=signal.Signals(number).name)
        self._say(f"holdfast: {signal.Signals(number).name}: leaving at the next step boundary")
        self._tell({"type": "slots", "slots": 0})
        for worker in self.workers.values():
            try:
                worker.lifeline.send(b"leave\n")
            except OSError:
                pass
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end, 128 + number)
        self._look_for_the_end(0)

    # --- what workers print ----------------------------------------------------------------------

    async def _show_logs(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self._flush_logs()

    def _flush_logs(self) -> None:
        for worker in self.workers.values():
            self._show(worker)

    def _show(self, worker: LocalWorker) -> None:
        if self.settings.quiet or not worker.log.exists():
            return
        with worker.log.open("rb") as log:
            log.seek(worker.shown)
            data = log.read()
        whole, newline, _ = data.rpartition(b"\n")
        worker.shown += len(whole) + len(newline)
        if newline and worker.error is None:  # a traceback is shown once, by the verdict
            for line in whole.decode(errors="replace").split("\n"):
                self._say(f"[{worker.name}] {line}")


TOKEN_HINT = "set the same HOLDFAST_TOKEN, or --token-file, on every machine"


def start_zygote() -> socket.socket:
    """Starts a zygote; the socket to it carries orders one way and reports the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "holdfast.cluster.zygote", str(theirs.fileno())]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Not waited for: it ends by itself when our end of the socket closes.
    subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours
