"""Modules that the zygote imports before it forks workers, so that each worker has them at once.

Forking a process with threads is not safe: in the child only the forking thread exists, and a lock that another one
held is never released. So a module whose import leaves threads behind is left out, and the agent says so.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from holdfast.errors import UsageError
from holdfast.words import count

THREAD_SECONDS = 1.0  # for threads that an import has started to end: some only fetch or compile something


def parse(given: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``--preload a,b --preload c``, each once, in order. Raises ``UsageError`` for no name.

    >>> parse(["transformers,peft", "peft"])
    ('transformers', 'peft')
    """
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
            raise UsageError(f"--preload '{name}' is no module's name", hint="as in transformers,peft")
    return tuple(dict.fromkeys(names))


def load(name: str) -> None:
    """Import a module, or something in it (``transformers.GPT2LMHeadModel``): some packages import their parts late.

    Raises whatever the import raises.

    >>> load("json"), load("json.JSONDecoder")
    (None, None)
    """
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        parent, _, attribute = name.rpartition(".")
        if e.name != name or not parent:
            raise
        if not hasattr(importlib.import_module(parent), attribute):
            raise


def load_all(names: Sequence[str], folder: str) -> None:
    """Import all of these; modules beside the script, in ``folder``, are found too.

    Raises ``Unfit`` for one that cannot be imported, or ``Threaded`` for one that leaves threads behind.
    """
    sys.path.insert(0, folder)
    try:
        for name in names:
            before = _threads()
            try:
                load(name)
            except (Exception, SystemExit) as e:
                raise Unfit(name, f"{type(e).__name__}: {e}") from e
            if (more := _threads_left(before)) > 0:
                raise Threaded(name, more)
    finally:
        sys.path.remove(folder)


class Unfit(Exception):
    """A module cannot be imported."""

    def __init__(self, name: str, error: str) -> None:
        super().__init__(name, error)
        self.report = {"unfit": name, "error": error.splitlines()[0] if error else ""}


class Threaded(Exception):
    """The import of a module has left threads behind."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(name, threads)
        self.name = name
        self.report = {"threaded": name, "threads": threads}


def refusal(report: dict[str, str]) -> UsageError:
    """Return the error that ends a run because of a module that cannot be imported."""
    text = f"--preload {report['unfit']} cannot be imported: {report['error']}"
    return UsageError(text, hint="is it installed in this environment, or beside the script?")


def fatal(names: Sequence[str]) -> UsageError:
    """Return the error that ends a run because the import of one of these modules ends the process.

    >>> print(fatal(["broken"]))
    --preload broken ends the process that imports it, twice by now (leave it out, or see: python -c "import broken")
    """
    text = f"--preload {','.join(names)} ends the process that imports it, twice by now"
    return UsageError(text, hint=f'leave it out, or see: python -c "import {", ".join(names)}"')


def left_out(name: str, threads: int) -> str:
    """Return the notice that a module is left out.

    >>> print(left_out("grpc", 2))
    --preload grpc is left out: its import leaves 2 threads behind, and a process with threads cannot be forked safely
    """
    what = f"its import leaves {count(threads, 'thread')} behind"
    return f"--preload {name} is left out: {what}, and a process with threads cannot be forked safely"


def _threads() -> int:
    """Number of threads of this process, those of C libraries included; 1 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _threads_left(before: int, *, now: Callable[[], float] = time.monotonic) -> int:
    """Return how many threads there are more than before, after those that soon end have ended."""
    end = now() + THREAD_SECONDS
    while (more := _threads() - before) > 0 and now() < end:
        time.sleep(0.01)
    return more
