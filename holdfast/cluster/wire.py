"""Messages between workers, agents and the coordinator: one JSON object a line, after a handshake.

``handshake`` has the proofs that open a connection, ``tls`` what encrypts it, ``gate`` the server's side. Messages are
JSON, not pickle: at worst a message carries a wrong value.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable

from holdfast.cluster import handshake, tls
from holdfast.cluster.handshake import NotHoldfast as NotHoldfast
from holdfast.cluster.handshake import Refused as Refused
from holdfast.cluster.handshake import new_token as new_token
from holdfast.cluster.membership import Message as Message
from holdfast.cluster.tls import TlsSettings

SERVER_LIMIT = 16 * 2**20  # bytes of a line that the coordinator reads from a proven agent: a generation fits
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
    address: tuple[str, int], token: str, hello: Callable[[], Message], settings: TlsSettings | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open an authenticated connection. Raises ``Refused``, ``NotHoldfast`` or another OSError.

    ``hello`` is called when the other side has proved itself: a handshake takes time. ``settings``: TLS, if the run
    has it.
    """
    context = None if settings is None else settings.client()
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(*address, limit=CLIENT_LIMIT)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await _prove(reader, writer, token, tls.mode(settings))
            if settings is not None and context is not None:
                await writer.start_tls(context, server_hostname=settings.name or address[0])
            writer.write(encode(hello()))
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
