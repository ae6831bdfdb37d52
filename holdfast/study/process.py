"""A framework's process, as the study talks to it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError

INSIDE = Path(__file__).parent / "inside" / "__main__.py"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}


class Failed(HoldfastError):
    """What a framework said when it could not do what was asked: a row of the study, not its end."""


_living: set[Process] = set()
_ended = threading.Event()


def end_all() -> None:
    """The study was interrupted: what runs is ended, and nothing begins any more."""
    _ended.set()
    for process in [*_living]:
        process._end()


class Process:
    """A framework in its own interpreter. Requests are answered one after the other.

    ``threads``: for its kernels; None leaves the framework's default.
    """

    def __init__(self, framework: str, python: Path, *, log: Path, threads: int | None = None) -> None:
        if _ended.is_set():
            raise Failed("the study was interrupted")
        self.framework = framework
        environment = {**os.environ, **QUIET}
        if threads is not None:
            names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
            environment |= dict.fromkeys(names, str(threads))
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [python, "-I", "-u", INSIDE, framework],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to hand on
        )
        _living.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, op: str, *, within: float | None = None, **given: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer; one that takes longer than ``within`` seconds is ended."""
        self.send(op, **given)
        return self.answer(within=within)

    def send(self, op: str, **given: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **given}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: its answer will say so

    def answer(self, *, within: float | None = None) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within)[0]:
            self._end()
            raise Failed(f"{self.framework} did not answer within {within:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise Failed(f"{self.framework}'s process ended by {end} (see {self._log.name})")
        found = json.loads(line)
        if "error" in found:
            raise Failed(found["error"])
        return found["ok"]

    def _end(self) -> None:
        """At once, with all that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        self._process.wait()

    def kill(self) -> None:
        """It is needed no more."""
        self._end()
        _living.discard(self)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass  # what it was not told any more

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
