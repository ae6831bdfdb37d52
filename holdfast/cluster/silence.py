"""Notices a machine that has vanished, where nobody can tell: sockets that get no answer from the other end.

The coordinator tells of lost workers. It cannot when its own machine is the one that vanished, nor to workers that
are cut off themselves: TCP would go on trying for a quarter of an hour, and a socket that only waits would wait for
ever. But the kernel knows when a peer's kernel last answered. A process that is slow or stopped still has a kernel
that answers, so this is never taken for it. (``TCP_USER_TIMEOUT`` would do that: it also closes a socket whose other
end is alive and does not read.)
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Collection

_INFO = struct.Struct("8B24I")  # the begin of struct tcp_info in linux/tcp.h
_TRIES = 2  # repeated in a row without an answer


def ask_when_idle(number: int, seconds: float) -> None:
    """Has the kernel ask the other end, on a socket where nothing is said, whether it is there."""
    pause = max(1, round(seconds / 4))
    try:
        with socket.socket(fileno=os.dup(number)) as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
            mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    except OSError:  # closed meanwhile: a peer was lost as soon as it was reached
        pass


def unanswered(number: int) -> float:
    """Seconds since the other end's machine has answered; 0 if nothing waits for an answer.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     with socket.create_connection(server.getsockname()) as client:
    ...         unanswered(client.fileno())
    0.0
    """
    try:
        with socket.socket(fileno=os.dup(number)) as mine:
            values = _INFO.unpack(mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except OSError:  # closed meanwhile
        return 0.0
    retransmits, probes, milliseconds = values[2], values[3], values[20]
    return milliseconds / 1000 if max(retransmits, probes) >= _TRIES else 0.0


def seconds_allowed() -> float:
    """Longer than the coordinator needs, so that the one who knows more speaks first."""
    return 3 * float(os.environ.get("HOLDFAST_HEARTBEAT", "5"))


def watch(numbers: Collection[int], seconds: float, vanished: Callable[[str], None]) -> threading.Event:
    """Calls ``vanished`` with the reason once some socket has had no answer for so long. Set the event to end it."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(seconds / 4):
            if any(unanswered(number) >= seconds for number in numbers):
                vanished(f"a peer's machine has not answered for {seconds:g} s")
                return

    for number in numbers:
        ask_when_idle(number, seconds)
    threading.Thread(target=look, name="holdfast-silence", daemon=True).start()
    return over
