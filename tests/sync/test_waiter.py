"""Waiting that can be given up, and the reason for it: Gloo forgets a receive in the middle of its message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.sync.waiter import GRACE, wait_for

SIZE = 100 << 20  # elements of one byte: more than the sockets' buffers hold

SENDER = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False)
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
options._timeout = timedelta(seconds=60)
gloo = dist.ProcessGroupGloo(store, 1, 2, options)
work = gloo.send([torch.ones(int(sys.argv[2]), dtype=torch.uint8)], 0, 5)
time.sleep(100)
"""


class Work:
    """A receive that ends when it is told to."""

    def __init__(self, error: str = "") -> None:
        self.end = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        assert self.end.wait(timeout.total_seconds())
        if self._error:
            raise RuntimeError(self._error)


def test_all_are_waited_for() -> None:
    works = [Work(), Work("gone"), Work()]
    failures: list[Exception] = []
    waiting = threading.Thread(target=lambda: wait_for(works, failed=failures.append, over=lambda: False))
    waiting.start()
    works[0].end.set()
    works[1].end.set()
    waiting.join(5 * GRACE)
    assert waiting.is_alive(), "the last one is not done"
    works[2].end.set()
    waiting.join(10)
    assert [str(failure) for failure in failures] == ["gone"]


def test_what_never_ends_is_left_behind_once_it_is_over() -> None:
    forgotten, over = Work(), threading.Event()
    waiting = threading.Thread(target=lambda: wait_for([forgotten], failed=lambda error: None, over=over.is_set))
    waiting.start()
    waiting.join(3 * GRACE)
    assert waiting.is_alive(), "a slow peer is waited for"
    over.set()
    waiting.join(10)
    assert not waiting.is_alive()
    wait_for([ready()], failed=lambda error: None, over=lambda: False)  # the next one does not queue behind it
    forgotten.end.set()


def ready() -> Work:
    work = Work()
    work.end.set()
    return work


@contextmanager
def receive_broken_off() -> Iterator[Any]:
    """A real receive whose sender is killed when the first bytes are here."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(store.port), str(SIZE)])
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = timedelta(seconds=60)
        gloo = dist.ProcessGroupGloo(store, 0, 2, options)
        room = torch.zeros(SIZE, dtype=torch.uint8)
        work = gloo.recv([room], 1, 5)
        while not room[0]:
            time.sleep(0.0005)
        os.kill(sender.pid, signal.SIGKILL)
        sender.wait()
        assert not room[-1], "it was quicker than the signal"
        yield work
    finally:
        sender.kill()
        sender.wait()


def test_a_receive_that_gloo_forgot_is_given_up() -> None:
    with receive_broken_off() as work:
        over = threading.Event()
        threading.Timer(0.3, over.set).start()
        wait_for([work], failed=lambda error: None, over=over.is_set)  # Gloo would wait for its 60 seconds


def test_control_gloo_itself_never_tells() -> None:
    """When this fails, Gloo has learnt to tell, and ``waiter`` may go."""
    # It times out, rather than being told.
    with receive_broken_off() as work, pytest.raises(RuntimeError, match=r"(?i)time"):
        work.wait(timedelta(seconds=1))


def test_a_forked_process_has_waiters_of_its_own() -> None:
    """The parent's idle one is there after a fork, but not its thread."""
    wait_for([Done()], failed=lambda error: None, over=lambda: False)  # leaves one that is idle
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        wait_for([Done()], failed=lambda error: None, over=lambda: False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Done:
    def wait(self, timeout: timedelta) -> None:
        """It has come."""
