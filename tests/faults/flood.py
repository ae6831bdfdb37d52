"""Strangers: a program that connects to every port that listens in its network namespace, again and again.

``python flood.py HELD REPORT``: so many connections to each port at a time, some silent, some with garbage, some that
begin a handshake. Those that are dropped come again. It ends when its input closes, and writes to REPORT how many
connections each port has got from it, and how many tries there were.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import select
import socket
import sys
from pathlib import Path

TICK_SECONDS = 0.02
NEW = 40  # connections to one port in a tick
SAID = [
    b"",
    os.urandom(200),
    b"GET / HTTP/1.0\r\n\r\n" * 4,
    b'{"nonce": "a", "proof": "b", "hello": {"role": "worker"}}\n' * 3,
    b"HOLDFAST\x02\x00" + bytes(32),
    b"HOLDFAST\x02\x00" + bytes(64),
    b"hi",
    bytes(7),
]


def ports() -> set[int]:
    """The ports that listen on any IPv4 address of this namespace."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"}


def main() -> None:
    held, report = int(sys.argv[1]), Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    poll, open_ones = select.epoll(), {}
    holds: collections.Counter[int] = collections.Counter()
    tries: collections.Counter[int] = collections.Counter()
    connected: collections.Counter[int] = collections.Counter()
    poll.register(sys.stdin, select.EPOLLIN)
    print("flooding", flush=True)
    while True:
        listening = ports()
        for port in listening:
            for _ in range(min(NEW, held - holds[port])):
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
                open_ones[stranger.fileno()] = (stranger, port, tries[port])
                poll.register(stranger, select.EPOLLIN | select.EPOLLOUT)
                holds[port] += 1
                tries[port] += 1
        for number, events in poll.poll(TICK_SECONDS, 4096):
            if number == sys.stdin.fileno():
                report.write_text(json.dumps({"tries": tries, "connected": connected}))
                return
            stranger, port, kind = open_ones[number]
            if events & select.EPOLLOUT and not events & (select.EPOLLHUP | select.EPOLLERR):
                connected[port] += 1
                poll.modify(number, select.EPOLLIN)
                try:
                    stranger.send(SAID[kind % len(SAID)] or b"")
                except OSError:
                    pass
            elif events & (select.EPOLLHUP | select.EPOLLERR) or not received(stranger):
                poll.unregister(number)
                del open_ones[number]
                stranger.close()
                holds[port] -= 1


def received(stranger: socket.socket) -> bool:
    """Whether the other side is still there."""
    try:
        return bool(stranger.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
