"""Stack traces of a hung worker, before it is killed.

A worker writes the stacks of all its threads to its log when it gets ``SIGNAL``. Python's ``faulthandler`` does that
in the signal handler itself, so it works in a deadlock, in an endless loop and while some C code keeps the
interpreter's lock. It does not work for a process that is stopped, or that the kernel does not let go.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import re
import signal
import sysconfig
from pathlib import Path

from holdfast.processes import is_stopped, loaders_of

SIGNAL = signal.SIGQUIT  # Java's and Go's signal for the same; a terminal's Ctrl-\ does not reach workers
LONGEST_SECONDS = 3.0  # for a process to write its stacks: it takes milliseconds, unless the process cannot
QUIET_SECONDS = 0.3  # after its last line, the stacks are complete
_LOOK_SECONDS = 0.02  # between two looks at the log
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_FOLDERS = [str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
_ZYGOTE = str(Path(__file__).with_name("zygote.py"))
_NOT_THE_USERS = ("<frozen", *(folder + os.sep for folder in _FOLDERS))


def listen(log: int) -> None:
    """Write the stacks of all threads to this descriptor whenever ``SIGNAL`` comes."""
    faulthandler.register(SIGNAL, file=log, all_threads=True)


async def ask(pid: int, log: Path, *, why: str) -> str:
    """Have a process write its stacks to its log, below the reason; return what it has written, "" if it cannot."""
    try:
        return "" if is_stopped(pid) else await _ask(pid, log, why)
    except OSError:  # it has just ended, or its log is gone
        return ""


async def _ask(pid: int, log: Path, why: str) -> str:
    with log.open("a") as file:
        file.write(f"\nholdfast: {why}; the stacks of all threads, the main thread's last:\n")
    begin = log.stat().st_size
    loaders = loaders_of(pid)  # it may wait for one of them; they write to the same log
    for loader in loaders:
        os.kill(loader, SIGNAL)
    if loaders:
        await _written(log)
    os.kill(pid, SIGNAL)
    await _written(log)
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


async def _written(log: Path) -> None:
    """Wait until stacks have been written to a log, or nothing comes."""
    begin = log.stat().st_size
    loop = asyncio.get_running_loop()
    end, size, grown = loop.time() + LONGEST_SECONDS, begin, loop.time()
    while loop.time() < end and (size == begin or loop.time() < grown + QUIET_SECONDS):
        await asyncio.sleep(_LOOK_SECONDS)
        if log.stat().st_size != size:
            size, grown = log.stat().st_size, loop.time()


def place_of(dump: str) -> str | None:
    """Return where the main thread is, as "train.py:31 in __getitem__"; None if the dump does not say.

    It is the innermost frame of the user's code, or the innermost of all if there is none. ``faulthandler`` writes
    the main thread last.

    >>> place_of('Thread 0x1 (most recent call first):\\n  File "/data/train.py", line 31 in __getitem__')
    '/data/train.py:31 in __getitem__'
    """
    _, _, main = dump.rpartition("(most recent call first):")
    frames = [found for line in main.splitlines() if (found := _FRAME.fullmatch(line))]
    inside = itertools.takewhile(lambda frame: frame["path"] != _ZYGOTE, frames)  # the zygote has called the script
    theirs = [frame for frame in inside if not frame["path"].startswith(_NOT_THE_USERS)]
    if not frames:
        return None
    frame = (theirs or frames)[0]
    path = Path(frame["path"])
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame['line']} in {frame['name']}"
