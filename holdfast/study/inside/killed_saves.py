"""Requests to save versions of a model, to kill such a save, and to look at what is left of it."""

from __future__ import annotations

import os
import re
import select
import signal
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from holdfast.study.adapters.base import Shapes
from holdfast.study.inside.session import Session

OLD, NEW = 1, 2  # versions: seeds of the numbers in the model
POLL = 0.001  # seconds between two looks at a save: kills are aimed to the millisecond
OVER = b"."  # sent by a fork when its save is over


def versions_of(session: Session) -> dict[str, Any]:
    """Return the digests of the old and of the new version."""
    found = {}
    for version in (OLD, NEW):
        session.training.reset(version)
        found[str(version)] = session.training.digests()
    return found


def overwrite(session: Session, *, form: str, folder: str, version: int) -> dict[str, Any]:
    """Save a version over whatever is in the folder."""
    session.training.reset(version)
    _save(session, form, Path(folder))
    return {}


def doom(
    session: Session, *, shapes: Shapes, form: str, folder: str, delay: float | None, from_change: bool = False
) -> dict[str, Any]:
    """Fork this process, let the fork save the new version, and kill it on the way.

    The kill comes ``delay`` seconds after the save began, or after it first changed an old file (``from_change``), if
    the save is not over by then. With ``delay=None`` there is no kill.

    This process must not have made a model itself: frameworks survive a fork only before their threads run. The save
    is over when its call returns, synced or not: the kernel loses nothing when a process dies. ``touched`` is the
    second in which the save began to change files; no kill before that can do harm.
    """
    before, touched, changed = _seen(folder), 0.0, 0.0
    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        _save_and_exit(session, shapes, form, Path(folder), begun)
    os.close(begun)
    with os.fdopen(ready, "rb", buffering=0) as told:
        told.read(1)  # it saves from now on
        begin, seconds = time.monotonic(), 0.0
        while not select.select([told], [], [], POLL)[0]:  # what can be read now is that the save is over
            seconds, now = time.monotonic() - begin, _seen(folder)
            touched = touched or (seconds if now != before else 0.0)
            changed = changed or (seconds if any(now.get(name) != old for name, old in before.items()) else 0.0)
            start = changed if from_change else 0.0
            if delay is not None and (changed or not from_change) and seconds >= start + delay:
                os.kill(pid, signal.SIGKILL)
                break
        else:
            seconds = time.monotonic() - begin
        over = told.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
            raise RuntimeError(over.decode(errors="replace").lstrip("!"))
    return {"killed": not over and os.WIFSIGNALED(status), "touched": touched, "seconds": seconds}


def _seen(folder: str) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of every file in a folder."""
    found = {}
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                status = os.stat(os.path.join(place, name))
            except FileNotFoundError:
                continue  # renamed meanwhile
            found[os.path.join(place, name)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _save_and_exit(session: Session, shapes: Shapes, form: str, folder: Path, begun: int) -> NoReturn:
    """Save in the fork. One byte tells that the save begins, another that it is over; an error is sent in words."""
    code = 1
    try:
        session.training = session.adapter.make(shapes, NEW)
        session.training.reset(NEW)
        os.write(begun, b"!")
        _save(session, form, folder)
        os.write(begun, OVER)
        code = 0
    except Exception as e:  # the study wants to know; and a fork must not go on as its parent
        traceback.print_exc()
        os.write(begun, f"!{_words(e)}".encode())  # the first byte is read if the save had not begun
    finally:
        os._exit(code)


def _save(session: Session, form: str, folder: Path) -> None:
    wait = session.save(form, folder)
    if wait is not None:
        wait()


def look(session: Session, *, form: str, folder: str) -> dict[str, Any]:
    """Load over zeros; return the error, or the digest of each array."""
    session.training.clear()
    try:
        session.load(form, Path(folder))
    except Exception as e:  # the framework has noticed; which error it is does not matter
        return {"error": _words(e), "digests": None}
    return {"error": None, "digests": session.training.digests()}


def _words(error: Exception) -> str:
    """Return one line of an error: the first, or the last if that is an error which is only passed on.

    >>> _words(RuntimeError("ranks:[0]\\nTraceback\\nEOFError: too short")), _words(OSError("no file\\nsee there"))
    ('EOFError: too short', 'OSError: no file')
    """
    lines = str(error).strip().splitlines() or [""]
    passed_on = re.match(r"\w*(Error|Exception)\b", lines[-1])
    return (lines[-1] if passed_on else f"{type(error).__name__}: {lines[0]}")[:500].strip()
