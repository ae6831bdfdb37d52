"""``train.py`` with a script that uses the network itself, to an address where members of the group are too."""

from __future__ import annotations

import itertools
import socket
import threading
import time

from holdfast.cluster.group import Group
from tests.faults import train

KEPT = 300  # connections at a time: the oldest is closed for a new one
PAUSE_SECONDS = 0.002


class OwnConnections:
    """Connections of this process to a server of its own, opened all the time. ``lost``: those that somebody broke."""

    def __init__(self) -> None:
        self.lost = 0
        self.opened = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._use, daemon=True)
        self._thread.start()

    def _use(self) -> None:
        while not self._over.is_set():
            client = socket.create_connection(self._server.getsockname())
            self._pairs.append((client, self._server.accept()[0]))
            self.opened += 1
            if len(self._pairs) > KEPT:
                self._check(self._pairs.pop(0))
            time.sleep(PAUSE_SECONDS)

    def _check(self, pair: tuple[socket.socket, socket.socket]) -> None:
        try:
            for sender, receiver in itertools.permutations(pair):
                sender.sendall(b"x")
                if receiver.recv(1) != b"x":
                    self.lost += 1
        except OSError:
            self.lost += 1
        for one in pair:
            one.close()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for pair in self._pairs:
            self._check(pair)


def count_pairs() -> list[tuple[int, int]]:
    """Notes for each group that forms how many of Gloo's sockets were found, and how many other members there are."""
    counts: list[tuple[int, int]] = []
    real = Group.look_for_vanished

    def look(group: Group) -> None:
        counts.append((len(group._sockets), group.size - 1))
        real(group)

    Group.look_for_vanished = look  # type: ignore[method-assign]
    return counts


if __name__ == "__main__":
    pairs = count_pairs()
    connections = OwnConnections()
    train.main()
    connections.end()
    wrong = [count for count in pairs if count[0] != count[1]]
    print(f"own connections: {connections.opened} opened, {connections.lost} lost", flush=True)
    print(f"groups: {len(pairs)} formed, {len(wrong)} with missing or foreign sockets: {wrong}", flush=True)
