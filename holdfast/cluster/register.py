"""The register of the roster: the connected machines, and an outbox of messages to them. It has no sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.cluster.membership import Message

EVENTS = -1  # the recipient of lines for events.jsonl
HANG_UP: Message = {"type": "hang-up"}  # asks the coordinator to close the connection; it is not sent itself

Sent = tuple[int, Message]  # recipient (a connection's number, or EVENTS), message


@dataclass(kw_only=True)
class Host:
    """A connected agent."""

    connection: int  # number of its connection
    heard: float  # time of its last message
    number: int
    agent: str  # random; tells this agent from another that says the same number
    slots: int  # workers that it will have
    told: str = ""  # the name of the newest generation that it knows
    starting: dict[str, float] = field(default_factory=dict)  # its workers that have not come yet, and their age
    condemned: set[str] = field(default_factory=set)  # its workers that were sent away, hang, and are being killed


class Register:
    """Connected hosts by number and by connection, and the messages that wait to be sent.

    >>> register = Register()
    >>> register.add(Host(connection=7, heard=0.0, number=0, agent="", slots=2))
    >>> register.send_all(register.hosts.values(), {"type": "beat"})
    >>> register.take_out()
    [(7, {'type': 'beat'})]
    """

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}
        self.numbers: dict[str, int] = {}  # of the hosts, by agent
        self.slots = 0  # of all hosts
        self._by_connection: dict[int, Host] = {}
        self._out: list[Sent] = []

    def add(self, host: Host) -> None:
        """Enter a host. One with the same number has a new connection: its old one is not heard any more."""
        before = self.hosts.get(host.number)
        if before is not None:
            self._by_connection.pop(before.connection, None)
            self.retire(before)
        self._by_connection[host.connection] = host
        self.hosts[host.number] = host
        self.numbers[host.agent] = host.number
        self.slots += host.slots

    def resize(self, host: Host, slots: int) -> None:
        """Note that a host will have so many workers."""
        if self.hosts.get(host.number) is host:
            self.slots += slots - host.slots
        host.slots = slots

    def find(self, connection: int) -> Host | None:
        """Return who is on a connection; None if it was given up, or has a newer one."""
        return self._by_connection.get(connection)

    def remove(self, host: Host) -> None:
        """Strike a host out; what still comes on its connection is not heard."""
        self._by_connection.pop(host.connection, None)
        self.retire(host)

    def retire(self, host: Host) -> None:
        """Strike a host out, but keep its connection: it keeps the coordinator, and hears heartbeats and the end."""
        if self.hosts.get(host.number) is host:
            del self.hosts[host.number]
            self.numbers.pop(host.agent, None)
            self.slots -= host.slots

    @property
    def everybody(self) -> Iterable[Host]:
        """All hosts, those that are retired too."""
        return self._by_connection.values()

    def send(self, connection: int, message: Message) -> None:
        """Put a message for one connection into the outbox."""
        self._out.append((connection, message))

    def send_all(self, hosts: Iterable[Host], message: Message) -> None:
        """Put one message for several into the outbox: the same object, so that it is encoded once."""
        self._out += [(host.connection, message) for host in hosts]

    def hang_up(self, connection: int) -> None:
        """Have a connection closed at once."""
        self._out.append((connection, HANG_UP))

    def log(self, event: str, **fields: Any) -> None:
        """Put a line for events.jsonl into the outbox."""
        self._out.append((EVENTS, {"event": event, **fields}))

    def take_out(self) -> list[Sent]:
        """Empty the outbox: recipients and messages, in order."""
        out, self._out = self._out, []
        return out
