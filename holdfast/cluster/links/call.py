"""A call: this worker connects to another one, proves the token, and says for which generation it calls."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.cluster import handshake, wire
from holdfast.cluster.links.loop import READ, WRITE, Loop

RETRY_SECONDS = 0.05  # after a call that nobody took
REFUSED_SECONDS = 1.0  # of refusals in a row: a worker that lives takes calls, so a firewall refuses them

_CARD = struct.Struct("!Q8sI")  # generation's number, a digest of its name, the caller's rank
CARD_BYTES = _CARD.size


@dataclass(frozen=True)
class Key:
    """The name of a generation on the wire: no two generations have the same."""

    number: int
    digest: bytes  # 8 bytes


def card(key: Key, rank: int) -> bytes:
    """Return what a caller says after its proof."""
    return _CARD.pack(key.number, key.digest, rank)


def read_card(data: bytes) -> tuple[Key, int]:
    """Read what ``card`` has made.

    >>> read_card(card(Key(3, b"12345678"), 1))
    (Key(number=3, digest=b'12345678'), 1)
    """
    number, digest, rank = _CARD.unpack(data)
    return Key(number, digest), rank


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A call that has failed for good, and why."""

    reason: str
    is_refused: bool = False  # the machine answers, and refuses


class Call:
    """Calls an address until somebody takes the call, in the loop's thread.

    ``mode``: of the handshake. ``taken(socket)`` gets the connection. ``failed`` is told if the machine does not answer
    for ``patience`` seconds, refuses for ``REFUSED_SECONDS``, or does not know the token.
    """

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        *,
        token: str,
        mode: int,
        card: bytes,
        patience: float,
        taken: Callable[[socket.socket], None],
        failed: Callable[[Unanswered], None],
    ) -> None:
        self._loop, self._address, self._token, self._card = loop, address, token, card
        self._mode, self._patience, self._taken, self._failed = mode, patience, taken, failed
        self._socket: socket.socket | None = None
        self._nonce = b""
        self._heard = b""  # of the other side's answer
        self._attempt = 0
        self._over = False
        self._silent_since: float | None = None  # since when the machine has not answered
        self._refused_since: float | None = None
        self._try()

    def cancel(self) -> None:
        """Stop calling."""
        self._over = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _try(self) -> None:
        if self._over:
            return
        self._attempt += 1
        self._heard = b""
        try:
            self._socket = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        except OSError:  # this process, or its machine, has no descriptor left: the other side has done nothing wrong
            self._loop.later(RETRY_SECONDS, self._try)
            return
        self._silent_since = self._silent_since or time.monotonic()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = self._socket.connect_ex(self._address)
        if error not in (0, errno.EINPROGRESS):
            self._missed(error)
            return
        self._loop.watch(self._socket.fileno(), WRITE, self._connected)
        number = self._attempt
        self._loop.later(min(self._patience, wire.HANDSHAKE_SECONDS), lambda: self._too_long(number))

    def _connected(self, what: int) -> None:
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._missed(error)
            return
        self._silent_since = self._refused_since = None
        self._nonce = handshake.new_nonce()
        self._loop.forget(self._socket.fileno())
        self._loop.watch(self._socket.fileno(), READ, self._answered)
        self._say(handshake.hello(self._mode, self._nonce))

    def _answered(self, what: int) -> None:
        assert self._socket is not None
        whole = handshake.HEADER_BYTES + handshake.ANSWER_BYTES
        try:
            data = self._socket.recv(whole - len(self._heard))
        except BlockingIOError:
            return
        except OSError as e:
            self._missed(e.errno or 0)
            return
        self._heard += data
        if not data:
            self._hung_up_on()
        elif len(self._heard) == whole:
            self._prove()

    def _hung_up_on(self) -> None:
        """Take in that the other side has closed the connection. A header alone says why it refuses."""
        try:
            if len(self._heard) == handshake.HEADER_BYTES:
                handshake.check_header(self._heard, self._mode)
        except (handshake.Refused, handshake.NotHoldfast) as e:
            self._give_up(Unanswered(reason=str(e)))
            return
        self._missed(0)

    def _prove(self) -> None:
        """Check the other side's proof, and give our own."""
        header, rest = self._heard[: handshake.HEADER_BYTES], self._heard[handshake.HEADER_BYTES :]
        try:
            handshake.check_header(header, self._mode)
            shown = handshake.prove(self._token, self._mode, self._nonce, rest)
        except (handshake.Refused, handshake.NotHoldfast) as e:
            self._give_up(Unanswered(reason=str(e)))
            return
        if self._say(shown + self._card):
            assert self._socket is not None
            connection, self._socket, self._over = self._socket, None, True
            self._loop.forget(connection.fileno())
            self._taken(connection)

    def _say(self, words: bytes) -> bool:
        """Send a few bytes, which fit into the empty buffer of a new connection; return whether that worked."""
        assert self._socket is not None
        try:
            self._socket.sendall(words)
            return True
        except OSError as e:
            self._missed(e.errno or 0)
            return False

    def _too_long(self, number: int) -> None:
        """Look at an attempt some time after its begin: it should be over."""
        if not self._over and number == self._attempt and self._socket is not None:
            self._missed(errno.ETIMEDOUT)

    def _missed(self, error: int) -> None:
        """Decide what follows an attempt that has failed: another one, or the end."""
        self._hang_up()
        now = time.monotonic()
        if error == errno.ECONNREFUSED:
            self._silent_since = None
            self._refused_since = self._refused_since or now
        if self._silent_since is not None and now - self._silent_since >= self._patience:
            self._give_up(Unanswered(reason=f"it does not answer for {self._patience:g} s"))
        elif self._refused_since is not None and now - self._refused_since >= REFUSED_SECONDS:
            self._give_up(Unanswered(reason="its machine refuses connections", is_refused=True))
        else:
            self._loop.later(RETRY_SECONDS, self._try)

    def _give_up(self, why: Unanswered) -> None:
        self._over = True
        self._hang_up()
        self._failed(why)
