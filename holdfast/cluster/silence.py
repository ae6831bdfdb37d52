"""Detection of a vanished machine without the coordinator: sockets whose other end does not answer any more.

Usually the coordinator tells of lost workers. It cannot if its own machine has vanished, or if this worker is cut off
from it. Then TCP would go on trying for a quarter of an hour, and a socket that only waits would wait for ever. But the
kernel knows when the peer's kernel last answered. A slow or stopped process still has a kernel that answers, so it is
never taken for vanished. (``TCP_USER_TIMEOUT`` cannot be used: it also closes a socket whose other end is alive and
does not read.)
"""

from __future__ import annotations

import os
import socket
import struct

_INFO = struct.Struct("8B24I")  # the begin of struct tcp_info in linux/tcp.h
_TRIES = 2  # retransmissions or probes without an answer in a row: a single lost packet is nothing


def ask_when_idle(number: int, seconds: float) -> None:
    """Let the kernel probe the other end of an idle socket, every ``seconds`` / 4 (TCP keepalive)."""
    pause = max(1, round(seconds / 4))
    try:
        with socket.socket(fileno=os.dup(number)) as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
            mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    except OSError:  # closed meanwhile: a peer was lost as soon as it was reached
        pass


def unanswered(number: int) -> float:
    """Return the seconds since the other end's machine has answered; 0 if it owes no answer.

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


def allowed(heartbeat: float) -> float:
    """Return the seconds of silence after which a machine has vanished: three heartbeat timeouts.

    The coordinator needs one. It knows more, so it should be the first to tell.
    """
    return 3 * heartbeat


def pause(heartbeat: float) -> float:
    """Return the seconds between two looks at sockets."""
    return allowed(heartbeat) / 4
