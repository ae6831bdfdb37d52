"""Carriers of bytes: a connected socket as it is, or with TLS on it. Neither ever blocks."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.cluster import wire
from holdfast.cluster.links.loop import READ, WRITE, Loop


class Carrier(Protocol):
    """A connection as an ``End`` uses it. ``send`` and ``recv_into`` raise ``BlockingIOError``, or another OSError."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...

    def send(self, parts: Sequence[memoryview]) -> int:
        """Send some of these bytes; return how many."""
        ...

    def recv_into(self, room: memoryview) -> int:
        """Fill some of this room; return how much, 0 at the end."""
        ...

    def has_more(self) -> bool:
        """Whether bytes are here already that the kernel does not tell of."""
        ...

    def close(self) -> None:
        """End the connection."""


class PlainCarrier:
    """A socket as it is."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, parts: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(parts)

    def recv_into(self, room: memoryview) -> int:
        return self._socket.recv_into(room)

    def has_more(self) -> bool:
        return False

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # at once, even if a forked child has a copy of it
        except OSError:
            pass
        self._socket.close()


class TlsCarrier(PlainCarrier):
    """A socket with TLS. OpenSSL takes one call at a time, and two threads use it: one sends, the other receives."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        super().__init__(connection)
        self._tls = connection
        self._lock = threading.Lock()

    def send(self, parts: Sequence[memoryview]) -> int:
        try:
            with self._lock:
                return self._tls.send(parts[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
            raise BlockingIOError from e

    def recv_into(self, room: memoryview) -> int:
        try:
            with self._lock:
                return self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
            raise BlockingIOError from e

    def has_more(self) -> bool:
        with self._lock:
            return self._tls.pending() > 0


def encrypt(
    loop: Loop,
    connection: socket.socket,
    context: ssl.SSLContext,
    *,
    server: bool,
    done: Callable[[Carrier], None],
    failed: Callable[[OSError], None],
) -> None:
    """Do one side of a TLS handshake, in the loop's thread; then call ``done`` with the carrier, or ``failed``.

    The server has a limit of time. A client waits: the other side may not have entered the generation yet.
    """
    try:
        tls = context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
    except OSError as e:
        connection.close()
        failed(e)
        return
    over = False

    def end() -> None:
        nonlocal over
        over = True
        loop.forget(tls.fileno())

    def go_on(what: int) -> None:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            loop.rewatch(tls.fileno(), READ)
        except ssl.SSLWantWriteError:
            loop.rewatch(tls.fileno(), WRITE)
        except OSError as e:
            end()
            tls.close()
            failed(e)
        else:
            end()
            done(TlsCarrier(tls))

    def too_long() -> None:
        if not over:
            end()
            tls.close()
            failed(TimeoutError("the TLS handshake took too long"))

    loop.watch(tls.fileno(), WRITE if not server else READ, go_on)
    if server:
        loop.later(wire.HANDSHAKE_SECONDS, too_long)
