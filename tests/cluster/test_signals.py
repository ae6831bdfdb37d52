"""Notices to single processes: workers pass them on, and what the user's script starts can still be terminated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from holdfast.cluster import signals


def forked(check: Callable[[], bool]) -> bool:
    """Whether ``check`` is true in a fork, whose signal handlers are its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def ends_of(pid: int, number: int) -> bool:
    """Whether a process dies of a signal."""
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number


@pytest.mark.parametrize("number", signals.NOTICES)
def test_a_worker_passes_notices_on_and_lives(number: int) -> None:
    def check() -> bool:
        told: list[str] = []
        signals.pass_on(told.append)
        os.kill(os.getpid(), number)
        return told == [signal.Signals(number).name]

    assert forked(check)


def test_forked_children_of_a_worker_can_be_terminated() -> None:
    """As ``multiprocessing`` does with the workers of a DataLoader."""

    def check() -> bool:
        signals.pass_on(lambda name: None)
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return ends_of(pid, signal.SIGTERM)

    assert forked(check)


def test_a_handler_of_the_script_stays_in_its_forked_children() -> None:
    def check() -> bool:
        signals.pass_on(lambda name: None)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    assert forked(check)


def test_programs_that_a_worker_starts_can_be_terminated() -> None:
    def check() -> bool:
        signals.pass_on(lambda name: None)
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait(30) == -signal.SIGTERM

    assert forked(check)


def test_a_fresh_interpreter_survives_a_notice_before_it_can_ignore_it() -> None:
    words = "from holdfast.cluster import signals; print(input()); signals.leave_to_agent(); print(input())"
    with signals.held():
        child = subprocess.Popen(
            [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert child.stdin is not None
    for number in signals.NOTICES:
        child.send_signal(number)
    out, _ = child.communicate("one\ntwo\n", timeout=60)
    assert (out, child.returncode) == ("one\ntwo\n", 0)


def test_this_process_gets_a_notice_that_came_while_it_was_held() -> None:
    def check() -> bool:
        told: list[str] = []
        signals.pass_on(told.append)
        with signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            held = list(told)
        return (held, told) == ([], ["SIGTERM"])

    assert forked(check)


def test_a_closed_terminal_is_a_notice_but_not_under_nohup() -> None:
    def check() -> bool:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        usually = signal.SIGHUP in signals.notices()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return usually and signal.SIGHUP not in signals.notices()

    assert forked(check)
