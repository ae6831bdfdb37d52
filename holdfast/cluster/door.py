"""The door: a listening socket, and the strangers before it. Who proves that it knows the token is let in.

A stranger costs less than 1 KiB here: a socket, at most 42 received bytes and a nonce. There is no stream, task, timer
or JSON before the proof. Strangers have ``wire.HANDSHAKE_SECONDS`` in all. When there are too many, the oldest goes: a
peer proves itself within two round trips, so strangers cannot keep it out by waiting.

The door has no thread and no event loop. Its owner calls ``accept`` when the listener is readable, ``hear`` when
``poll`` is, and ``sweep`` from time to time.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable

from holdfast.cluster import descriptors, handshake, wire

STRANGERS = 4096  # connections without a proof at a time, in all less than 4 MiB
SHARE = 4  # strangers get at most one in so many of this process's descriptors
BATCH = 64  # connections accepted, or heard, before the owner serves the peers again
REST_SECONDS = 0.05  # without accepting, when the system has no descriptor left that a stranger could give back
SWEEPS = 4  # within the time that a stranger has

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Stranger:
    """A connection that has not proved anything yet."""

    __slots__ = ("deadline", "expected", "got", "socket")

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.socket = connection
        self.deadline = deadline
        self.got = b""  # received of the message that it is sending
        self.expected: bytes | None = None  # its proof, once the server has answered its hello

    @property
    def wanted(self) -> int:
        """The bytes that are missing of its message. No more are read: what follows is not for the door."""
        whole = handshake.HELLO_BYTES if self.expected is None else handshake.PROOF_BYTES
        return whole - len(self.got)


class Door:
    """Calls ``let_in(socket)`` for each connection that has proved the token. The socket does not block.

    ``mode``: of the handshake. ``clock``: seconds, as the owner counts them.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        mode: int,
        let_in: Callable[[socket.socket], None],
        clock: Callable[[], float],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._token, self._mode = listener, token, mode
        self._let_in, self._clock = let_in, clock
        self._most = min(STRANGERS, descriptors.raise_limit() // SHARE)
        self.strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first
        self.poll = select.epoll()  # for all strangers together

    def close(self) -> None:
        """Close the strangers' connections, and stop listening."""
        for number in list(self.strangers):
            self._drop(number)
        self.poll.close()
        self._listener.close()

    def accept(self) -> bool:
        """Accept what waits, at most ``BATCH``. Returns False if the owner should not ask for ``REST_SECONDS``.

        If there are too many strangers, the oldest ones go.
        """
        for _ in range(BATCH):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError as e:
                return e.errno not in _FULL or self._make_room()
            connection.setblocking(False)
            if len(self.strangers) >= self._most:
                self._make_room()
            deadline = self._clock() + wire.HANDSHAKE_SECONDS
            self.strangers[connection.fileno()] = _Stranger(connection, deadline)
            self.poll.register(connection, select.EPOLLIN)
        return True

    def _make_room(self) -> bool:
        """Give the oldest stranger's descriptor back; return False if there is none."""
        if not self.strangers:
            return False
        self._drop(next(iter(self.strangers)))
        return True

    def hear(self) -> None:
        """Take in what strangers have sent, at most of ``BATCH``."""
        for number, _ in self.poll.poll(0, BATCH):
            stranger = self.strangers[number]
            try:
                data = stranger.socket.recv(stranger.wanted)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data or not self._take(stranger, data):
                self._drop(number)

    def _take(self, stranger: _Stranger, data: bytes) -> bool:
        """Take in what a stranger has sent. Returns whether it may go on; if it has proved itself, it has gone on."""
        stranger.got += data
        if stranger.wanted:
            return True
        got, stranger.got = stranger.got, b""
        if stranger.expected is not None:
            if handshake.proves(got, stranger.expected):
                self._let_in(self._forget(stranger.socket.fileno()))
                return True
            return False
        said, stranger.expected = handshake.answer(self._token, self._mode, got, handshake.new_nonce())
        try:
            whole = stranger.socket.send(said) == len(said)  # it is the first that is sent: it fits
        except OSError:
            return False
        return whole and stranger.expected is not None

    def sweep(self) -> float:
        """Drop strangers whose time is up; return the seconds until the next sweep."""
        now = self._clock()
        for number, stranger in list(self.strangers.items()):
            if stranger.deadline > now:
                break  # the oldest come first
            self._drop(number)
        return wire.HANDSHAKE_SECONDS / SWEEPS

    def _forget(self, number: int) -> socket.socket:
        self.poll.unregister(number)
        return self.strangers.pop(number).socket

    def _drop(self, number: int) -> None:
        self._forget(number).close()
