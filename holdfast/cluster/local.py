"""The workers of one machine: the zygote forks them, the agent watches them to their end and shows their output.

A worker prints into its log file, and the agent reads that file. With a pipe, a worker would block or die if the agent
did not read.
"""

from __future__ import annotations

import asyncio
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

from holdfast.cluster import signals, stacks
from holdfast.cluster.events import Events
from holdfast.cluster.membership import GIVEN_UP
from holdfast.cluster.wire import Message
from holdfast.processes import is_stopped


@dataclass(kw_only=True)
class LocalWorker:
    """A worker as its agent knows it."""

    name: str
    incarnation: str  # random; tells its process from another of the same name
    slot: int  # its number among the agent's workers; a replacement gets the same
    lifeline: socket.socket  # to the worker; it closes when the worker ends
    log: Path  # file of its output
    pid: int | None = None  # None until the zygote has told it
    shown: int = 0  # bytes of its log already on the console
    error: Message | None = None  # the error that it has reported on its lifeline
    unread: str = ""  # the begin of a message on its lifeline
    orphan: bool = False  # the zygote that forked it has ended
    born: float = field(default_factory=time.monotonic)  # time of its start
    connected: bool = False  # it has reached the coordinator
    condemned: bool = False  # it is about to be killed, and writes its stacks

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped by a signal."""
        return self.pid is not None and is_stopped(self.pid)

    def kill(self) -> None:
        """Kill the worker's process."""
        if self.pid is not None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def ask_to_leave(self) -> None:
        """Ask the worker to leave at its next boundary."""
        try:
            self.lifeline.send(b"leave\n")
        except OSError:
            pass  # it is ending already


UNKILLABLE_SECONDS = 10.0  # after SIGKILL: a process that still exists is one that the kernel cannot end
LATE_SECONDS = 1.0  # after a lifeline has closed: a zygote that has not reported the exit code by then is hung

Ended = Callable[[LocalWorker, int, str], None]  # worker, exit code, cause
Reported = Callable[[LocalWorker, Message], None]  # worker, what it says of its leaving (``lifeline.report``)


class LocalWorkers:
    """Starts workers, shows their output with ``say``, and calls ``ended(worker, exit code, cause)`` for each.

    ``reported`` is called with what a worker says of its leaving.

    ``zygote``: the socket to a zygote that runs already; None: start one.
    """

    def __init__(
        self,
        *,
        log_dir: Path,
        zygote: socket.socket | None,
        events: Events,
        say: Callable[[str], None],
        ended: Ended,
        reported: Reported,
    ) -> None:
        self.alive: dict[str, LocalWorker] = {}
        self._log_dir = log_dir
        self._zygote = zygote if zygote is not None else start_zygote()
        self._zygote.setblocking(False)
        self._zygote_pid: int | None = None
        self._doomed = False  # the zygote was killed; what it is still sent would be lost
        self._orders: list[tuple[bytes, socket.socket]] = []  # orders for the zygote, with the workers' lifelines
        self._events = events
        self._kills: set[asyncio.Task[None]] = set()  # kills under way
        self._say = say
        self._ended = ended
        self._reported = reported

    def start(self, name: str, slot: int, *, command: list[str], module: bool, environment: dict[str, str]) -> None:
        """Have the zygote fork a worker that runs ``command`` with these further environment variables."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log = self._log_dir / f"worker-{name}.log"
        incarnation = environment["HOLDFAST_INCARNATION"]
        worker = LocalWorker(name=name, incarnation=incarnation, slot=slot, lifeline=ours, log=log)
        worker.shown = log.stat().st_size if log.exists() else 0
        self.alive[name] = worker
        order = {
            "worker": name,
            "log": str(log.absolute()),
            "folder": os.getcwd(),
            "module": module,
            "arguments": command,
            "environment": environment,
        }
        self._orders.append((json.dumps(order).encode(), theirs))
        self._send_orders()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear, worker)

    def _send_orders(self) -> None:
        """Send the zygote its orders; try again later if its socket is full, as while it imports torch."""
        while self._orders and not self._doomed:
            data, lifeline = self._orders[0]
            try:
                socket.send_fds(self._zygote, [data], [lifeline.fileno()])
            except BlockingIOError:
                asyncio.get_running_loop().call_later(0.02, self._send_orders)
                return
            except OSError:
                return  # the zygote has ended; the next one gets the orders
            lifeline.close()
            del self._orders[0]

    async def hear_zygote(self) -> None:
        """Take in the zygote's reports, for ever: each worker's pid and exit code. Start a new zygote if it ends."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._zygote, 2**16)
            except OSError:
                data = b""
            message = json.loads(data) if data else {}
            if not data:
                self._replace_zygote()
            elif "ready" in message:
                self._zygote_pid = message["ready"]
            elif "started" in message and message["started"] in self.alive:
                self.alive[message["started"]].pid = message["pid"]
            elif "exited" in message:
                self._exited(message["exited"], message["code"])

    def _replace_zygote(self) -> None:
        """Start a new zygote. The old one's workers live on, but nobody reports their exit codes."""
        self._events.write("zygote-restart")
        waiting = {json.loads(data)["worker"] for data, _ in self._orders}  # the new one forks them
        for worker in self.alive.values():
            worker.orphan = worker.orphan or worker.name not in waiting
        self._zygote = start_zygote()
        self._zygote.setblocking(False)
        self._zygote_pid, self._doomed = None, False
        self._send_orders()

    def _kill_zygote(self) -> None:
        """Kill a zygote that hangs, if its pid is known. ``hear_zygote`` starts another, which gets further orders."""
        if self._zygote_pid is not None and not self._doomed:
            self._doomed = True
            os.kill(self._zygote_pid, signal.SIGKILL)

    def _hear(self, worker: LocalWorker) -> None:
        """Take in a worker's error, or its reports. A closed lifeline means that the worker has ended."""
        try:
            data = worker.lifeline.recv(2**17)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take_in(worker, data.decode(errors="replace"))
            return
        asyncio.get_running_loop().remove_reader(worker.lifeline.fileno())
        # The zygote should report the exit code soon. If it does not, it has ended or hangs.
        wait = 0.0 if worker.orphan else LATE_SECONDS
        asyncio.get_running_loop().call_later(wait, self._unreported, worker)

    def _take_in(self, worker: LocalWorker, text: str) -> None:
        """Take in all messages that are whole by now: JSON objects, one after the other."""
        worker.unread += text
        while worker.unread:
            try:
                message, length = json.JSONDecoder().raw_decode(worker.unread)
            except ValueError:
                return  # the rest is still to come
            worker.unread = worker.unread[length:]
            if "connected" in message:
                worker.connected = True
            elif "report" in message:
                self._reported(worker, message)
            elif worker.error is None:  # a worker that is refused may tell it twice before it ends: the first counts
                worker.error = message

    def _unreported(self, worker: LocalWorker) -> None:
        """Count a worker as ended with code 1 if the zygote has not reported it; kill that zygote."""
        if self.alive.get(worker.name) is not worker:
            return
        if not worker.orphan:
            self._kill_zygote()
        worker.orphan = True
        self._remove(worker, 1, "ended; its zygote did not say how")

    def _exited(self, pid: int, code: int) -> None:
        worker = next((w for w in self.alive.values() if w.pid == pid), None)
        if worker is not None:
            self._hear(worker)
            if worker.condemned and code == GIVEN_UP:
                code = -signal.SIGKILL  # it was told before it was killed, but it hung: that is a failure
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self._remove(worker, code, cause)

    def _remove(self, worker: LocalWorker, code: int, cause: str) -> None:
        if self.alive.pop(worker.name, None) is not None:
            asyncio.get_running_loop().remove_reader(worker.lifeline.fileno())
            worker.lifeline.close()
            self._show(worker)
            self._ended(worker, code, cause)

    # --- hung workers ----------------------------------------------------------------------------

    @property
    def starting(self) -> dict[str, float]:
        """The workers that have not connected to the coordinator yet, and the seconds since their start."""
        now = time.monotonic()
        waiting = [w for w in self.alive.values() if not (w.connected or w.condemned)]
        return {worker.name: now - worker.born for worker in waiting}

    def kill_hung(self, worker: LocalWorker, cause: str, details: Message) -> None:
        """Have a hung worker write its stacks to its log, then kill it. ``details`` go into the event."""
        if not worker.condemned:
            self._show(worker)
            worker.condemned = True  # from here on its output is stacks, which are not for the console
            task = asyncio.create_task(self._kill_hung(worker, cause, details))
            self._kills.add(task)
            task.add_done_callback(self._kills.discard)

    async def _kill_hung(self, worker: LocalWorker, cause: str, details: Message) -> None:
        dump = "" if worker.pid is None else await stacks.ask(worker.pid, worker.log, why=cause)
        place = stacks.place_of(dump)
        log = worker.log.name if dump else None
        self._events.write("stuck", worker=worker.name, cause=cause, **details, log=log, at=place)
        where = f" at {place}" if place else ""
        seen = f"; its stacks are in {worker.log}" if dump else ""
        self._say(f"holdfast: worker {worker.name} is killed: {cause}{where}{seen}")
        worker.kill()
        if worker.pid is None:  # it has not been forked
            self._kill_zygote()
        asyncio.get_running_loop().call_later(UNKILLABLE_SECONDS, self._outlived, worker)

    def _outlived(self, worker: LocalWorker) -> None:
        """Count a killed worker as ended whose process still exists: the kernel waits for a dead disk in its name."""
        if self.alive.get(worker.name) is worker:
            self._remove(worker, -signal.SIGKILL, "killed, but its process does not end")

    # --- the workers' output ---------------------------------------------------------------------

    async def show_logs(self) -> None:
        """Show the workers' output as it comes, for ever."""
        while True:
            await asyncio.sleep(0.1)
            self.flush_logs()

    def flush_logs(self) -> None:
        """Show all whole lines that the workers have printed since the last time."""
        for worker in self.alive.values():
            self._show(worker)

    def _show(self, worker: LocalWorker) -> None:
        if worker.condemned or not worker.log.exists():
            return
        with worker.log.open("rb") as log:
            log.seek(worker.shown)
            data = log.read()
        whole, newline, _ = data.rpartition(b"\n")
        worker.shown += len(whole) + len(newline)
        hidden = worker.error is not None and worker.error.get("shown")  # the agent shows this error when it ends
        if newline and not hidden:
            for line in whole.decode(errors="replace").split("\n"):
                self._say(f"[{worker.name}] {line}")


def start_zygote() -> socket.socket:
    """Start a zygote; return the socket to it, which carries orders one way and reports the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "holdfast.cluster.zygote", str(theirs.fileno())]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Not waited for: it ends by itself when our end of the socket closes.
    with signals.held():
        subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours
