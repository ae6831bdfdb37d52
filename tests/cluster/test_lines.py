"""JSON over a local socket: whole messages, in order, whatever the other side reads when."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.cluster.lines import Lines


@pytest.fixture
def ends() -> Iterator[tuple[Lines, Lines]]:
    ours, theirs = (Lines(end) for end in socket.socketpair())
    yield ours, theirs
    ours.socket.close()
    theirs.socket.close()


def received(lines: Lines, number: int) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + 20
    while len(found) < number and time.monotonic() < deadline:
        found += [message["n"] for message in lines.receive()]
    return found


def test_what_is_not_read_waits_and_nobody_waits_for_it(ends: tuple[Lines, Lines]) -> None:
    ours, theirs = ends
    sent = [ours.send({"n": n, "text": "x" * 1000}) for n in range(1000)]
    assert sent[0]
    assert not sent[-1], "the socket is full"
    found: list[int] = []
    while len(found) < 1000:
        found += [message["n"] for message in theirs.receive()]
        ours.flush()
    assert found == list(range(1000))


def test_several_threads_do_not_mix_their_messages(ends: tuple[Lines, Lines]) -> None:
    ours, theirs = ends

    def talk(thread: int) -> None:
        for n in range(300):
            ours.send({"n": 1000 * thread + n, "text": "x" * 500})

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    deadline = time.monotonic() + 20
    while len(found) < 1200 and time.monotonic() < deadline:
        found += [message["n"] for message in theirs.receive()]
        ours.flush()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [n for n in found if n // 1000 == number] == [1000 * number + n for n in range(300)]


def test_a_signals_handler_may_send_in_the_middle_of_a_send(ends: tuple[Lines, Lines]) -> None:
    ours, theirs = ends
    count = 0

    def handle(number: int, frame: object) -> None:
        nonlocal count
        ours.send({"n": -1, "text": "y" * 700})
        count += 1

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    reader_found: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set() or len(reader_found) < 3000 + count:
            reader_found.extend(message["n"] for message in theirs.receive())
            ours.flush()

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(3000):
        ours.send({"n": n, "text": "x" * 300})
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    over.set()
    reader.join(30)
    assert [n for n in reader_found if n >= 0] == list(range(3000))
    assert count


def test_nonsense_is_passed_over_and_the_end_is_told(ends: tuple[Lines, Lines]) -> None:
    ours, theirs = ends
    ours.socket.send(b'{"n": 1}\nnonsense\n7\n{"n": 2}\n{"n":')
    assert received(theirs, 2) == [1, 2]
    ours.socket.close()
    with pytest.raises(EOFError):
        theirs.receive()
    assert theirs.send({"n": 3}), "a closed connection takes everything"


def test_the_last_words_of_a_process_are_sent_if_somebody_reads(ends: tuple[Lines, Lines]) -> None:
    ours, theirs = ends
    for n in range(400):
        ours.send({"n": n, "text": "x" * 1000})
    threading.Timer(0.05, lambda: received(theirs, 400)).start()
    ours.drain(20.0)
    assert not ours._out
    for n in range(400):
        ours.send({"n": n, "text": "x" * 1000})
    begin = time.monotonic()
    ours.drain(0.1)
    assert time.monotonic() - begin < 10
