"""The seat: a worker's side of its talk with the coordinator, as a state machine without sockets, threads or clock.

``client.Client`` connects it to the agent, and the agent passes on what both sides say. Losing the coordinator loses
nothing: the agent remembers what it must know.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cluster import announce
from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Generation, Message, Standing


@dataclass(frozen=True, kw_only=True)
class Over:
    """A generation is over, whatever this worker is doing in it."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Next:
    """The next generation, which this worker is a member of."""

    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The coordinator ends this worker. ``waits``: it waits for a generation, and can be told there."""

    code: int
    message: str
    refused: bool  # it differs from the others, and never took part
    waits: bool


News = Over | Next | Stop


class Seat:
    """The state of a worker's talk with the coordinator: the standing it has shown, and what it was told.

    >>> seat = Seat(worker="0.0", host="0", label={"what": "a test"})
    >>> seat.show(Standing(operation=3))["generation"], seat.standing.operation
    ('', 3)
    >>> seat.hear({"type": "regroup", "number": 0})
    """

    def __init__(
        self, *, worker: str, host: str, label: Label, address: str = "", port: int = 0, incarnation: str = ""
    ) -> None:
        self.worker = worker
        self.generation: Generation | None = None
        self.standing: Standing | None = None  # shown and not yet answered by a generation
        self.leave = False  # this worker is asked to leave
        self.stopped: Stop | None = None
        self.doing: tuple[int, str] | None = None
        self.coordinator = ""  # where it was lost; "" while the agent is connected to it
        self.incarnation = incarnation
        self._who = {"worker": worker, "address": address, "port": port, "host": host, "incarnation": incarnation}
        self._label = label
        self._ended = 0  # the newest generation known to be over
        self._forming = False
        self._joiners = 0  # the generation that somebody waits to join

    @property
    def number(self) -> int:
        """The number of the newest generation that this worker was in; 0 before the first."""
        return 0 if self.generation is None else self.generation.number

    @property
    def _name(self) -> str:
        return "" if self.generation is None else self.generation.name

    # --- messages to the coordinator -------------------------------------------------------------

    def hello(self) -> Message:
        """Return this worker's first message."""
        return {"type": "came", **self._who, "label": self._label}

    def show(self, standing: Standing) -> Message:
        """Show a standing; the next generation answers it."""
        self.standing = standing
        return {"type": "standing", "generation": self._name, "standing": standing.to_json()}

    def follow(self, generation: Generation) -> None:
        """Take in the generation that the leader of this rank's team was told."""
        self.generation, self.standing, self.doing = generation, None, None
        self._forming = True

    def beat(self) -> Message:
        """Return the sign of life, with what this worker is doing, and in which generation."""
        return {"type": "beat", "doing": self.doing, "generation": self._name}

    def formed(self) -> None:
        """Note that the generation's members have met: from here on training can do without the coordinator."""
        self._forming = False

    def progressed(self, generation: Generation, operation: int) -> Message:
        """Tell that the first operation of a generation is committed."""
        return {"type": "progress", "generation": generation.name, "operation": operation}

    def finished(self) -> Message:
        """Tell that the script is over, and in which generation."""
        return {"type": "finished", "over": self.number}

    def wishes(self) -> tuple[bool, bool]:
        """Return (somebody waits to join, this worker is asked to leave)."""
        return (self._joiners == self.number, self.leave)

    # --- messages from the coordinator -----------------------------------------------------------

    def hear(self, message: Message) -> News | None:
        """Take in a message; return the news that this worker has to act on, or None."""
        kind = message["type"]
        if kind == "generation":
            self.generation = announce.heard(message, self.generation)
            self.standing = self.doing = None
            self._forming = True
            return Next(generation=self.generation)
        if kind == "regroup":
            return self._over(message["number"])
        if kind == "pause":
            self._joiners = message["number"]
        elif kind == "line":
            self.coordinator = message["lost"]
            # A generation that was forming is over: others may not have heard of it.
            return self._over(self.number) if self.coordinator and self._forming else None
        elif kind == "leave":
            self.leave = True
        elif kind == "stop":
            return self._stop(message)
        return None

    def _over(self, number: int) -> Over | None:
        if number <= self._ended:
            return None
        self._ended = number
        return Over(number=number)

    def _stop(self, message: Message) -> Stop:
        self.stopped = Stop(
            code=message["code"],
            message=message["message"],
            refused=message.get("refused", False),
            waits=self.standing is not None,
        )
        return self.stopped
