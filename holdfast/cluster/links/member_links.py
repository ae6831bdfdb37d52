"""The links of one worker in one generation: to each other member a connection, made when it is first needed.

Of two members the one with the higher rank calls. Both may send and receive before the connection is there.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.cluster import handshake, silence, tls
from holdfast.cluster.links.call import Call, Key, Unanswered, card
from holdfast.cluster.links.carrier import Carrier, PlainCarrier, encrypt
from holdfast.cluster.links.end import End
from holdfast.cluster.links.frames import Receive
from holdfast.cluster.links.loop import Loop
from holdfast.cluster.membership import Member
from holdfast.cluster.tls import TlsSettings


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How workers of a run reach each other."""

    token: str  # secret of the run
    heartbeat: float  # seconds after which a machine that does not answer counts as gone
    tls: TlsSettings | None = None  # None: tensors are not encrypted


class Links:
    """Sends tensors to members by rank, and receives them. ``send``, ``recv`` and ``abort`` may be used in any thread.

    ``over`` is called, in the loop's thread, when all connections are closed.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        key: Key,
        members: Sequence[Member],
        rank: int,
        settings: LinkSettings,
        over: Callable[[], None],
    ) -> None:
        self._loop, self._members, self._rank = loop, members, rank
        self._card, self._settings = card(key, rank), settings
        self._over = over
        self._lock = threading.Lock()  # guards the next two
        self._ends: dict[int, End] = {}
        self._failure: str | None = None
        self._calls: dict[int, Call] = {}  # those that nobody has taken yet; the loop's
        self.greeting_bytes = 0  # sent to make connections
        self.unreached: tuple[str, ...] = ()  # members whose machines do not answer
        self.refused: tuple[str, ...] = ()  # members whose machines refuse

    @property
    def is_over(self) -> bool:
        """Whether it was aborted, or has failed."""
        return self._failure is not None

    @property
    def connected(self) -> int:
        """The number of connections that there are at the moment."""
        with self._lock:
            return sum(end.descriptor is not None for end in self._ends.values())

    # --- in any thread ---------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> torch.Tensor:
        """Send a tensor; return what keeps its memory alive. Raises ``RuntimeError`` once it is over."""
        (tensor,) = tensors
        self._end(peer).send(tag, bytes_of(tensor))
        return tensor

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Receive:
        """Offer a tensor to be filled. Raises ``RuntimeError`` once it is over."""
        (tensor,) = tensors
        return self._end(peer).receive(tag, bytes_of(tensor))

    def abort(self, reason: str = "the group was aborted") -> None:
        """Close all connections. Whoever waits for one of them, here or at the other end, fails within milliseconds."""
        if self._failure is None:
            self._loop.call(lambda: self.close(reason))

    def _end(self, peer: int) -> End:
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            return self._ends.get(peer) or self._make(peer)

    def _make(self, peer: int) -> End:
        """Make this worker's end of a link, and have it connected. Called with the lock held."""
        end = self._ends[peer] = End(self._loop, self._members[peer].worker)
        if self._rank > peer:
            self._loop.call(lambda: self._call(peer))
        return end

    # --- in the loop's thread --------------------------------------------------------------------

    def _call(self, peer: int) -> None:
        if self._failure is not None:
            return
        member = self._members[peer]
        self._calls[peer] = Call(
            self._loop,
            (member.address, member.port),
            token=self._settings.token,
            mode=tls.mode(self._settings.tls),
            card=self._card,
            patience=self._settings.heartbeat,
            taken=lambda connection: self._taken(peer, connection),
            failed=lambda why: self._unanswered(member.worker, why),
        )

    def _taken(self, peer: int, connection: socket.socket) -> None:
        self._calls.pop(peer, None)
        self.greeting_bytes += handshake.HELLO_BYTES + handshake.PROOF_BYTES + len(self._card)
        self._encrypt(peer, connection, server=False)

    def take_call(self, peer: int, connection: socket.socket) -> None:
        """Take over a connection that a member has made."""
        if self._failure is not None or not self._rank < peer < len(self._members):
            connection.close()
        else:
            self.greeting_bytes += handshake.HEADER_BYTES + handshake.ANSWER_BYTES
            self._encrypt(peer, connection, server=True)

    def _encrypt(self, peer: int, connection: socket.socket, *, server: bool) -> None:
        """Put TLS on a connection, if the run has it for tensors."""
        settings = self._settings.tls
        if settings is None:
            self._attach(peer, PlainCarrier(connection))
            return
        worker = self._members[peer].worker
        try:
            context = settings.among_workers(server=server)
        except OSError as e:  # a certificate is just being renewed, or gone
            connection.close()
            self.close(f"no TLS with {worker}: {e}")
            return
        encrypt(
            self._loop,
            connection,
            context,
            server=server,
            done=lambda carrier: self._attach(peer, carrier),
            failed=lambda error: self.close(f"no TLS with {worker}: {error}"),
        )

    def _attach(self, peer: int, carrier: Carrier) -> None:
        if self._failure is not None:
            carrier.close()
            return
        with self._lock:
            end = self._ends.get(peer) or self._make(peer)
        if end.descriptor is not None:  # nobody calls twice, unless something is wrong
            carrier.close()
            return
        silence.ask_when_idle(carrier.fileno(), silence.allowed(self._settings.heartbeat))
        end.attach(carrier)

    def _unanswered(self, worker: str, why: Unanswered) -> None:
        if why.is_refused:
            self.refused = (worker,)
        else:
            self.unreached = (worker,)
        self.close(f"{worker} cannot be reached: {why.reason}")

    def look_for_vanished(self) -> None:
        """Give up if a member's machine has not answered for long, in case no coordinator can tell (``silence``)."""
        seconds = silence.allowed(self._settings.heartbeat)
        with self._lock:
            ends = [end for end in self._ends.values() if end.descriptor is not None]
        silent = [end.peer for end in ends if silence.unanswered(end.descriptor or 0) >= seconds]
        if silent:
            self.unreached = tuple(silent)
            self.close(f"{' and '.join(silent)} cannot be reached for {seconds:g} s")

    def close(self, reason: str) -> None:
        """Close all connections, and fail what waits for them."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            ends = list(self._ends.values())
        for call in self._calls.values():
            call.cancel()
        for end in ends:
            end.close(reason)
        self._over()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, of whatever type, as bytes.

    >>> len(bytes_of(torch.zeros(3, dtype=torch.bfloat16)))
    6
    """
    assert tensor.is_contiguous()
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
