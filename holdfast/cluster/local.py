"""The workers of one machine: the zygote forks them, the agent watches them to their end and shows their output.

A worker may be a team: several processes, its ranks, which are lost together. As soon as one of them is killed, or ends
with an error, the others are killed, for they may wait for it in a collective for ever.

A worker prints into its log file, and the agent reads that file. With a pipe, a worker would block or die if the agent
did not read.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cluster import stacks
from holdfast.cluster.events import Events
from holdfast.cluster.lines import Lines
from holdfast.cluster.membership import ENDING_SECONDS, GIVEN_UP
from holdfast.cluster.wire import Message
from holdfast.cluster.zygote_keeper import ZygoteKeeper
from holdfast.processes import facts_of, is_stopped


@dataclass(kw_only=True)
class LocalWorker:
    """A worker as its agent knows it. Of a team it is one rank, and the first rank stands for the whole team."""

    name: str  # of the worker: all ranks of a team have the same
    incarnation: str  # random; tells its process from another of the same name
    slot: int  # its number among the agent's workers; a replacement gets the same
    host: str  # its failure domain
    lifeline: Lines  # to the worker; it closes when the worker ends
    log: Path  # file of its output
    pid: int | None = None  # None until the zygote has told it
    shown: int = 0  # bytes of its log already on the console
    error: Message | None = None  # the error that it has reported on its lifeline
    failed: float = math.inf  # when it has reported it
    orphan: bool = False  # the zygote that forked it has ended
    born: float = field(default_factory=time.monotonic)  # time of its start
    connected: bool = False  # it takes part in the run
    has_run: bool = False  # its script has made a ``Run``
    finished: bool = False  # its script is over, as it has said
    condemned: bool = False  # it is about to be killed, and writes its stacks
    unwanted: bool = False  # it was killed, or will be as soon as its pid is known
    rank: int = 0  # in its team
    team: list[LocalWorker] = field(default_factory=list, repr=False)  # all ranks; empty: it is no team
    end: tuple[int, str] | None = None  # exit code and cause, once its process has ended

    @property
    def label(self) -> str:
        """The name of its process."""
        return f"{self.name}.{self.rank}" if self.team else self.name

    @property
    def leader(self) -> LocalWorker:
        """The rank that stands for the team."""
        return self.team[0] if self.team else self

    @property
    def processes(self) -> list[LocalWorker]:
        """What it stands for and has not ended: all ranks of a team, or itself."""
        whole = self.team if self.team and not self.rank else [self]
        return [each for each in whole if each.end is None]

    @property
    def is_stopped(self) -> bool:
        """Whether a process of it is stopped by a signal."""
        return any(each.pid is not None and is_stopped(each.pid) for each in self.processes)

    def kill(self) -> None:
        """Kill the worker, all of a team."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send the worker a signal, all of a team."""
        for each in self.processes:
            if each.pid is not None:
                try:
                    os.kill(each.pid, number)
                except ProcessLookupError:
                    pass

    def tell(self, message: Message) -> None:
        """Tell the worker something. One that does not read, as it is stopped, is told when it does.

        All ranks of a team hear it, but for generations: the leader tells the others those.
        """
        for each in self.processes:
            if each is self or message["type"] != "generation":
                each._tell(message)

    def _tell(self, message: Message) -> None:
        if not self.lifeline.send(message):
            asyncio.get_running_loop().add_writer(self.lifeline.socket.fileno(), self._flush)

    def _flush(self) -> None:
        if self.lifeline.flush():
            asyncio.get_running_loop().remove_writer(self.lifeline.socket.fileno())

    def hang_up(self) -> None:
        """Close the lifeline of a worker that has ended."""
        loop, number = asyncio.get_running_loop(), self.lifeline.socket.fileno()
        loop.remove_reader(number)
        loop.remove_writer(number)
        self.lifeline.socket.close()


LOCAL_RANK = "${local_rank}"  # torchrun's macro, in a script's arguments
UNKILLABLE_SECONDS = 10.0  # after SIGKILL: a process that still exists is one that the kernel cannot end
LATE_SECONDS = 1.0  # after a lifeline has closed: a zygote that has not reported the exit code by then is hung

Ended = Callable[[LocalWorker, int, str], None]  # worker, exit code, cause
Reported = Callable[[LocalWorker, Message], None]  # worker, what it says of itself (``lifeline.report``)
Said = Callable[[LocalWorker, Message], None]  # worker, what it says to the coordinator (``seat.Seat``)


class LocalWorkers:
    """Starts workers, shows their output with ``say``, and calls ``ended(worker, exit code, cause)`` for each.

    ``hidden``: slots whose output stays in their logs. ``reported`` is called with what a worker says of itself,
    ``said`` with what it says to the coordinator.
    """

    def __init__(
        self,
        *,
        log_dir: Path,
        zygote: ZygoteKeeper,
        events: Events,
        say: Callable[[str], None],
        ended: Ended,
        reported: Reported,
        said: Said,
        hidden: Collection[int] = (),
    ) -> None:
        self.alive: dict[str, LocalWorker] = {}  # by name; of a team its leader
        self._processes: dict[str, LocalWorker] = {}  # by label; all ranks
        self._log_dir, self._hidden = log_dir, hidden
        self._zygote = zygote
        self._events = events
        self._kills: set[asyncio.Task[None]] = set()  # kills under way
        self._say = say
        self._ended = ended
        self._reported, self._said = reported, said

    def start(
        self,
        name: str,
        slot: int,
        *,
        command: list[str],
        module: bool,
        environment: Mapping[str, str],
        ranks: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Have the zygote fork a worker that runs ``command`` with these further environment variables.

        ``ranks``: of a team, those of each rank in addition.
        """
        team: list[LocalWorker] = []
        for rank, own in enumerate(ranks or [{}]):
            ours, theirs = socket.socketpair()
            label = f"{name}.{rank}" if ranks else name
            worker = LocalWorker(
                name=name,
                incarnation=environment["HOLDFAST_INCARNATION"],
                slot=slot,
                host=environment.get("HOLDFAST_HOST", ""),
                lifeline=Lines(ours),
                log=self._log_dir / f"worker-{label}.log",
                rank=rank,
            )
            if ranks:
                team.append(worker)
                worker.team = team
            worker.shown = worker.log.stat().st_size if worker.log.exists() else 0
            self.alive[name] = worker.leader
            self._processes[label] = worker
            order = {
                "worker": label,
                "log": str(worker.log.absolute()),
                "folder": os.getcwd(),
                "module": module,
                "arguments": [word.replace(LOCAL_RANK, own.get("LOCAL_RANK", str(slot))) for word in command],
                "environment": {**environment, **own},
            }
            self._zygote.order(order, theirs)
            asyncio.get_running_loop().add_reader(ours.fileno(), self._hear, worker)

    async def hear_zygote(self) -> None:
        """Take in the zygote's reports, for ever. Raises ``UsageError`` if it cannot import what it should."""
        await self._zygote.hear(started=self._started, exited=self._exited, replaced=self._orphaned)

    def _started(self, label: str, pid: int) -> None:
        if (worker := self._processes.get(label)) is not None:
            worker.pid = pid
            if worker.unwanted:
                worker.kill()
            place = {"rank": worker.rank} if worker.team else {}
            self._events.write("started", worker=worker.name, slot=worker.slot, host=worker.host, pid=pid, **place)

    def _orphaned(self, waiting: Collection[str]) -> None:
        """Note that the zygote has ended: of its workers, all but those that the next one forks are orphans."""
        for label, worker in self._processes.items():
            worker.orphan = worker.orphan or label not in waiting

    def _hear(self, worker: LocalWorker) -> None:
        """Take in a worker's error, or its reports. A closed lifeline means that the worker has ended."""
        try:
            for message in worker.lifeline.receive():
                self._take_in(worker, message)
            return
        except EOFError:
            asyncio.get_running_loop().remove_reader(worker.lifeline.socket.fileno())
        # The zygote should report the exit code soon. If it does not, it has ended or hangs.
        wait = 0.0 if worker.orphan else LATE_SECONDS
        asyncio.get_running_loop().call_later(wait, self._unreported, worker)

    def _take_in(self, worker: LocalWorker, message: Message) -> None:
        if "report" in message:
            if not worker.rank or message["report"] == "run":  # what a team does, its leader says
                self._reported(worker.leader, message)
        elif "error" in message:
            if worker.error is None:  # a worker that is refused may tell it twice before it ends: the first counts
                worker.error, worker.failed = message["error"], time.monotonic()
        elif worker.name in self.alive:
            worker.connected = True
            self._said(worker, message)

    def _unreported(self, worker: LocalWorker) -> None:
        """Count a worker as ended with code 1 if the zygote has not reported it; kill that zygote."""
        if self._processes.get(worker.label) is not worker:
            return
        if not worker.orphan:
            self._zygote.kill()
        worker.orphan = True
        self._remove(worker, 1, "ended; its zygote did not say how")

    def _exited(self, pid: int, code: int) -> None:
        worker = next((w for w in self._processes.values() if w.pid == pid), None)
        if worker is not None:
            self._hear_last(worker)
            if worker.condemned and code == GIVEN_UP:
                code = -signal.SIGKILL  # it was told before it was killed, but it hung: that is a failure
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self._remove(worker, code, cause)

    def _hear_last(self, worker: LocalWorker) -> None:
        """Read all that a worker has said before its end."""
        try:
            while messages := worker.lifeline.receive():
                for message in messages:
                    self._take_in(worker, message)
        except EOFError:
            pass

    def _remove(self, worker: LocalWorker, code: int, cause: str) -> None:
        """Take in the end of a process. A team has ended when all of its ranks have."""
        if self._processes.pop(worker.label, None) is None:
            return
        worker.hang_up()
        self._show(worker)
        worker.end = (code, cause)
        leader = worker.leader
        if leader.processes:
            if code < 0 or worker.error is not None:
                self._end_mates(leader)
            elif code:  # all are sent away, and complete what they write
                asyncio.get_running_loop().call_later(ENDING_SECONDS, self._end_mates, leader)
            return
        del self.alive[worker.name]
        if worker.team:
            code, cause = end_of_team(worker.team)
        self._ended(leader, code, cause)

    def _end_mates(self, leader: LocalWorker) -> None:
        """Kill what is left of a team of which one rank is lost."""
        for mate in leader.processes:
            facts = None if mate.pid is None else facts_of(mate.pid)
            if facts is not None and (facts.is_over or facts.is_ending):
                continue  # its end is its own, and is about to be reported
            self._end_process(mate)

    def end(self, worker: LocalWorker) -> None:
        """Kill a worker, at once or as soon as it is forked; it counts as ended even if the kernel cannot end it."""
        for each in worker.processes:
            self._end_process(each)

    def _end_process(self, worker: LocalWorker) -> None:
        worker.unwanted = True
        if worker.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(UNKILLABLE_SECONDS, self._outlived, worker)

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
            for each in worker.processes:
                each.condemned = True
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
        mates = worker.processes
        worker.kill()
        if worker.pid is None:  # it has not been forked
            self._zygote.kill()
        for each in mates:
            asyncio.get_running_loop().call_later(UNKILLABLE_SECONDS, self._outlived, each)

    def _outlived(self, worker: LocalWorker) -> None:
        """Count a killed worker as ended whose process still exists: the kernel waits for a dead disk in its name."""
        if self._processes.get(worker.label) is worker:
            self._remove(worker, -signal.SIGKILL, "killed, but its process does not end")

    # --- the workers' output ---------------------------------------------------------------------

    async def show_logs(self) -> None:
        """Show the workers' output as it comes, for ever."""
        while True:
            await asyncio.sleep(0.1)
            self.flush_logs()

    def flush_logs(self) -> None:
        """Show all whole lines that the workers have printed since the last time."""
        for worker in self._processes.values():
            self._show(worker)

    def _show(self, worker: LocalWorker) -> None:
        if worker.condemned or not worker.log.exists():
            return
        end = None if worker.error is None else worker.error.get("shown_from")
        with worker.log.open("rb") as log:
            log.seek(worker.shown)
            # From ``end`` on it is the error, which the agent shows when it ends.
            data = log.read() if end is None else log.read(max(0, end - worker.shown))
        whole, newline, _ = data.rpartition(b"\n")
        worker.shown += len(whole) + len(newline)
        if newline and worker.slot not in self._hidden:
            for line in whole.decode(errors="replace").split("\n"):
                self._say(f"[{worker.label}] {line}")


def end_of_team(team: Sequence[LocalWorker]) -> tuple[int, str]:
    """Return exit code and cause of a team whose ranks have all ended; its leader gets the error that has ended it.

    Whoever was killed from outside is the cause: the errors of its mates follow from that. Else it is the error that
    came first, and one that is final for the run before others.
    """
    leader = team[0]
    leader.orphan = any(each.orphan for each in team)
    ends = [(each, *each.end) for each in team if each.end is not None]
    killed = [(each, code, cause) for each, code, cause in ends if code < 0 and not each.unwanted]
    failed = [(each, code, cause) for each, code, cause in ends if code > 0]
    failed.sort(key=lambda end: (not (end[0].error or {}).get("final"), end[0].failed))
    if not killed and not failed:
        return next(((code, cause) for _, code, cause in ends if code), (0, ends[0][2]))
    rank, code, cause = (killed or failed)[0]
    leader.error = None if killed else rank.error
    leader.unwanted = False
    return code, f"its rank {rank.rank} was lost ({cause})"
