"""A machine that vanishes is noticed; one whose process is slow, or stopped, is not taken for it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
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
import socket, sys
from holdfast.cluster import silence
lines = [socket.create_connection((sys.argv[1], 5001)) for _ in range(2)]
for number, line in enumerate(lines):  # one where much is being sent, one where nothing is
    silence.watch([line.fileno()], 1.0, lambda reason, number=number: print(number, reason, flush=True))
lines[0].setblocking(False)
try:
    while True:
        lines[0].send(bytes(65536))
except BlockingIOError:
    print("full", flush=True)
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


def test_a_watch_that_is_over_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end does not answer, but the watch ends before it looks: its first look would be in 15 s."""
    said: list[object] = []
    others = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as line:
        with monkeypatch.context() as patch:
            patch.setattr(silence, "unanswered", lambda number: 100.0)
            over = silence.watch([line.fileno()], 60.0, said.append)
            (watcher,) = (t for t in threading.enumerate() if t not in others and t.name == "holdfast-silence")
            over.set()
            watcher.join(120)
        assert not watcher.is_alive()
    assert not said
    assert silence.unanswered(line.fileno()) == 0.0, "closed meanwhile"


def test_a_descriptor_that_is_no_socket_any_more_is_no_matter(tmp_path: Path) -> None:
    """Gloo may have closed it before anybody watches, and the number may be somebody else's."""
    with (tmp_path / "file").open("w") as other:
        silence.ask_when_idle(other.fileno(), 1.0)
        assert silence.unanswered(other.fileno()) == 0.0
        number = other.fileno()
    silence.ask_when_idle(number, 1.0)
