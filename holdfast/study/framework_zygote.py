"""The zygote of a framework: a process that has imported it, whose forks are ready at once."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.study.process import Failed, Process

LIMIT = 60.0  # seconds until a fork has connected; on a very busy machine it takes some


class FrameworkZygote:
    """A process that imports its framework; the first ``fork`` waits until it has.

    >>> import sys
    >>> log = Path("/dev/null")
    >>> with FrameworkZygote(Process("pytorch", Path(sys.executable), log)) as zygote, zygote.fork(log) as fork:
    ...     sorted(fork.ask("hello")["versions"])[0]
    'safetensors'
    """

    def __init__(self, process: Process) -> None:
        self._process, self._lock, self._ready = process, threading.Lock(), False
        process.send("hello")

    def ready(self) -> None:
        """Wait until it has imported its framework; raises ``Failed`` if it cannot."""
        with self._lock:
            if not self._ready:
                self._ready = True
                self._process.answer()

    def fork(self, log: Path) -> Process:
        """Start a fork; what it prints goes to ``log``. Raises ``Failed`` if it does not begin."""
        self.ready()
        with TemporaryDirectory(prefix="holdfast-") as folder, socket.socket(socket.AF_UNIX) as door:
            address = f"{folder}/door"
            door.bind(address)
            door.listen()
            door.settimeout(LIMIT)
            with self._lock:
                pid = self._process.ask("fork", address=address, log=str(log.absolute()))["pid"]
            try:
                line, _ = door.accept()
            except TimeoutError as e:
                raise Failed(f"{self._process.framework}: a fork did not begin within {LIMIT:.0f} s") from e
        line.settimeout(None)
        return Fork(self, self._process.framework, log, pid, line)

    def ended(self, pid: int, *, wait: bool) -> int | None:
        """Return a fork's exit code, or None if it runs; that of a kill if the zygote, who would know, is dead."""
        if not self._process.alive:
            return -signal.SIGKILL
        with self._lock:
            code = self._process.ask("ended", pid=pid, wait=wait)["code"]
            return None if code is None else int(code)

    def __enter__(self) -> FrameworkZygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


class Fork(Process):
    """A process that a zygote has forked."""

    def __init__(self, zygote: FrameworkZygote, framework: str, log: Path, pid: int, line: socket.socket) -> None:
        self._zygote = zygote
        self._end_code: int | None = None
        self._begin(framework, log, pid, line.makefile("w"), line.makefile("r"))
        line.close()  # the two files hold it open

    def _code(self, *, wait: bool) -> int | None:
        if self._end_code is None:
            self._end_code = self._zygote.ended(self.pid, wait=wait)
        return self._end_code
