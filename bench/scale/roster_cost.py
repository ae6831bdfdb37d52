"""What the begin of a run and a loss cost the coordinator with thousands of workers.

The roster and the desks are real, and connections are simulated. All messages are encoded and decoded as they are on
the wire. What sockets cost is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.cluster import wire
from holdfast.cluster.desk import COORDINATOR, Desk
from holdfast.cluster.generations import RosterSettings
from holdfast.cluster.membership import Message, Standing
from holdfast.cluster.register import EVENTS, HANG_UP, Sent
from holdfast.cluster.roster import Connected, Heard, Roster
from holdfast.commit.settle import Account, judge

LABEL = {"what": "a measurement"}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the coordinator has to do until the first commit: from the begin of a run, or from the report of a loss."""

    seconds: float  # of processor time
    messages: int
    bytes: int


class SimulatedCluster:
    """A roster, and the desks of ``workers`` workers, so many to a host. Only the coordinator's time is counted.

    Only the first desk is told what the coordinator says. The others would do the same with it, on machines of their
    own; what they send does not depend on it.
    """

    def __init__(self, workers: int, *, on_each_host: int) -> None:
        """Start all workers, and form their first generation; ``forming`` says what that costs the coordinator."""
        hosts = workers // on_each_host
        self._desks = [Desk(beat=1.0) for _ in range(hosts)]
        settings = RosterSettings(minimum_hosts=hosts, maximum_hosts=hosts, run="run", life="life")
        self._roster = Roster(settings, judge=judge, now=0.0)
        self.seconds, self.messages, self.bytes = 0.0, 0, 0
        self.names = [f"{host}.{n}" for host in range(hosts) for n in range(on_each_host)]
        for number, desk in enumerate(self._desks):
            hello = {"host": None, "agent": f"agent {number}", "slots": on_each_host, "begun": False, "run": False}
            hello |= {"finished": False, "over": 0, "stays": False} | desk.hello(0.0)
            self._step(number, wire.encode(hello), is_hello=True)
        for name in self.names:
            who = {"worker": name, "address": "10.0.0.1", "port": 40_000, "host": name.split(".")[0]}
            self._say(name, {"type": "came", **who, "incarnation": f"{name:>016}", "label": LABEL})
            self._show(name, Standing(boundary=True, payload=Account(units=1).to_json()), "")
        self._commit(1)
        self.forming = self._cost()

    def lose(self, name: str) -> Cost:
        """Lose a worker; return what it costs the coordinator until the others have committed again."""
        self.seconds, self.messages, self.bytes = 0.0, 0, 0
        self.names.remove(name)
        report = {"type": "exit", "worker": name, "incarnation": f"{name:>016}", "code": -9, "error": None}
        report |= {"cause": "killed by SIGKILL", "run": True, "finished": False}
        host = int(name.split(".")[0])
        self._desks[host].ended(name, report)
        self._step(host, wire.encode(report))
        generation = self._roster.generation
        assert generation is not None
        held = Account(units=1, held=(0,)).to_json()
        for other in self.names:
            self._show(other, Standing(operation=7, broken=True, payload=held), generation.name)
        self._commit(8)
        assert self._roster.generation is not None
        assert self._roster.generation.number == generation.number + 1
        return self._cost()

    def _commit(self, operation: int) -> None:
        """Let all workers commit an operation in the present generation."""
        generation = self._roster.generation
        assert generation is not None, "all have shown their standings"
        for name in self.names:
            self._say(name, {"type": "progress", "generation": generation.name, "operation": operation})

    def _cost(self) -> Cost:
        return Cost(seconds=self.seconds, messages=self.messages, bytes=self.bytes)

    def _show(self, name: str, standing: Standing, generation: str) -> None:
        self._say(name, {"type": "standing", "generation": generation, "standing": standing.to_json()})

    def _say(self, name: str, message: Message) -> None:
        host = int(name.split(".")[0])
        for recipient, said in self._desks[host].hear(name, message, 0.0):
            if recipient == COORDINATOR:
                self._step(host, wire.encode(said))

    def _step(self, host: int, line: bytes, *, is_hello: bool = False) -> None:
        """Let the coordinator take in a line; pass what it sends on to the desks."""
        begin = time.process_time()
        message = wire.decode(line)
        kind: Any = Connected(connection=host, hello=message) if is_hello else Heard(connection=host, message=message)
        sent = self._roster.step(kind, 1.0)
        encoded: dict[int, bytes] = {}
        for recipient, said in sent:
            if recipient != EVENTS and id(said) not in encoded:  # a message to many is encoded once
                encoded[id(said)] = wire.encode(said)
        self.seconds += time.process_time() - begin
        self.messages += 1
        self.bytes += len(line)
        self._deliver(sent, encoded)

    def _deliver(self, sent: Iterable[Sent], encoded: dict[int, bytes]) -> None:
        for recipient, said in sent:
            if recipient == EVENTS or said is HANG_UP:
                continue
            self.messages += 1
            self.bytes += len(encoded[id(said)])
            if recipient == 0:
                self._desks[recipient].take(wire.decode(encoded[id(said)]))


def measure(workers: int, *, on_each_host: int, rounds: int) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of several begins, and those of as many losses of the last run, one after the other."""
    begins = []
    for _ in range(rounds):
        cluster = SimulatedCluster(workers, on_each_host=on_each_host)
        begins.append(cluster.forming)
    step = max(1, workers // rounds)
    return begins, [cluster.lose(cluster.names[(n * step) % len(cluster.names)]) for n in range(rounds)]
