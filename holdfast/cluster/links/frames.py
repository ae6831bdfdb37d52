"""The messages on one connection between two workers, as a state machine without a socket.

A message is a header (its tag and its size) and its bytes. Messages of one tag arrive in the order in which they were
sent. Those of other tags may overtake each other.

A small message is sent at once. If nobody waits for it yet, the receiver keeps a copy. A large message waits until the
receiver has made room for it and said so: a header with the tag, and ``OFFER`` in place of the size. So a large message
goes straight from the sender's tensor into the receiver's, and a fast sender cannot fill a slow receiver's memory.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter, defaultdict, deque

SMALL = 2**16  # bytes up to which a message is sent before there is room for it: a kernel's socket buffer holds more
OFFER = 2**64 - 1  # in place of a size: there is room for one more large message of this tag

_HEADER = struct.Struct("!QQ")  # tag, size


class Receive:
    """Room for one message that is to come.

    >>> receive = Receive(memoryview(bytearray(2)))
    >>> receive.fail("the other side is gone")
    >>> receive.wait()
    Traceback (most recent call last):
    RuntimeError: the other side is gone
    """

    __slots__ = ("_done", "_error", "room")

    def __init__(self, room: memoryview) -> None:
        self.room = room
        self._error: str | None = None
        self._done = threading.Lock()  # held until the message is there: the cheapest thing to wait for
        self._done.acquire()

    def complete(self) -> None:
        """Note that the message has arrived."""
        self._done.release()

    def fail(self, reason: str) -> None:
        """Note that the message will never arrive."""
        self._error = reason
        self._done.release()

    def wait(self) -> None:
        """Wait until the message is there. Nothing is written into the room after this. Raises ``RuntimeError``."""
        with self._done:
            if self._error is not None:
                raise RuntimeError(self._error)


class Frames:
    """Both directions of one connection. Its owner moves bytes: out of ``outbox``, and into ``wanted``.

    >>> one, other = Frames(), Frames()
    >>> one.send(7, memoryview(b"hello"))
    >>> room = memoryview(bytearray(5))
    >>> receive = other.receive(7, room)
    >>> carry(one, other)
    >>> bytes(room)
    b'hello'
    """

    def __init__(self) -> None:
        self.outbox: deque[memoryview] = deque()  # bytes to be sent, in order
        self._waiting: dict[int, deque[memoryview]] = {}  # by tag: messages without an offer, and those behind them
        self._offers: Counter[int] = Counter()  # by tag: offers of the other side that no message has used yet
        self._rooms: defaultdict[int, deque[Receive]] = defaultdict(deque)  # by tag: receives without a message
        self._early: defaultdict[int, deque[memoryview]] = defaultdict(deque)  # by tag: messages without a receive
        self._header = memoryview(bytearray(_HEADER.size))
        self._tag: int | None = None  # of the message that is coming in; None: the header is
        self._receive: Receive | None = None  # that is being filled; None: the message is early
        self.wanted = self._header  # where the next bytes go that come in
        self._failure: str | None = None

    # --- what the workers ask for ----------------------------------------------------------------

    def send(self, tag: int, data: memoryview) -> None:
        """Send a message. ``data`` must not change until it has arrived."""
        if tag in self._waiting or len(data) > SMALL:
            self._waiting.setdefault(tag, deque()).append(data)
            self._send_what_may_go(tag)
        else:
            self._put(tag, data)

    def receive(self, tag: int, room: memoryview) -> Receive:
        """Offer room for the next message of a tag."""
        made = Receive(room)
        if early := self._early.get(tag):
            self._fill(made, early.popleft())
        elif self._failure is not None:
            made.fail(self._failure)
        else:
            self._rooms[tag].append(made)
            if len(room) > SMALL:
                self.outbox.append(memoryview(_HEADER.pack(tag, OFFER)))
        return made

    def _put(self, tag: int, data: memoryview) -> None:
        self.outbox.append(memoryview(_HEADER.pack(tag, len(data))))
        if len(data):
            self.outbox.append(data)

    def _send_what_may_go(self, tag: int) -> None:
        """Move messages of a tag to the outbox, up to the first large one that has no offer."""
        queue = self._waiting.get(tag, deque())
        while queue and (len(queue[0]) <= SMALL or self._offers[tag]):
            self._offers[tag] -= len(queue[0]) > SMALL
            self._put(tag, queue.popleft())
        if not queue:
            self._waiting.pop(tag, None)

    # --- bytes -----------------------------------------------------------------------------------

    def sent(self, count: int) -> None:
        """Note that the first ``count`` bytes of the outbox are on their way."""
        while count:
            first = self.outbox[0]
            if count < len(first):
                self.outbox[0] = first[count:]
                return
            count -= len(first)
            self.outbox.popleft()

    def arrived(self, count: int) -> None:
        """Note that the first ``count`` bytes of ``wanted`` have been filled. Raises ``RuntimeError`` on nonsense."""
        self.wanted = self.wanted[count:]
        if len(self.wanted):
            return
        if self._tag is None:
            self._begin(*_HEADER.unpack(self._header))
        if self._tag is not None and not len(self.wanted):
            self._end(self._tag)

    def _begin(self, tag: int, size: int) -> None:
        """Take in a header: an offer, or the begin of a message."""
        self.wanted = self._header
        if size == OFFER:
            self._offers[tag] += 1
            self._send_what_may_go(tag)
            return
        self._tag = tag
        self._receive = self._rooms[tag].popleft() if self._rooms[tag] else None
        if self._receive is None and size > SMALL:
            raise RuntimeError(f"a message of {size} bytes came (tag {tag}) for which there is no room")
        if self._receive is not None and len(self._receive.room) != size:
            raise RuntimeError(f"a message of {size} bytes came (tag {tag}) for {len(self._receive.room)}")
        self.wanted = memoryview(bytearray(size)) if self._receive is None else self._receive.room
        self._early_bytes = self.wanted

    def _end(self, tag: int) -> None:
        """Hand a message over that has come in whole."""
        if self._receive is not None:
            self._receive.complete()
        elif self._rooms[tag]:  # asked for while it came in
            self._fill(self._rooms[tag].popleft(), self._early_bytes)
        else:
            self._early[tag].append(self._early_bytes)
        self._tag = self._receive = None
        self.wanted = self._early_bytes = self._header

    def _fill(self, receive: Receive, data: memoryview) -> None:
        if len(receive.room) == len(data):
            receive.room[:] = data
            receive.complete()
        else:
            receive.fail(f"a message of {len(data)} bytes came for {len(receive.room)}")

    def fail(self, reason: str) -> None:
        """End the connection: receives without a message fail, those of later too. What came early can be had."""
        self._failure = self._failure or reason
        self.outbox.clear()
        self._waiting.clear()
        if self._receive is not None:
            self._receive.fail(self._failure)
            self._receive = None
        for queue in self._rooms.values():
            for receive in queue:
                receive.fail(self._failure)
            queue.clear()


def carry(sender: Frames, receiver: Frames) -> None:
    """Move all bytes from one side's outbox to the other side, as a connection does. For tests and examples."""
    while sender.outbox:
        count = min(len(sender.outbox[0]), len(receiver.wanted))
        receiver.wanted[:count] = sender.outbox[0][:count]
        sender.sent(count)
        receiver.arrived(count)
