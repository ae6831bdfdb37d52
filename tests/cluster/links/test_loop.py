"""The thread that serves the sockets of a worker."""

from __future__ import annotations

import sys
import threading

import pytest

from holdfast.cluster.links.loop import Loop


@pytest.fixture
def _threads_take_turns_often() -> object:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_an_order_that_comes_while_the_thread_ends_is_no_error() -> None:
    """The thread may close its bell between an order and its ring. That ring went to a closed descriptor."""
    for _ in range(300):
        loop = Loop("a loop")
        loop.start()
        loop.call(lambda: None)  # wakes the thread, which may find the order to stop before it is rung for
        loop.stop()
        loop.call(lambda: None)


def test_orders_are_done_in_their_order_before_the_thread_ends() -> None:
    done: list[int] = []
    ended = threading.Event()
    loop = Loop("a loop")
    loop.start()
    for number in range(100):
        loop.call(lambda number=number: done.append(number))
    loop.call(ended.set)
    loop.stop()
    assert ended.wait(60)
    assert done == list(range(100))
