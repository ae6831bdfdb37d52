"""The signals that announce the end of a machine. Only the agent acts on them.

SLURM and systemd send SIGTERM to every process of a job, and a terminal sends SIGINT or SIGHUP to every process of its
group. So zygote and coordinator ignore these signals, and workers pass them on to their agent: none of them dies of a
notice. The agent asks its workers to leave.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# SIGUSR1 and SIGUSR2 are what batch systems are told to send ahead of time, as with SLURM's --signal=USR1@120.
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
IMPATIENT = (signal.SIGTERM, signal.SIGINT)  # the second of these ends the agent at once; the others may come twice


def notices() -> list[signal.Signals]:
    """Return the signals that this agent takes for a notice. Under ``nohup`` SIGHUP is none.

    >>> signal.SIGTERM in notices()
    True
    """
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in NOTICES if number != signal.SIGHUP or not kept]


def end_by_sigterm_if_first() -> None:
    """Let SIGTERM end this process also where it is the first of a container, until something else handles it.

    The kernel spares process 1 of a signal that it has no handler for: a pod that is deleted while it waits for another
    would wait on, for the whole grace of the pod.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


@contextmanager
def held() -> Iterator[None]:
    """Hold notices back in child processes that are started meanwhile, until ``leave_to_agent`` is called there.

    A fresh interpreter would die of a notice before it has come to ignore it. This process gets its own afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_agent() -> None:
    """Ignore notices in this process, and drop those that were held back."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


def pass_on(tell: Callable[[str], None]) -> None:
    """Call ``tell`` with the name of each notice that this worker gets, and go on working.

    Handlers, not SIG_IGN: programs that the user's script starts would inherit SIG_IGN, and could not be terminated.
    Forked children, such as those of a DataLoader, get Python's own handlers back for the same reason.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        tell(signal.Signals(number).name)

    for number in NOTICES:
        signal.signal(number, handle)
        signal.siginterrupt(number, False)  # system calls of other threads, Gloo's among them, go on

    masks = threading.local()  # of the thread that forks

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore() -> None:
        for number in NOTICES:
            if signal.getsignal(number) is handle:  # else the script has set its own
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        release()

    # Held back meanwhile: Python forgets a signal that reaches a child before it has come to ``restore``.
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)
