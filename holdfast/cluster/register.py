"""The register of the roster: the connected peers, and an outbox of messages to them. It has no sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Message, Standing
from holdfast.cluster.pulse import Still

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
    starting: dict[str, float] = field(default_factory=dict)  # its workers that have not connected, and their age


@dataclass(kw_only=True)
class Worker:
    """A connected worker."""

    connection: int  # number of its connection
    heard: float  # time of its last message
    name: str
    address: str  # of its machine, for the other workers
    incarnation: str  # random; tells its process from another of the same name
    label: Label  # facts about the training that must be the same on all workers
    host: str  # its failure domain
    fresh: bool  # it has never been in a generation
    standing: Standing | None = None  # None while it trains
    doing: tuple[int, str] | None = None  # the number of its next operation, and what it is
    still: Still | None = None  # for how long its training thread shows no sign of progress


Peer = Host | Worker


class Register:
    """Connected hosts and workers by name and by connection, and the messages that wait to be sent.

    >>> register = Register()
    >>> register.add(Host(connection=7, heard=0.0, number=0, agent="", slots=2))
    >>> register.send_all(register.hosts.values(), {"type": "beat"})
    >>> register.take_out()
    [(7, {'type': 'beat'})]
    """

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}
        self.workers: dict[str, Worker] = {}
        self._peers: dict[int, Peer] = {}
        self._out: list[Sent] = []

    def add(self, peer: Peer) -> None:
        """Enter a peer. One of the same name has a new connection: its old one is not heard any more."""
        before = self.hosts.get(peer.number) if isinstance(peer, Host) else self.workers.get(peer.name)
        if before is not None:
            self._peers.pop(before.connection, None)
        self._peers[peer.connection] = peer
        if isinstance(peer, Host):
            self.hosts[peer.number] = peer
        else:
            self.workers[peer.name] = peer

    def find(self, connection: int) -> Peer | None:
        """Return who is on a connection; None if it was given up, or has a newer one."""
        return self._peers.get(connection)

    def remove(self, peer: Peer) -> None:
        """Strike a peer out; what still comes on its connection is not heard."""
        self._peers.pop(peer.connection, None)
        if isinstance(peer, Host):
            self.hosts.pop(peer.number, None)
        else:
            self.workers.pop(peer.name, None)

    def retire(self, host: Host) -> None:
        """Strike a host out, but keep its connection: it keeps the coordinator, and hears heartbeats and the end."""
        self.hosts.pop(host.number, None)

    @property
    def everybody(self) -> Iterable[Peer]:
        """All hosts and workers."""
        return self._peers.values()

    def send(self, connection: int, message: Message) -> None:
        """Put a message for one connection into the outbox."""
        self._out.append((connection, message))

    def send_all(self, peers: Iterable[Peer], message: Message) -> None:
        """Put one message for several into the outbox: the same object, so that it is encoded once."""
        self._out += [(peer.connection, message) for peer in peers]

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
