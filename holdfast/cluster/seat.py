"""The seat: a worker's side of the protocol with the coordinator, as a state machine without sockets, threads or clock.

``client.Client`` connects it. Losing the coordinator loses nothing: the hello of the next connection repeats all that
the coordinator must know.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Generation, Message, Standing


@dataclass(frozen=True, kw_only=True)
class Over:
    """A generation is over, whatever this worker is doing in it."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Value:
    """A member of a generation has put something into its store."""

    generation: int
    key: str
    value: bytes


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


News = Over | Value | Next | Stop


class Seat:
    """The state of a worker's talk with the coordinator: the standing it has shown, and what it was told.

    >>> seat = Seat(worker="0.0", address="127.0.0.1", host="0", label={"what": "a test"})
    >>> seat.show(Standing(operation=3))["generation"], seat.hello()["standing"]["operation"]
    ('', 3)
    >>> seat.hear({"type": "regroup", "number": 0})
    """

    def __init__(self, *, worker: str, address: str, host: str, label: Label, incarnation: str = "") -> None:
        self.worker = worker
        self.generation: Generation | None = None
        self.standing: Standing | None = None  # shown and not yet answered by a generation
        self.leave = False  # this worker is asked to leave
        self.stopped: Stop | None = None
        self.doing: tuple[int, str] | None = None
        self._who = {"role": "worker", "worker": worker, "address": address, "label": label, "host": host}
        self._who["incarnation"] = self.incarnation = incarnation
        self._ended = 0  # the newest generation known to be over
        self._forming = False
        self._finished = False
        self._committed = False
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
        """Return the first message on a new connection, with everything that the coordinator must know."""
        return {
            **self._who,
            "generation": None if self.generation is None else self.generation.to_json(),
            "standing": None if self.standing is None else self.standing.to_json(),
            "finished": self._finished,
            "committed": self._committed,
        }

    def show(self, standing: Standing) -> Message:
        """Show a standing; the next generation answers it."""
        self.standing = standing
        return {"type": "standing", "generation": self._name, "standing": standing.to_json()}

    def put(self, generation: Generation, key: str, value: bytes) -> Message:
        """Return the message that puts a value into the store of a generation."""
        return {"type": "store", "generation": generation.name, "key": key, "value": base64.b64encode(value).decode()}

    def beat(self) -> Message:
        """Return the sign of life, with what this worker is doing."""
        return {"type": "beat", "doing": self.doing}

    def formed(self) -> None:
        """Note that the generation's group stands: from here on training can do without the coordinator."""
        self._forming = False

    def progressed(self, generation: Generation, operation: int) -> Message:
        """Note and tell that the first operation of a generation is committed."""
        self._committed = True
        return {"type": "progress", "generation": generation.name, "operation": operation}

    def finished(self) -> Message:
        """Note and tell that the script is over."""
        self._finished = True
        return {"type": "finished"}

    def wishes(self) -> tuple[bool, bool]:
        """Return (somebody waits to join, this worker is asked to leave)."""
        return (self._joiners == self.number, self.leave)

    # --- messages from the coordinator -----------------------------------------------------------

    def hear(self, message: Message) -> News | None:
        """Take in a message of the coordinator; return the news that this worker has to act on, or None."""
        kind = message["type"]
        if kind == "generation":
            self.generation = Generation.from_json(message["generation"])
            self.standing = None
            self._forming = True
            return Next(generation=self.generation)
        if kind == "store" and message["generation"] == self._name:
            return Value(generation=self.number, key=message["key"], value=base64.b64decode(message["value"]))
        if kind == "regroup":
            return self._over(message["number"])
        if kind == "pause":
            self._joiners = message["number"]
        if kind == "stop":
            return self._stop(message)
        return None

    def disconnected(self) -> Over | None:
        """Note that the connection is lost. A generation that was forming is over: addresses may be missing."""
        return self._over(self.number) if self._forming else None

    def _over(self, number: int) -> Over | None:
        if number <= self._ended:
            return None
        self._ended = number
        return Over(number=number)

    def _stop(self, message: dict[str, Any]) -> Stop:
        self.stopped = Stop(
            code=message["code"],
            message=message["message"],
            refused=bool(message.get("refused")),
            waits=self.standing is not None,
        )
        return self.stopped
