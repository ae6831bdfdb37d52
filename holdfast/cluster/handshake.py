"""The handshake of a control connection, as functions on bytes: both sides prove that they know the token.

::

    client -> server   magic (8), version (1), mode (1), nonce (32)
    server -> client   magic (8), version (1), mode (1), then if both agree: nonce (32), proof (32)
    client -> server   proof (32)

Every message has a fixed size, and the largest is 74 bytes. So a connection that has proved nothing costs the server
next to nothing, and no text of a stranger is ever parsed. The server proves itself first: a client tells nothing, not
even its proof, to a server that does not know the token. The token itself never crosses the wire. A proof is an HMAC
over both nonces, so a recorded one is useless on any other connection.
"""

from __future__ import annotations

import hmac
import secrets
import struct

VERSION = 2  # of the protocol; version 1 began with a line of JSON from the server
PLAIN = 0  # mode: messages follow as they are
TLS = 1  # mode: TLS follows, and the messages inside it
NONCE_BYTES = 32
PROOF_BYTES = 32  # of HMAC-SHA256
MINIMUM_TOKEN = 16  # characters: a server proves itself to strangers, who could try all short tokens at home

_MAGIC = b"HOLDFAST"
_HEADER = struct.Struct("!8sBB")  # magic, version, mode
HEADER_BYTES = _HEADER.size
HELLO_BYTES = HEADER_BYTES + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES  # after the header

SAME_VERSION = "install the same holdfast on every machine"
SAME_TOKEN = "set the same HOLDFAST_TOKEN, or --token-file, on every machine"
SAME_TLS = "give --tls-cert, --tls-key and --tls-ca on every machine, or on none"


class Refused(Exception):
    """Error: the two sides do not belong together. The text says why, ``hint`` what to do."""

    def __init__(self, message: str, *, hint: str = SAME_TOKEN) -> None:
        super().__init__(message)
        self.hint = hint


class NotHoldfast(ConnectionError):
    """Error: no coordinator answers at the address."""


def new_token() -> str:
    """Return a new random token of 256 bits."""
    return secrets.token_hex(32)


def new_nonce() -> bytes:
    """Return a new random nonce: bytes that no other connection has."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, side: str, mode: int, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that ``side`` ("client" or "server") knows the token and wants ``mode`` on this connection."""
    text = f"holdfast/{VERSION} {side} {mode} ".encode() + server_nonce + client_nonce
    return hmac.digest(token.encode(), text, "sha256")


def proves(shown: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one. It takes the same time for any that is not."""
    return hmac.compare_digest(shown, expected)


# --- the server's side ----------------------------------------------------------------------------


def answer(token: str, mode: int, hello: bytes, nonce: bytes) -> tuple[bytes, bytes | None]:
    """Return what the server sends for a client's first ``HELLO_BYTES``, and the proof that it expects then.

    No proof is expected of a client that cannot be served: it gets the header, which says why, or nothing at all.
    """
    magic, version, theirs = _HEADER.unpack_from(hello)
    if magic != _MAGIC:
        return b"", None
    header = _HEADER.pack(_MAGIC, VERSION, mode)
    if (version, theirs) != (VERSION, mode):
        return header, None
    client_nonce = hello[HEADER_BYTES:]
    shown = proof(token, "server", mode, nonce, client_nonce)
    return header + nonce + shown, proof(token, "client", mode, nonce, client_nonce)


# --- the client's side ----------------------------------------------------------------------------


def hello(mode: int, nonce: bytes) -> bytes:
    """Return the client's first message."""
    return _HEADER.pack(_MAGIC, VERSION, mode) + nonce


def check_header(header: bytes, mode: int) -> None:
    """Check the first ``HEADER_BYTES`` of the server's answer. Raises ``NotHoldfast``, or ``Refused`` with the reason.

    >>> check_header(b'{"holdfast', PLAIN)
    Traceback (most recent call last):
    holdfast.cluster.handshake.Refused: it speaks version 1 of the protocol, and this side version 2
    """
    magic, version, theirs = _HEADER.unpack(header)
    if header.startswith(b'{"holdfast'[:HEADER_BYTES]):  # as version 1 greets
        magic, version = _MAGIC, 1
    if magic != _MAGIC:
        raise NotHoldfast("no holdfast coordinator answers there")
    if version != VERSION:
        text = f"it speaks version {version} of the protocol, and this side version {VERSION}"
        raise Refused(text, hint=SAME_VERSION)
    if theirs != mode:
        text = "it wants TLS, and this side has none" if theirs == TLS else "it has no TLS, and this side wants it"
        raise Refused(text, hint=SAME_TLS)


def prove(token: str, mode: int, nonce: bytes, answered: bytes) -> bytes:
    """Check the rest of the server's answer, ``ANSWER_BYTES``; return the client's proof. Raises ``Refused``.

    ``nonce``: the one that the client has sent.
    """
    server_nonce, shown = answered[:NONCE_BYTES], answered[NONCE_BYTES:]
    if not proves(shown, proof(token, "server", mode, server_nonce, nonce)):
        raise Refused("the other side does not know the token")
    return proof(token, "client", mode, server_nonce, nonce)
