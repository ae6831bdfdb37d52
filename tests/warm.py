"""Starts our commands as forks of one process that has imported torch, instead of as fresh interpreters.

``python -m holdfast.cli run …`` costs more than a second of processor time before it does anything, and its zygote
another one. Here a *nursery*, started once per test session, forks for each command and runs the module as
``python -m`` would: a process of its own, with its own arguments, environment, folder, output, process group and
network namespace, real signals and a real exit code. Agents started this way get their coordinators and zygotes
from the nursery too. Only the imports are shared.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from holdfast.cluster import keeper, zygote, zygote_keeper

Order = dict[str, Any]
MESSAGE = 2**18  # bytes: an environment of 20 kB must fit, and a Unix socket takes 208 kB
DESCRIPTORS = 8  # at most, with one order
START_SECONDS = 120.0  # for the nursery to import torch on a busy machine
END_SECONDS = 5.0  # for zygotes to see that their agents are gone
_own_nursery: socket.socket | None = None  # in a process that the nursery has forked


# --- on the side of those who order ----------------------------------------------------------------


class Forked:
    """A process that the nursery has forked: what ``subprocess.Popen`` gives, as far as tests need it."""

    def __init__(self, order: Order, passed: list[int], *, stdout: int, stderr: int) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = [theirs.fileno(), stdout, stderr, *passed]
        with theirs:
            socket.send_fds(nursery(), [json.dumps(order).encode()], descriptors)
        self._report.settimeout(START_SECONDS)
        self.pid = int(self._report.recv(64))

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; minus the number of the signal that killed it."""
        if self.returncode is None:
            waiting = select.poll()  # select() takes no numbers above 1,023, and some tests open more
            waiting.register(self._report, select.POLLIN)
            if not waiting.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._report.recv(64))
            self._report.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedCoordinator:
    """A coordinator that the nursery has forked: what ``asyncio.subprocess.Process`` gives, as the keeper needs it."""

    def __init__(self, forked: Forked) -> None:
        self.pid = forked.pid
        self._forked = forked
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(forked._report.fileno(), self._end)

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._forked._report.fileno())
        self._forked.wait()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._forked.wait()

    def kill(self) -> None:
        """Its end is heard by the loop alone, so that nobody who waits for it misses it."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def start(module: str, *arguments: str, environment: dict[str, str], passed: list[int]) -> Forked:
    """``python -m module arguments`` in a fork. ``{0}`` in an argument is the first passed descriptor's new number."""
    sys.stdout.flush()
    sys.stderr.flush()
    return Forked(_order(module, arguments, environment, Path.cwd(), ""), passed, stdout=1, stderr=2)


def _order(module: str, arguments: tuple[str, ...], environment: dict[str, str], folder: Path, namespace: str) -> Order:
    """With no namespace named, that of this process; the process group is this process's."""
    return {
        "module": module,
        "arguments": arguments,
        "environment": environment,
        "folder": str(folder),
        "namespace": f"/run/netns/{namespace}" if namespace else f"/proc/{os.getpid()}/ns/net",
        "group": os.getpgrp(),
    }


class Command(Forked):
    """``holdfast WORDS`` in a process group of its own; its output goes to files in ``folder``, named after it."""

    module = "holdfast.cli"

    def __init__(
        self, *words: str, folder: Path, name: str = "command", namespace: str = "", **environment: str
    ) -> None:
        self._outputs = [folder / f"{name}.{stream}" for stream in ("out", "err")]
        order = _order(self.module, words, {**os.environ, "OMP_NUM_THREADS": "1", **environment}, folder, namespace)
        with self._outputs[0].open("w") as out, self._outputs[1].open("w") as err:
            super().__init__({**order, "group": 0}, [], stdout=out.fileno(), stderr=err.fileno())

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()


class Script(Command):
    """``python WORDS``, where the first word is a script's path."""

    module = ""


def start_zygote(further: Sequence[str] = (), folder: str = "") -> socket.socket:
    """As ``holdfast.cluster.zygote_keeper.start_zygote``, but forked: ready in milliseconds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with theirs:
        words = ["{0}", json.dumps([*further]), folder]
        start("holdfast.cluster.zygote", *words, environment=environment, passed=[theirs.fileno()])
    return ours


async def start_coordinator(listener: int, options: list[str], token: str) -> ForkedCoordinator:
    """As ``holdfast.cluster.keeper.start_coordinator``, but forked."""
    words, environment = ["--listener", "{0}", *options], {**os.environ, "HOLDFAST_TOKEN": token}
    forked = start("holdfast.cluster.coordinator", *words, environment=environment, passed=[listener])
    return ForkedCoordinator(forked)


def use_nursery() -> None:
    """Lets the agents of this process get their coordinators and zygotes from the nursery."""
    zygote_keeper.start_zygote = start_zygote
    keeper.start_coordinator = start_coordinator  # type: ignore[assignment]


@functools.cache
def _session_nursery() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with theirs:
        command = [sys.executable, "-c", "from tests.warm import main; main()", str(theirs.fileno())]
        root = Path(__file__).parents[1]
        return ours, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], cwd=root)


def nursery() -> socket.socket:
    """The connection over which this process orders; the first one to ask starts the nursery."""
    return _own_nursery or _session_nursery()[0]


def end_nursery() -> None:
    """Ends it, if it was ever started, and with it whatever a failed test has left running."""
    if _session_nursery.cache_info().currsize:
        connection, process = _session_nursery()
        connection.close()
        process.wait()


# --- the nursery ------------------------------------------------------------------------------------


class Nursery:
    """Forks for whoever orders, and reports each fork's pid and exit code. Ends with the session that started it."""

    def __init__(self, session: socket.socket) -> None:
        self._session = session
        self._clients = {session.fileno(): session}
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pidfd → pid, where its end is reported

    def serve(self) -> None:
        while True:
            for ready in select.select([*self._clients, *self._children], [], [])[0]:
                if ready in self._children:
                    self._buried(ready)
                elif not self._heard(self._clients[ready]):
                    if self._clients[ready] is self._session:
                        return
                    self._clients.pop(ready).close()

    def end(self) -> None:
        """Waits a little for what still runs, then kills it."""
        end = time.monotonic() + END_SECONDS
        for descriptor, (pid, _) in self._children.items():
            select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # no matter if it has ended: nobody has waited for it
            os.waitpid(pid, 0)

    def _buried(self, descriptor: int) -> None:
        pid, report = self._children.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        _tell(report, os.waitstatus_to_exitcode(status))
        report.close()

    def _heard(self, client: socket.socket) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(client, MESSAGE, DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._forget()
            _become(json.loads(data), descriptors, theirs)
        theirs.close()
        self._clients[ours.fileno()] = ours
        report, *others = descriptors
        for descriptor in others:
            os.close(descriptor)
        told = socket.socket(fileno=report)
        self._children[os.pidfd_open(pid)] = (pid, told)
        _tell(told, pid)
        return True

    def _forget(self) -> None:
        """In a fork: closes what belongs to the nursery, so that others see when it is closed elsewhere."""
        for client in self._clients.values():
            client.close()
        for descriptor, (_, report) in self._children.items():
            os.close(descriptor)
            report.close()


def _tell(report: socket.socket, number: int) -> None:
    try:
        report.send(str(number).encode())
    except OSError:
        pass  # whoever ordered it has ended


def _become(order: Order, descriptors: list[int], own_nursery: socket.socket) -> NoReturn:
    """Turns the fork into the process that was ordered."""
    code = 1
    try:
        code = _run(order, descriptors, own_nursery)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(order: Order, descriptors: list[int], own_nursery: socket.socket) -> int:
    global _own_nursery
    _own_nursery = own_nursery
    report, stdout, stderr, *passed = descriptors
    os.close(report)
    for given, wanted in ((stdout, 1), (stderr, 2)):
        os.dup2(given, wanted)
        os.close(given)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr)  # type: ignore[union-attr]
    try:
        os.setpgid(0, order["group"])
    except PermissionError:
        os.setpgid(0, 0)  # the group of whoever ordered it is gone, or of another session
    _enter(order["namespace"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    use_nursery()
    words = [word.format(*passed) if passed else word for word in order["arguments"]]
    return _run_module(order["module"], words)


def _run_module(module: str, arguments: list[str]) -> int:
    """``python -m module arguments``, or ``python arguments`` if no module is named; returns its exit code."""
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(arguments[0]))
    sys.argv = ["-m", *arguments] if module else arguments
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it is imported already: on purpose
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except Exception:
        return _show(sys.exc_info())
    return 0


def _show(error: Any) -> int:
    """As an interpreter shows an error; returns its exit code, which an error of ours has chosen."""
    try:
        sys.excepthook(*error)
    except SystemExit as e:
        return int(e.code or 0)
    return 1


def _enter(namespace: str) -> None:
    if os.stat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
        return
    descriptor = os.open(namespace, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def main() -> None:
    """The nursery's process: imports, then forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the session, and with it the nursery
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    zygote.warm_up()
    import holdfast.cli.main
    import holdfast.cluster.coordinator  # noqa: F401

    gc.collect()
    gc.freeze()  # a fork's collector would write to, and so copy, every page that it looks at
    nursery = Nursery(socket.socket(fileno=int(sys.argv[1])))
    nursery.serve()
    nursery.end()
