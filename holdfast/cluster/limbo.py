"""The limbo: agents whose workers are in a generation that the roster does not know yet.

One of them is asked for it, as it may be large. Nobody of them is entered before the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.cluster.membership import Message


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An agent that is not entered yet: its hello, and what it has said since."""

    hello: Message
    said: list[Message] = field(default_factory=list)

    @property
    def known(self) -> tuple[str, int]:
        """The run and the number of the generation that it knows."""
        return self.hello["generation"]["run"], self.hello["generation"]["number"]


class Limbo:
    """Those who wait, by connection, and which of them was asked.

    >>> limbo = Limbo()
    >>> for connection, number in ((4, 7), (5, 8)):
    ...     limbo.add(connection, {"generation": {"run": "run", "number": number}})
    >>> limbo.ask(0.0), limbo.ask(1.0), limbo.overdue(6.0, 5.0)
    (5, None, 5)
    >>> limbo.remove(5)
    >>> limbo.ask(6.0)
    4
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._asked: tuple[int, float] | None = None  # which of them was asked, and when

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, connection: int) -> bool:
        return connection in self._waiting

    @property
    def all(self) -> list[tuple[int, Waiting]]:
        """Those who wait, with their connections, in the order in which they came."""
        return list(self._waiting.items())

    def add(self, connection: int, hello: Message) -> None:
        """Let an agent wait."""
        self._waiting[connection] = Waiting(hello=hello)

    def keep(self, connection: int, message: Message) -> None:
        """Keep what an agent says until it is entered."""
        self._waiting[connection].said.append(message)

    def remove(self, connection: int) -> None:
        """Let an agent wait no longer. If it was asked, another one may be."""
        del self._waiting[connection]
        self.answered(connection)

    def answered(self, connection: int) -> None:
        """Note that an agent has answered, if it was asked."""
        if self._asked is not None and self._asked[0] == connection:
            self._asked = None

    def ask(self, now: float) -> int | None:
        """Return whom to ask now: one who knows the newest generation, unless one was asked."""
        if self._asked is not None or not self._waiting:
            return None
        newest = max(self._waiting, key=lambda number: self._waiting[number].known[1])
        self._asked = (newest, now)
        return newest

    def overdue(self, now: float, timeout: float) -> int | None:
        """Return who was asked and has not answered within the timeout."""
        return self._asked[0] if self._asked is not None and now - self._asked[1] > timeout else None
