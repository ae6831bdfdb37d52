"""The desk: an agent's part in the talk between its workers and the coordinator, without sockets and clock.

Workers have no connection to the coordinator. What they say goes through their agent, and what the coordinator says to
a machine goes to those of its workers whom it concerns. The desk remembers what a new coordinator has to know, so the
hello of the agent's next connection tells everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.cluster import announce
from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Generation, Message

COORDINATOR = ""  # the recipient of messages to it; the others are workers' names
SLEPT = 2.0  # beats without a beat after which this agent must have been stopped, or was without a coordinator

Out = tuple[str, Message]  # recipient, message


@dataclass(kw_only=True)
class _Customer:
    """A worker of this machine that takes part in the run."""

    who: Message  # its name, address and so on, as it has said
    label: Label
    heard: float  # when it has last shown a sign of life
    generation: Generation | None = None  # the newest one that it was told
    standing: Message | None = None  # as it has shown it, until a generation answers
    doing: Any = None
    still: Any = None
    mates: dict[int, float] = field(default_factory=dict)  # when each further rank of a team has last shown life

    @property
    def oldest(self) -> float:
        """When the rank that is silent for longest has last shown a sign of life."""
        return min(self.heard, *self.mates.values()) if self.mates else self.heard

    @property
    def name(self) -> str:
        """The name of that generation; "" before the first."""
        return "" if self.generation is None else self.generation.name


class Desk:
    """Takes in what workers and the coordinator say; returns what is to be passed on, and to whom.

    ``beat``: seconds between two heartbeats of the coordinator.

    >>> desk = Desk(beat=1.0)
    >>> desk.hear("0.0", {"type": "came", "worker": "0.0", "port": 7, "label": {}}, now=0.0)[0][1]["type"]
    'came'
    >>> desk.take({"type": "stop", "code": 3, "message": "too few"})
    [('0.0', {'type': 'stop', 'code': 3, 'message': 'too few'})]
    """

    def __init__(self, *, beat: float) -> None:
        self.generation: Generation | None = None  # the newest that the coordinator has told
        self._customers: dict[str, _Customer] = {}
        self._exits: dict[str, Message] = {}  # reports of members that have ended since that generation
        self._progressed = ""  # the generation whose first commit was told
        self._committed = False  # a worker here has committed something
        self._lost = ""  # where the coordinator was lost; "" while there is one
        self._beat, self._looked = beat, 0.0

    # --- workers ---------------------------------------------------------------------------------

    def hear(self, worker: str, message: Message, now: float) -> list[Out]:
        """Take in what a worker says."""
        kind = message["type"]
        if kind == "came":
            who = {name: value for name, value in message.items() if name not in ("type", "label")}
            self._customers[worker] = _Customer(who=who, label=message["label"], heard=now)
            told = {"type": "came", "worker": self._record(worker, now) | {"label": message["label"]}}
            return [(COORDINATOR, told), *self._say_whether_lost([worker])]
        customer = self._customers.get(worker)
        if customer is None:
            return []  # it has said bye, and is about to end
        customer.heard = now
        if kind == "beat":
            late = message.get("generation", customer.name) != customer.name  # said before it heard of this generation
            customer.doing, customer.still = None if late else message["doing"], message.get("still")
            return []
        if kind == "standing":
            customer.standing = message
        elif kind == "bye":
            del self._customers[worker]
        elif kind == "progress":
            self._committed = True
            if self._progressed == message["generation"]:
                return []  # one of a machine's workers is enough
            self._progressed = message["generation"]
        return [(COORDINATOR, message | {"worker": worker})]

    def mate(self, worker: str, rank: int, now: float) -> None:
        """Take in a sign of life of a further rank of a team: its leader alone speaks to the coordinator."""
        if (customer := self._customers.get(worker)) is not None:
            customer.mates[rank] = now

    def ended(self, worker: str, report: Message) -> None:
        """Take in that a worker's process has ended, and what the coordinator is told of it."""
        customer = self._customers.pop(worker, None)
        if customer is not None and customer.generation is not None:
            self._exits[worker] = report

    def is_known(self, worker: str) -> bool:
        """Whether a worker has come so far that it takes part."""
        return worker in self._customers

    # --- the coordinator -------------------------------------------------------------------------

    def hello(self, now: float) -> Message:
        """Return what a coordinator has to know of this machine's workers, for the agent's hello."""
        labels: list[Label] = []
        workers = []
        for name, customer in self._customers.items():
            if customer.label not in labels:  # they are large, and nearly always the same
                labels.append(customer.label)
            workers.append(self._record(name, now) | {"label": labels.index(customer.label)})
        known = self.generation
        return {
            "generation": None if known is None else {"number": known.number, "run": known.run, "life": known.life},
            "labels": labels,
            "workers": workers,
            "exits": list(self._exits.values()),
            "committed": self._committed,
        }

    def _record(self, worker: str, now: float) -> Message:
        customer = self._customers[worker]
        known = customer.generation
        facts = {"generation": "" if known is None else known.name, "standing": customer.standing}
        return customer.who | facts | {"silent": now - customer.oldest}

    def take(self, message: Message) -> list[Out]:
        """Take in what the coordinator says; return what concerns workers.

        Raises ``ValueError`` if it builds on something that was never told here.
        """
        kind = message["type"]
        if kind == "generation":
            return self._begin(message)
        if kind == "dismiss":
            told = {"type": "stop", **{name: message[name] for name in ("code", "message", "refused")}}
            return [(message["worker"], told)] if message["worker"] in self._customers else []
        if kind in ("regroup", "pause"):
            members = [n for n, c in self._customers.items() if c.generation is not None]
            return [(name, message) for name in members]
        if kind == "recall" and self.generation is not None:
            return [(COORDINATOR, {"type": "recalled", "generation": announce.announce(self.generation, None)})]
        if kind == "stop":
            return [(name, message) for name in self._customers]
        return []

    def _begin(self, message: Message) -> list[Out]:
        """Tell a generation to its members here: those who know what it builds on, as it came; the others all of it."""
        before, self.generation = self.generation, announce.heard(message, self.generation)
        members = {*self.generation.workers}
        self._exits = {name: report for name, report in self._exits.items() if name in members}
        whole: Message | None = None
        told = []
        for name, customer in self._customers.items():
            if name not in members:
                continue
            if not message["base"] or customer.generation is before:
                told.append((name, message))
            else:
                whole = whole or announce.announce(self.generation, None)
                told.append((name, whole))
            customer.generation, customer.standing, customer.doing = self.generation, None, None
        return told

    def beat(self, now: float) -> Message:
        """Return what the coordinator is told with each heartbeat: what workers do, and for how long each is silent.

        A look that comes late says that this agent itself did not run: nobody's silence counts then.
        """
        if now - self._looked > SLEPT * self._beat:
            for customer in self._customers.values():
                customer.heard = max(customer.heard, now)
                customer.mates = dict.fromkeys(customer.mates, now)
        self._looked = now
        return {
            name: {
                "doing": customer.doing,
                "still": customer.still,
                "silent": now - customer.oldest,
                "generation": customer.name,
            }
            for name, customer in self._customers.items()
        }

    def line(self, lost: str) -> list[Out]:
        """Take in that the coordinator was lost, at this address, or that there is one again ("")."""
        if lost == self._lost:
            return []
        self._lost = lost
        return self._say_whether_lost(list(self._customers), always=True)

    def _say_whether_lost(self, workers: list[str], *, always: bool = False) -> list[Out]:
        return [(name, {"type": "line", "lost": self._lost}) for name in workers] if self._lost or always else []
