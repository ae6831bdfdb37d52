"""The hub: the port at which other workers reach this one, and the thread that serves all connections to them.

There is one in each worker, from its start to its end. Generations come and go: each has its own connections
(``Links``), so nothing of an old one can reach a new one.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections import deque

from holdfast.cluster import silence, tls
from holdfast.cluster.door import REST_SECONDS, Door
from holdfast.cluster.links.call import CARD_BYTES, Key, read_card
from holdfast.cluster.links.loop import READ, Loop
from holdfast.cluster.links.member_links import Links, LinkSettings
from holdfast.cluster.membership import Generation

BACKLOG = 4096  # calls that the kernel keeps until they are accepted: all of a large run's workers may call at once
ENDED = 64  # generations that are remembered to be over: newer ones tell it of those before
PARKED = 4096  # connections that wait for this worker to enter their generation
CLOSE_SECONDS = 0.1  # to close all connections; the kernel does it later if the thread is busy for longer


class Hub:
    """Takes calls at ``port``, and makes the links of a generation.

    ``address``: of this machine, as the other workers reach it.
    """

    def __init__(self, address: str, settings: LinkSettings) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._settings = settings
        self.loop = Loop("holdfast-hub")
        self._door = Door(
            self._listener,
            token=settings.token,
            mode=tls.mode(settings.tls),
            let_in=self._let_in,
            clock=time.monotonic,
        )
        self._open: dict[Key, Links] = {}
        self._ended: deque[Key] = deque(maxlen=ENDED)  # generations that were entered and left
        self._parked: dict[tuple[Key, int], socket.socket] = {}  # calls for generations that are not entered yet
        self._accept_again()
        self.loop.watch(self._door.poll.fileno(), READ, lambda what: self._door.hear())
        self.loop.later(self._door.sweep(), self._sweep)
        self.loop.later(silence.pause(settings.heartbeat), self._look_for_vanished)
        self.loop.start()

    def links(self, generation: Generation, worker: str) -> Links:
        """Return the links of this worker in a generation. They connect when they are first used."""
        key = key_of(generation)
        links = Links(
            self.loop,
            key=key,
            members=generation.members,
            rank=generation.rank_of(worker),
            settings=self._settings,
            over=lambda: self._forget(key),
        )
        self.loop.call(lambda: self._enter(key, links))
        return links

    def close(self) -> None:
        """End all connections, and the thread."""
        self.loop.call(self._close)
        self.loop.stop()

    def close_before_exit(self) -> None:
        """End all connections, and wait a moment until they are. The process ends next.

        The kernel takes a process's memory down before it closes its connections: with torch that is tens of ms, on
        which all others would wait.
        """
        self.close()
        self.loop.join(CLOSE_SECONDS)

    # --- in the loop's thread --------------------------------------------------------------------

    def _enter(self, key: Key, links: Links) -> None:
        """Give the links of a generation the calls that came before this worker had heard of it."""
        if links.is_over:
            self._forget(key)
            return
        self._open[key] = links
        for wanted, rank in list(self._parked):
            if wanted == key:
                links.take_call(rank, self._parked.pop((wanted, rank)))
            elif wanted.number < key.number:
                self._parked.pop((wanted, rank)).close()

    def _forget(self, key: Key) -> None:
        self._open.pop(key, None)
        self._ended.append(key)

    def _accept(self, what: int) -> None:
        if not self._door.accept():
            self.loop.forget(self._listener.fileno())
            self.loop.later(REST_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        self.loop.watch(self._listener.fileno(), READ, self._accept)

    def _sweep(self) -> None:
        self.loop.later(self._door.sweep(), self._sweep)

    def _let_in(self, connection: socket.socket) -> None:
        """Wait for the card of a caller that has proved itself. It has been sent with the proof."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        heard = bytearray()

        def ready(what: int) -> None:
            try:
                data = connection.recv(CARD_BYTES - len(heard))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            heard.extend(data)
            if not data or len(heard) == CARD_BYTES:
                self.loop.forget(connection.fileno())
                self._called(connection, bytes(heard))

        self.loop.watch(connection.fileno(), READ, ready)

    def _called(self, connection: socket.socket, heard: bytes) -> None:
        """Give a connection to the generation that it is for; keep it if that one is still to come."""
        if len(heard) < CARD_BYTES:
            connection.close()
            return
        key, rank = read_card(heard)
        if key in self._open:
            self._open[key].take_call(rank, connection)
        elif key in self._ended or any(known.number > key.number for known in self._open):
            connection.close()  # that generation is over, which the caller learns by this
        else:
            if len(self._parked) >= PARKED:
                self._parked.pop(next(iter(self._parked))).close()
            self._parked[key, rank] = connection

    def _look_for_vanished(self) -> None:
        for links in list(self._open.values()):
            links.look_for_vanished()
        self.loop.later(silence.pause(self._settings.heartbeat), self._look_for_vanished)

    def _close(self) -> None:
        for links in list(self._open.values()):
            links.close("this worker ends")
        for connection in self._parked.values():
            connection.close()
        self.loop.forget(self._listener.fileno())
        self._door.close()


def key_of(generation: Generation) -> Key:
    """Return the name of a generation on the wire."""
    name = f"{generation.run} {generation.name}".encode()
    return Key(generation.number, hashlib.blake2b(name, digest_size=8).digest())
