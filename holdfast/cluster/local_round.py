"""An agent's part in the rounds of a script without a ``Run`` (``rounds.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.cluster.local import LocalWorker
from holdfast.cluster.wire import Message
from holdfast.processes import facts_of


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Who takes part in a round: what follows from it for RANK, WORLD_SIZE and MASTER_ADDR of its workers."""

    group_rank: int  # this agent's place among the agents
    groups: int  # agents that take part
    master: tuple[str, int]  # address and port that the script's rank 0 may listen on

    @staticmethod
    def of(message: Message, host: int) -> Lineup:
        """Read the lineup from the coordinator's order to start again."""
        hosts: list[int] = message["hosts"]
        master = (str(message["address"]), int(message["master_port"]))
        return Lineup(group_rank=hosts.index(host), groups=len(hosts), master=master)


@dataclass(kw_only=True)
class LocalRound:
    """The present round on this machine. ``tell`` sends a message to the coordinator, ``end`` kills a worker."""

    workers: dict[str, LocalWorker]  # those that are alive
    tell: Callable[[Message], None]
    end: Callable[[LocalWorker], None]
    describe: Callable[[], Message]  # what the coordinator has to know of this agent for the next round
    number: int = 0
    failed: list[tuple[LocalWorker, Message]] = field(default_factory=list)  # and the report of each
    done: bool = False  # all workers have ended well
    clearing: bool = False  # it is over, and what is left of it is killed
    _killed: set[str] = field(default_factory=set)  # by this agent, to clear the round

    def ended(self, worker: LocalWorker, code: int, report: Message) -> None:
        """Take in the end of a worker, and tell the coordinator."""
        report = report | {"finished": False, "round": self.number, "cleared": worker.name in self._killed}
        if code and worker.orphan and worker.finished:
            report |= {"code": 0, "cause": "its script is over"}  # it has said so; nobody has reported its exit code
        self.tell(report)
        if report["code"] and not report["cleared"]:
            self.failed.append((worker, report))
        self._look()

    def _look(self) -> None:
        """Tell the coordinator when all workers have ended: the round is cleared, or done."""
        if self.workers:
            return
        if self.clearing:
            self.tell({"type": "cleared", "round": self.number, **self.describe()})
        elif not self.failed:
            self.done = True
            self.tell({"type": "done", "round": self.number})

    def clear(self, number: int) -> None:
        """Kill what is left of a round that has failed, as the coordinator has ordered."""
        if number != self.number or self.clearing:
            return  # a message of old
        self.clearing, self.done = True, False
        for worker in self.workers.values():
            facts = None if worker.pid is None else facts_of(worker.pid)
            if facts is not None and facts.is_over:
                continue  # its end is about to be reported
            if facts is None or not facts.is_ending:  # else its end is its own, which others may have noticed first
                self._killed.add(worker.name)
            self.end(worker)
        self._look()

    def wait(self, number: int) -> None:
        """Wait for the round after this one, which has begun without this agent."""
        self.number, self.clearing = number, True
        self._look()

    def again(self, number: int) -> bool:
        """Begin the next round; return False if it has begun already."""
        if number <= self.number:
            return False
        self.number, self.clearing, self.done = number, False, False
        self.failed.clear()
        self._killed.clear()
        return True

    def repeat(self) -> None:
        """Tell a coordinator that may be a new one what its predecessor was told."""
        for _, report in self.failed:
            self.tell(report)
        if self.clearing or self.done:
            self._look()

    def take_failed(self) -> list[tuple[LocalWorker, str]]:
        """Return the workers that have failed, and why, and forget them: with a ``Run`` they are replaced."""
        found = [(worker, str(report["cause"])) for worker, report in self.failed]
        self.failed.clear()
        return found
