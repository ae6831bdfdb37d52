"""Messages between workers, agents and the coordinator: one JSON object a line, after a handshake.

The token itself never crosses the wire. Each side proves that it knows it by an HMAC over both sides' nonces, compared
in constant time, so a stranger can neither join nor pose as the coordinator. Messages are JSON, not pickle: at worst a
message carries a wrong value.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket

from holdfast.cluster.membership import Message as Message

SERVER_LIMIT = 2**20  # bytes of a line that the coordinator reads: the most that a stranger can make it hold
CLIENT_LIMIT = 16 * 2**20  # bytes of a line from a proven coordinator: a generation of thousands of workers fits
HANDSHAKE_SECONDS = 5.0  # for each message of the handshake: a stranger must not hold a connection for longer


class Refused(Exception):
    """Error: the other side does not know the token, or refuses this one. The text says why."""


class NotHoldfast(ConnectionError):
    """Error: no coordinator answers at the address."""


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in a line. Raises ``ValueError`` on anything that is not one JSON object."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def new_token() -> str:
    """Return a new random token of 256 bits."""
    return secrets.token_hex(32)


def proof(token: str, side: str, server_nonce: str, client_nonce: str) -> str:
    """Return the proof that ``side`` ("client" or "server") knows the token. It is useless on other connections."""
    text = f"holdfast/1 {side} {server_nonce} {client_nonce}".encode()
    return hmac.new(token.encode(), text, "sha256").hexdigest()


def proves(token: str, message: Message, side: str, server_nonce: str, client_nonce: str) -> bool:
    """Whether a message carries the right proof of ``side``."""
    shown = message.get("proof")
    expected = proof(token, side, server_nonce, client_nonce)
    return isinstance(shown, str) and hmac.compare_digest(shown.encode(), expected.encode())


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Message:
    """Do the server's side of the handshake; return the client's hello. Raises ``Refused``."""
    nonce = secrets.token_hex(16)
    writer.write(encode({"holdfast": 1, "nonce": nonce}))
    try:
        line = await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS)
        answer = decode(line)
        client_nonce, hello = answer["nonce"], answer["hello"]
        if not isinstance(client_nonce, str) or not isinstance(hello, dict):
            raise Refused("no handshake")
        proved = proves(token, answer, "client", nonce, client_nonce)
    except (ValueError, KeyError, TypeError, OSError, TimeoutError, RecursionError) as e:
        raise Refused("no handshake") from e
    if not proved:
        writer.write(encode({"refused": "wrong token"}))
        raise Refused("wrong token")
    writer.write(encode({"proof": proof(token, "server", nonce, client_nonce)}))
    return hello


def greet(greeting: Message, token: str, hello: Message) -> tuple[Message, str]:
    """Return the client's answer to the server's greeting, and its nonce."""
    nonce = secrets.token_hex(16)
    server_nonce = str(greeting.get("nonce"))
    return {"nonce": nonce, "proof": proof(token, "client", server_nonce, nonce), "hello": hello}, nonce


def check_server(greeting: Message, answer: Message, token: str, nonce: str) -> None:
    """Raise ``Refused`` if the server refuses this client, or does not prove that it knows the token."""
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    if not proves(token, answer, "server", str(greeting.get("nonce")), nonce):
        raise Refused("the other side does not know the token")


async def connect(
    address: tuple[str, int], token: str, hello: Message
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open an authenticated connection, for asyncio code. Raises ``Refused``, ``NotHoldfast`` or another OSError."""
    reader, writer = await asyncio.open_connection(*address, limit=CLIENT_LIMIT)
    try:
        greeting = decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS))
        answer, nonce = greet(greeting, token, hello)
        writer.write(encode(answer))
        reply = decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS))
        check_server(greeting, reply, token, nonce)
    except (ValueError, TimeoutError) as e:
        writer.close()
        raise NotHoldfast("no holdfast coordinator answers there") from e
    except BaseException:
        writer.close()
        raise
    return reader, writer


class Line:
    """An authenticated connection for a thread: blocking sends, and whole messages as they come.

    Raises ``Refused``, ``NotHoldfast`` or another OSError if it cannot be opened.
    """

    def __init__(self, address: tuple[str, int], token: str, hello: Message) -> None:
        self.socket = socket.create_connection(address, HANDSHAKE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        try:
            greeting = self._one()
            answer, nonce = greet(greeting, token, hello)
            self.send(answer)
            check_server(greeting, self._one(), token, nonce)
        except ValueError as e:
            self.close()
            raise NotHoldfast("no holdfast coordinator answers there") from e
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the connection is lost."""
        self.socket.sendall(encode(message))

    def _one(self) -> Message:
        while b"\n" not in self._buffer:
            if len(self._buffer) > SERVER_LIMIT:
                raise ValueError("too long for a handshake")
            self._fill()
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return decode(line)

    def _fill(self) -> None:
        chunk = self.socket.recv(65536)
        if not chunk:
            raise ConnectionError("closed by the other side")
        self._buffer += chunk

    def receive(self) -> list[Message]:
        """Read once; return the messages that are whole by then. Call it when the socket is readable."""
        self._fill()
        return self.waiting()

    def waiting(self) -> list[Message]:
        """Return the whole messages that are in the buffer, such as those that came with the handshake's last line."""
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return [decode(line) for line in lines]

    def close(self) -> None:
        self.socket.close()
