"""A framework's process: requests to it, its answers, and its end."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from holdfast.errors import HoldfastError
from holdfast.study.inside.file_control import memory_of

INSIDE = Path(__file__).parent / "inside" / "__main__.py"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
# Memory that a step frees stays for the next one. Else it is chance whether it goes back to the kernel and comes again
# as thousands of page faults: the same step of the same model took 28 ms in one process and 50 in the next.
STEADY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}


class Failed(HoldfastError):
    """A framework could not do what it was asked. The study goes on: the message becomes a row."""


_living: set[Process] = set()
_ended = threading.Event()


def end_all() -> None:
    """End all processes, and let no other begin: the study was interrupted."""
    _ended.set()
    for process in [*_living]:
        process._end()


class Process:
    """A framework in its own interpreter. It answers one request after the other.

    Args:
        framework: name of the adapter.
        python: the interpreter that has the framework.
        log: file for everything that it prints.
        threads: of its kernels; None leaves the framework's default.
    """

    def __init__(self, framework: str, python: Path, log: Path, *, threads: int | None = None) -> None:
        environment = {**os.environ, **QUIET, **STEADY}
        if threads is not None:
            names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
            environment |= dict.fromkeys(names, str(threads))
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-I", "-u", INSIDE, framework],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to hand on
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._begin(framework, log, self._process.pid, self._process.stdin, self._process.stdout)

    def _begin(self, framework: str, log: Path, pid: int, requests: IO[str], answers: IO[str]) -> None:
        self.framework, self.pid = framework, pid
        self._log, self._requests, self._answers = log, requests, answers
        _living.add(self)
        if _ended.is_set():
            self.kill()
            raise Failed("the study was interrupted")

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._code(wait=False) is None

    def _code(self, *, wait: bool) -> int | None:
        """Return the exit code as subprocess has it; None if it still runs and ``wait`` is false."""
        return self._process.wait() if wait else self._process.poll()

    def ask(self, op: str, *, within: float | None = None, **given: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises ``Failed`` on an error, at the end of the process, or after ``within`` seconds; it is ended then.
        """
        self.send(op, **given)
        return self.answer(within=within)

    def send(self, op: str, **given: Any) -> None:
        """Send a request without waiting for its answer."""
        try:
            self._requests.write(json.dumps({"op": op, **given}) + "\n")
            self._requests.flush()
        except OSError:
            pass  # it has ended: its answer will say so

    def answer(self, *, within: float | None = None) -> dict[str, Any]:
        """Wait for the next answer; see ``ask``."""
        if not select.select([self._answers], [], [], within)[0]:
            self._end()
            raise Failed(f"{self.framework} did not answer within {within:.0f} s")
        try:
            line = self._answers.readline()
        except ConnectionResetError:
            line = ""  # a fork's way to say that it has ended
        if not line:
            code = self._code(wait=True) or 0
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise Failed(f"{self.framework}'s process ended by {end} (see {self._log})")
        found = json.loads(line)
        if "error" in found:
            raise Failed(found["error"])
        return found["ok"]

    def _end(self) -> None:
        """Kill it and all processes that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        self._code(wait=True)

    def kill(self) -> None:
        """End it, and remove the files that it has left in memory."""
        self._end()
        shutil.rmtree(memory_of(self.pid), ignore_errors=True)
        _living.discard(self)
        for pipe in (self._requests, self._answers):
            try:
                pipe.close()
            except OSError:
                pass  # what it was not told any more

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


Start = Callable[[Path], Process]  # a new process of some framework; its errors go into that log
