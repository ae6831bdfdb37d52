"""This worker's end of its connection to one other worker."""

from __future__ import annotations

import threading

from holdfast.cluster.links.carrier import Carrier
from holdfast.cluster.links.frames import Frames, Receive
from holdfast.cluster.links.loop import READ, WRITE, Loop

PARTS = 32  # buffers that one call hands to the kernel
READS = 16  # reads before other connections get their turn


class End:
    """One end of a link. It may be used before the connection is made: what is sent then waits.

    ``peer``: the name of the worker at the other end.
    """

    def __init__(self, loop: Loop, peer: str) -> None:
        self.peer = peer
        self._loop = loop
        self._lock = threading.Lock()  # guards what follows
        self._frames = Frames()
        self._carrier: Carrier | None = None
        self._writes = False  # whether the loop looks for room in the kernel's buffer

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the connection; None while there is none."""
        return None if self._carrier is None else self._carrier.fileno()

    # --- in any thread ---------------------------------------------------------------------------

    def send(self, tag: int, data: memoryview) -> None:
        """Send a message; the kernel takes what it can at once, and the loop sends the rest."""
        with self._lock:
            self._frames.send(tag, data)
            self._flush()

    def receive(self, tag: int, room: memoryview) -> Receive:
        """Offer room for the next message of a tag."""
        with self._lock:
            made = self._frames.receive(tag, room)
            self._flush()
        return made

    def _flush(self) -> None:
        """Give the kernel what it takes. Errors are left to the loop, which notices them too."""
        outbox = self._frames.outbox
        if self._carrier is None or not outbox:
            return
        try:
            while outbox:
                parts = [outbox[n] for n in range(min(len(outbox), PARTS))]
                self._frames.sent(self._carrier.send(parts))
        except BlockingIOError:
            pass
        except OSError:
            return
        if bool(outbox) != self._writes:
            self._writes = bool(outbox)
            self._loop.rewatch(self._carrier.fileno(), READ | WRITE if self._writes else READ)

    # --- in the loop's thread --------------------------------------------------------------------

    def attach(self, carrier: Carrier) -> None:
        """Take over a connection that is made and proved."""
        with self._lock:
            self._carrier = carrier
            self._loop.watch(carrier.fileno(), READ, self._ready)
            self._flush()
        if carrier.has_more():
            self._read()

    def _ready(self, what: int) -> None:
        if what & WRITE:
            with self._lock:
                self._flush()
        if what & ~WRITE:
            self._read()

    def _read(self) -> None:
        """Read into the room that is wanted next, without a copy."""
        carrier = self._carrier
        if carrier is None:
            return  # closed meanwhile
        for _ in range(READS):
            wanted = self._frames.wanted  # changed by this thread only
            try:
                count = carrier.recv_into(wanted)
            except BlockingIOError:
                return
            except OSError as e:
                self.close(f"lost touch with {self.peer}: {e.strerror}")
                return
            if count == 0:
                self.close(f"lost touch with {self.peer}: it has closed the connection")
                return
            if not self._arrived(count):
                return
        if carrier.has_more():  # the kernel would not tell
            self._loop.call(self._read)

    def _arrived(self, count: int) -> bool:
        """Take in what was read; return whether the connection goes on."""
        with self._lock:
            try:
                self._frames.arrived(count)
                self._flush()  # an offer has come, perhaps
                return True
            except RuntimeError as e:
                reason = f"{self.peer} does something else: {e}"
        self.close(reason)
        return False

    def close(self, reason: str) -> None:
        """End the connection, or the wait for it. Receives that are open fail with ``reason``."""
        with self._lock:
            carrier, self._carrier = self._carrier, None
            if carrier is not None:
                self._loop.forget(carrier.fileno())
                carrier.close()
            self._frames.fail(reason)
