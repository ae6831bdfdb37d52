"""JSON objects over a local socket, one a line, without ever waiting for the other side."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque

from holdfast.cluster import wire
from holdfast.cluster.wire import Message


class Lines:
    """One end of a socket pair. ``send`` may be used in any thread; what the other side does not read yet waits here.

    >>> ours, theirs = (Lines(end) for end in socket.socketpair())
    >>> ours.send({"type": "hello"})
    True
    >>> theirs.receive()
    [{'type': 'hello'}]
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self._in = b""  # the begin of a line

    def send(self, message: Message) -> bool:
        """Send a message; return whether all is sent. If not, call ``flush`` once the socket is writable."""
        self._out.append(memoryview(wire.encode(message)))
        return self.flush()

    def flush(self) -> bool:
        """Send what waits; return whether all is sent. A connection that is closed takes everything.

        Nobody waits for the lock: who has it looks again when it is free. So a signal's handler may send, too, in the
        middle of a send.
        """
        while self._out and self._lock.acquire(blocking=False):
            try:
                self._send_some()
            except BlockingIOError:
                return False
            except OSError:
                self._out.clear()
            finally:
                self._lock.release()
        return True

    def _send_some(self) -> None:
        while self._out:
            count = self.socket.send(self._out[0])
            if count < len(self._out[0]):
                self._out[0] = self._out[0][count:]
            else:
                self._out.popleft()

    def drain(self, seconds: float) -> None:
        """Wait until all is sent, but no longer than this: the process is about to end."""
        deadline = time.monotonic() + seconds
        while not self.flush() and time.monotonic() < deadline:
            time.sleep(0.001)

    def receive(self) -> list[Message]:
        """Return the messages that are whole by now. Raises ``EOFError`` if the other side has closed the connection.

        A line that is no message is passed over.
        """
        try:
            data = self.socket.recv(2**17)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._in = (self._in + data).split(b"\n")
        return [message for line in lines if (message := _read(line)) is not None]


def _read(line: bytes) -> Message | None:
    try:
        return wire.decode(line)
    except ValueError:
        return None
