"""Loader processes, seen from inside: a nursery that a worker forks, and the loaders that the nursery forks.

The nursery is forked when a ``Run`` is made, before the worker has connections and threads. It waits for orders and
has one thread, so that a loader can be forked from it at any time. Neither holds sockets or pipes of the worker: a
connection of a dead worker must close at once, or others would not notice its death. A nursery ends with its worker,
and a loader with its nursery, whatever they are doing.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import pickle
import select
import signal
import socket
import stat
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from holdfast.data.fetch import Collate, Dataset, Request, fetch
from holdfast.data.parcel import pack
from holdfast.errors import UsageError
from holdfast.processes import LOADER
from holdfast.titles import set_loader_title

MESSAGE = 60_000  # bytes of a message on a socket; longer ones go into a file
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # to all processes of a job
PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception that a user's data set has raised in a loader, and the traceback that it had there."""

    error: BaseException
    text: str


def start_nursery(data: Dataset, collate: Collate) -> tuple[socket.socket, int]:
    """Fork a nursery; return the socket to it, and its pid. It sees the data set as it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    worker = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # until the child can ignore them
    try:
        with warnings.catch_warnings():
            # From 3.12 on Python warns of forks in a process with threads: they may hold locks, which the child then
            # never gets. Ours uses none of the worker's, as with torch's DataLoader.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _never_return(lambda: _Nursery(theirs, data, collate).serve(worker))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, pid


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. It may have any length."""
    text = json.dumps(message).encode()
    if len(text) <= MESSAGE:
        line.send(text)
        return
    file = os.memfd_create("holdfast-message")
    with os.fdopen(file, "wb") as written:
        written.write(text)
        written.flush()
        socket.send_fds(line, [b"{}"], [file])


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and the descriptors that came with it; None if the other side has ended."""
    text, descriptors, _, _ = socket.recv_fds(line, MESSAGE, 1)
    if not text:
        return None
    message: dict[str, Any] = json.loads(text)
    if not message:
        with os.fdopen(descriptors.pop(), "rb") as file:
            file.seek(0)
            message = json.loads(file.read())
    return message, descriptors


class _Nursery:
    """The process that forks loaders for one worker, and tells it how they end."""

    def __init__(self, control: socket.socket, data: Dataset, collate: Collate) -> None:
        self._control, self._data, self._collate = control, data, collate
        self._loaders: dict[int, tuple[int, int]] = {}  # by pidfd: number and pid

    def serve(self, worker: int) -> None:
        """Fork a loader for each order. Return when the worker has ended, or needs no loaders any more."""
        _shed_worker({self._control.fileno()})
        life = os.pidfd_open(worker)
        if os.getppid() != worker:  # it has ended before this line
            return
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(life, select.POLLIN)
        while True:
            for found, _ in waiting.poll():
                if found in self._loaders:
                    waiting.unregister(found)
                    self._ended(found)
                    continue
                order = None if found == life else receive(self._control)
                if order is None:
                    self._kill_all()
                    return
                waiting.register(self._fork(order[0]["start"], order[1][0]), select.POLLIN)

    def _fork(self, number: int, line: int) -> int:
        """Fork a loader that is told what to read on ``line``; return its pidfd."""
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            _never_return(lambda: self._become_loader(number, socket.socket(fileno=line), nursery))
        os.close(line)
        life = os.pidfd_open(pid)
        self._loaders[life] = (number, pid)
        return life

    def _become_loader(self, number: int, line: socket.socket, nursery: int) -> None:
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != nursery:
            return
        set_loader_title(f"loader {number} of {_worker()}", f"{LOADER}{number}")
        self._control.close()
        for descriptor in self._loaders:
            os.close(descriptor)
        # A pool of multiprocessing that the data set uses ends its processes by SIGTERM, and waits for them.
        os.register_at_fork(after_in_child=_hear_notices)
        load(line, self._data, self._collate)

    def _ended(self, life: int) -> None:
        number, pid = self._loaders.pop(life)
        os.close(life)
        _, status = os.waitpid(pid, 0)
        send(self._control, {"ended": number, "code": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        for _, pid in self._loaders.values():
            os.kill(pid, signal.SIGKILL)
        for _, pid in self._loaders.values():
            os.waitpid(pid, 0)


def load(line: socket.socket, data: Dataset, collate: Collate) -> None:
    """Read what is requested on ``line``, one batch after the other, until it closes. Each request gets one reply."""
    queue: deque[dict[str, Any]] = deque()
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    while True:
        while waiting.poll(0 if queue else None):
            received = receive(line)
            if received is None:
                return
            queue.append(received[0])
        dropped = {message["drop"] for message in queue if "drop" in message}
        message = queue.popleft()
        if "drop" in message:
            continue
        if message["number"] in dropped:
            send(line, {"dropped": message["number"]})
            continue
        request = Request(seed=message["seed"], samples=tuple(message["samples"]))
        file, failed = _packed(data, request, collate)
        socket.send_fds(line, [json.dumps({"number": message["number"], "failed": failed}).encode()], [file])
        os.close(file)
        sys.stdout.flush()  # of what the data set prints
        sys.stderr.flush()


def _packed(data: Dataset, request: Request, collate: Collate) -> tuple[int, bool]:
    """Return a parcel with a batch, or with the failure to make it; and whether it is a failure."""
    try:
        batch = fetch(data, request, collate)
    except BaseException as e:  # SystemExit too: a data set must not end the loader
        if isinstance(e, OSError) and e.errno == errno.ENOTSOCK:
            e.add_note(
                "sockets that were open when the Run was made are closed in loaders: open them at the first sample"
            )
        return pack(Failure(error=_portable(e), text=traceback.format_exc())), True
    try:
        return pack(batch), False
    except Exception as e:
        error = UsageError(
            f"a loader cannot hand over the batch of samples {list(request.samples)}: {e}",
            hint="batches of tensors, arrays, numbers, texts and containers of them; or num_workers=0",
        )
        return pack(Failure(error=error, text=traceback.format_exc())), True


def _portable(error: BaseException) -> BaseException:
    """Return an exception that another process can raise: this one, or one with its text."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if type(again) is type(error) and isinstance(error, Exception):
            return error
    except Exception:
        pass  # such as a class that wants two arguments, or keeps a file
    told = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        told.add_note(note)
    return told


def _shed_worker(kept: Collection[int]) -> None:
    """Make a forked worker something else: without its sockets and pipes, deaf to notices, with one thread."""
    for number in NOTICES:
        # A handler, not SIG_IGN: programs that the data set starts would inherit that. It ends with its worker.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)
    let_go(kept)
    os.environ.pop("HOLDFAST_LIFELINE", None)  # it was one of the sockets
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    set_loader_title(f"loaders of {_worker()}", "hf-loaders")
    gc.freeze()  # a loader's collector would write to, and so copy, every page that it looks at


def _hear_notices() -> None:
    """Let notices end a process that a data set has forked, as they end the programs that it starts."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_DFL)


def _worker() -> str:
    """Return the worker that this process reads for, as ``ps`` should show it."""
    name = os.environ.get("HOLDFAST_WORKER")
    return f"worker {name}" if name else "a script"


def let_go(kept: Collection[int]) -> None:
    """Close all inherited sockets and pipes but stdin, stdout, stderr and ``kept``.

    Their numbers stay taken, by ``/dev/null``: objects of the worker that believe in them may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor <= 2 or descriptor in kept:
            continue
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue  # the one that the folder was listed with
        if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _never_return(run: Any) -> NoReturn:
    """Run a forked process to its end, without the cleanup of the process that it was forked from."""
    code = 1
    try:
        run()
        code = 0
    except ConnectionError:
        code = 0  # the other side has ended
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
