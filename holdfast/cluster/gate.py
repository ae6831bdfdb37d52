"""The gate: lets in those who prove the token at the door, and serves each as a stream of lines, with TLS if wanted.

``door`` has the strangers. TLS, which costs much more than a stranger does, begins after the proof.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

from holdfast.cluster import tls, wire
from holdfast.cluster.door import REST_SECONDS, Door

UPGRADES = 32  # TLS handshakes at a time, about 50 KiB and a millisecond of processor time each

Admitted = Callable[[asyncio.StreamReader, asyncio.StreamWriter, wire.Message], Awaitable[None]]


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
        self._settings = settings
        self._context = None if settings is None else settings.server()
        self._upgrades = asyncio.Semaphore(UPGRADES)
        self._tasks: set[asyncio.Task[None]] = set()  # of peers; the event loop itself keeps none alive

    async def __aenter__(self) -> Gate:
        self._loop = asyncio.get_running_loop()
        mode = tls.mode(self._settings)
        self.door = Door(self._listener, token=self._token, mode=mode, let_in=self._let_in, clock=self._loop.time)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._loop.add_reader(self.door.poll.fileno(), self.door.hear)
        self._sweep()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._loop.remove_reader(self.door.poll.fileno())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.door.close()

    def _accept(self) -> None:
        if not self.door.accept():
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(REST_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:  # else closed meanwhile
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(self.door.sweep(), self._sweep)

    # --- peers -----------------------------------------------------------------------------------

    def _let_in(self, connection: socket.socket) -> None:
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
