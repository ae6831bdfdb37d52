"""A machine that vanishes is noticed; one whose process is slow, or stopped, is not taken for it."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster import silence
from tests.namespaces import Machines, machines

SECONDS = 1.0
LISTEN = (
    "import socket, sys; server = socket.create_server(('0.0.0.0', 5001)); print('listening', flush=True)\n"
    "first, second = server.accept(), server.accept(); sys.stdin.read()"
)
WATCH = """
import socket, sys, time
from holdfast.cluster import silence
lines = [socket.create_connection((sys.argv[1], 5001)) for _ in range(2)]
for line in lines:  # one where much is being sent, one where nothing is
    silence.ask_when_idle(line.fileno(), 1.0)
lines[0].setblocking(False)
try:
    while True:
        lines[0].send(bytes(65536))
except BlockingIOError:
    print("full", flush=True)
watched = dict(enumerate(lines))
while watched:
    time.sleep(0.1)
    for number in [n for n, line in watched.items() if silence.unanswered(line.fileno()) >= 1.0]:
        print(number, flush=True)
        del watched[number]
sys.stdin.read()
"""


@pytest.fixture
def two() -> Iterator[Machines]:
    with machines(2) as made:
        yield made


def test_a_vanished_machine_and_a_slow_process(two: Machines) -> None:
    def start(machine: int, *words: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", two.names[machine], sys.executable, "-c", *words]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start(1, LISTEN) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        with start(0, WATCH, two.addresses[1]) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "full\n"
            # It does not read what is sent, and says nothing: yet its machine answers.
            assert not select.select([watcher.stdout], [], [], 2 * SECONDS)[0]
            two.cut(1)
            said = {watcher.stdout.readline().split()[0] for _ in range(2)}  # else the test's own limit ends it
            assert said == {"0", "1"}
            watcher.kill()
        listener.kill()


def test_a_descriptor_that_is_no_socket_any_more_is_no_matter(tmp_path: Path) -> None:
    """It was closed before anybody looks, and the number may be somebody else's."""
    with (tmp_path / "file").open("w") as other:
        silence.ask_when_idle(other.fileno(), 1.0)
        assert silence.unanswered(other.fileno()) == 0.0
        number = other.fileno()
    silence.ask_when_idle(number, 1.0)
