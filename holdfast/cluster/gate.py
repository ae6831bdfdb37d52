"""The gate: accepts connections, and lets in those that prove the token. Everybody else is a stranger.

A stranger costs less than 1 KiB here: a socket, at most 42 received bytes and a nonce. There is no stream, task, timer
or JSON before the proof. Strangers have ``wire.HANDSHAKE_SECONDS`` in all. When there are too many, the oldest goes: a
peer proves itself within two round trips, so strangers cannot keep it out by waiting. TLS, which costs much more,
begins after the proof.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
from collections.abc import Awaitable, Callable

from holdfast.cluster import descriptors, handshake, tls, wire

STRANGERS = 4096  # connections without a proof at a time, in all less than 4 MiB
SHARE = 4  # strangers get at most one in so many of this process's descriptors
BATCH = 64  # connections accepted, or heard, before the event loop serves the peers again
UPGRADES = 32  # TLS handshakes at a time, about 50 KiB and a millisecond of processor time each
REST_SECONDS = 0.05  # without accepting, when the system has no descriptor left that a stranger could give back

Admitted = Callable[[asyncio.StreamReader, asyncio.StreamWriter, wire.Message], Awaitable[None]]


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
        """The bytes that are missing of its message. No more are read: what follows is not for the gate."""
        whole = handshake.HELLO_BYTES if self.expected is None else handshake.PROOF_BYTES
        return whole - len(self.got)


class Gate:
    """Serves a listening socket inside ``async with``. Awaits ``admitted(reader, writer, hello)`` for each peer.

    The peer's connection is closed when ``admitted`` returns. ``settings``: TLS, if the run has it.
    """

    def __init__(
        self, listener: socket.socket, *, token: str, admitted: Admitted, settings: tls.TlsSettings | None = None
    ) -> None:
        self._listener = listener
        self._token = token
        self._admitted = admitted
        self._mode = tls.mode(settings)
        self._settings = settings
        self._context = None if settings is None else settings.server()
        self._most = min(STRANGERS, descriptors.raise_limit() // SHARE)
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first
        self._upgrades = asyncio.Semaphore(UPGRADES)
        self._tasks: set[asyncio.Task[None]] = set()  # of peers; the event loop itself keeps none alive

    async def __aenter__(self) -> Gate:
        self._loop = asyncio.get_running_loop()
        self._poll = select.epoll()  # for all strangers together: asyncio's own entry for a socket is larger than ours
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._loop.add_reader(self._poll.fileno(), self._hear)
        self._timer = self._loop.call_later(wire.HANDSHAKE_SECONDS, self._sweep)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._loop.remove_reader(self._poll.fileno())
        for number in list(self._strangers):
            self._drop(number)
        self._poll.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    # --- strangers -------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept what waits, at most ``BATCH``. If there are too many strangers, drop the oldest ones."""
        for _ in range(BATCH):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room()
                return
            connection.setblocking(False)
            if len(self._strangers) >= self._most:
                self._drop(next(iter(self._strangers)))
            deadline = self._loop.time() + wire.HANDSHAKE_SECONDS
            self._strangers[connection.fileno()] = _Stranger(connection, deadline)
            self._poll.register(connection, select.EPOLLIN)

    def _make_room(self) -> None:
        """Give the oldest stranger's descriptor back; without strangers, stop accepting for a moment."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
            return
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(REST_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:  # else closed meanwhile
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _hear(self) -> None:
        for number, _ in self._poll.poll(0, BATCH):
            stranger = self._strangers[number]
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
                self._let_in(stranger.socket)
                return True
            return False
        said, stranger.expected = handshake.answer(self._token, self._mode, got, handshake.new_nonce())
        try:
            whole = stranger.socket.send(said) == len(said)  # it is the first that is sent: it fits
        except OSError:
            return False
        return whole and stranger.expected is not None

    def _sweep(self) -> None:
        """Drop strangers whose time is up. The oldest come first."""
        now = self._loop.time()
        for number, stranger in list(self._strangers.items()):
            if stranger.deadline > now:
                break
            self._drop(number)
        self._timer = self._loop.call_later(wire.HANDSHAKE_SECONDS / 4, self._sweep)

    def _forget(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        return self._strangers.pop(number).socket

    def _drop(self, number: int) -> None:
        self._forget(number).close()

    # --- peers -----------------------------------------------------------------------------------

    def _let_in(self, connection: socket.socket) -> None:
        self._forget(connection.fileno())
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve a peer that knows the token: TLS if the run has it, its hello, and all that follows."""
        try:
            reader, writer = await self._streams(connection)
        except (OSError, TimeoutError):
            connection.close()
            return
        try:
            hello = await self._hello(reader, writer)
            if hello is not None:
                await self._admitted(reader, writer, hello)
        finally:
            writer.close()

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> wire.Message | None:
        """Return a peer's first message; None if it has gone, or says nothing that could be understood."""
        writer.write(wire.ADMITTED)
        try:
            async with asyncio.timeout(wire.HANDSHAKE_SECONDS):
                return wire.decode(await reader.readline())
        except (OSError, ValueError, TimeoutError):
            return None

    async def _streams(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(limit=wire.SERVER_LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        if self._context is None:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection)
        else:
            async with self._upgrades:
                self._renew_context()
                transport = await self._upgrade(connection, protocol, self._context)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    def _renew_context(self) -> None:
        """Read the certificates again, which may have been renewed; keep the old ones if that is just happening."""
        assert self._settings is not None
        try:
            self._context = self._settings.server()
        except OSError:
            pass

    async def _upgrade(
        self, connection: socket.socket, protocol: asyncio.Protocol, context: ssl.SSLContext
    ) -> asyncio.Transport:
        """Do the server's side of TLS. Raises OSError; the client is told why its certificate is not accepted."""
        with connection.dup() as kept:  # asyncio closes the connection when TLS fails, before the alert is sent
            try:
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=context, ssl_handshake_timeout=wire.HANDSHAKE_SECONDS
                )
            except ssl.SSLError as e:
                await self._explain(kept, getattr(e, "alert", b""))
                raise
        return transport

    async def _explain(self, connection: socket.socket, alert: bytes) -> None:
        """Send an alert, and wait until it was read: a connection closed with unread bytes would lose it."""
        try:
            async with asyncio.timeout(1.0):
                await self._loop.sock_sendall(connection, alert)
                connection.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(connection, 4096):
                    pass
        except (OSError, TimeoutError):
            pass
