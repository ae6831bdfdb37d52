"""Messages between workers, agents and the coordinator: one JSON object a line, after a handshake.

``handshake`` has the proofs that open a connection, ``tls`` what encrypts it, ``gate`` the server's side. Messages are
JSON, not pickle: at worst a message carries a wrong value.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time

from holdfast.cluster import handshake, tls
from holdfast.cluster.handshake import NotHoldfast as NotHoldfast
from holdfast.cluster.handshake import Refused as Refused
from holdfast.cluster.handshake import new_token as new_token
from holdfast.cluster.membership import Message as Message
from holdfast.cluster.tls import TlsClient, TlsSettings

SERVER_LIMIT = 2**20  # bytes of a line that the coordinator reads from a peer that has proved itself
CLIENT_LIMIT = 16 * 2**20  # bytes of a line from a proven coordinator: a generation of thousands of workers fits
HANDSHAKE_SECONDS = 5.0  # for a whole handshake: a stranger must not hold a connection for longer
ADMITTED = b"\x06"  # the server's word that all is well, TLS included: from here on both sides send lines


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in a line. Raises ``ValueError`` on anything that is not one JSON object."""
    try:
        message = json.loads(line)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


async def connect(
    address: tuple[str, int], token: str, hello: Message, settings: TlsSettings | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open an authenticated connection, for asyncio code. Raises ``Refused``, ``NotHoldfast`` or another OSError.

    ``settings``: TLS, if the run has it.
    """
    context = None if settings is None else settings.client()
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(*address, limit=CLIENT_LIMIT)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await _prove(reader, writer, token, tls.mode(settings))
            if settings is not None and context is not None:
                await writer.start_tls(context, server_hostname=settings.name)
            writer.write(encode(hello))
            await reader.readexactly(len(ADMITTED))
    except (asyncio.IncompleteReadError, TimeoutError) as e:
        writer.close()
        raise NotHoldfast("no holdfast coordinator answers there") from e
    except ssl.SSLError as e:
        writer.close()
        raise tls.failure(e) from e
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, mode: int) -> None:
    """Do the client's side of the handshake."""
    nonce = handshake.new_nonce()
    writer.write(handshake.hello(mode, nonce))
    handshake.check_header(await reader.readexactly(handshake.HEADER_BYTES), mode)
    writer.write(handshake.prove(token, mode, nonce, await reader.readexactly(handshake.ANSWER_BYTES)))
    await writer.drain()


class Line:
    """An authenticated connection for a thread: blocking sends, and whole messages as they come.

    ``settings``: TLS, if the run has it. Raises ``Refused``, ``NotHoldfast`` or another OSError if it cannot be opened.
    """

    def __init__(
        self, address: tuple[str, int], token: str, hello: Message, settings: TlsSettings | None = None
    ) -> None:
        context = None if settings is None else settings.client()
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.socket = socket.create_connection(address, HANDSHAKE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()  # received and decrypted, but not yet a whole message
        self._tls: TlsClient | None = None
        try:
            self._prove(token, tls.mode(settings))
            if settings is not None and context is not None:
                self._encrypt(TlsClient(context, settings.name, self.socket.sendall))
            self.send(hello)
            self._exactly(len(ADMITTED))
            self.socket.settimeout(HANDSHAKE_SECONDS)  # for a send to a coordinator that does not read
        except ssl.SSLError as e:
            self.close()
            raise tls.failure(e) from e
        except BaseException:
            self.close()
            raise

    def _prove(self, token: str, mode: int) -> None:
        nonce = handshake.new_nonce()
        self._write(handshake.hello(mode, nonce))
        handshake.check_header(self._exactly(handshake.HEADER_BYTES), mode)
        self._write(handshake.prove(token, mode, nonce, self._exactly(handshake.ANSWER_BYTES)))

    def _encrypt(self, client: TlsClient) -> None:
        client.handshake(self._receive_in_time)
        self._tls = client
        self._take(b"")  # the server's first word may have come with the end of its handshake

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the connection is lost."""
        self._write(encode(message))

    def _write(self, data: bytes) -> None:
        if self._tls is None:
            self.socket.sendall(data)
        else:
            self._tls.write(data)

    def _exactly(self, size: int) -> bytes:
        """Return the next bytes of the handshake, and leave what follows them in the buffer."""
        while len(self._buffer) < size:
            self._take(self._receive_in_time())
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def _receive_in_time(self) -> bytes:
        """Receive something before the handshake's deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        self.socket.settimeout(left)
        return self._receive()

    def _receive(self) -> bytes:
        chunk = self.socket.recv(65536)
        if not chunk:
            raise ConnectionError("closed by the other side")
        return chunk

    def _take(self, chunk: bytes) -> None:
        self._buffer += chunk if self._tls is None else self._tls.read(chunk)

    def receive(self) -> list[Message]:
        """Read once; return the messages that are whole by then. Call it when the socket is readable."""
        self._take(self._receive())
        return self.waiting()

    def waiting(self) -> list[Message]:
        """Return the whole messages that are in the buffer, such as those that came with the handshake's last byte."""
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return [decode(line) for line in lines]

    def close(self) -> None:
        self.socket.close()
