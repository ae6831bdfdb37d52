"""A file in which the agents of a cluster's job meet: the first one writes where they meet, and their secret.

It is in a folder that all machines share, and only its owner can read it. So the secret is never in a command line,
where ``ps`` shows it to everybody. A file that was left by a run which has ended is replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.errors import UsageError

PAUSE = 0.1  # seconds between two looks
LOCK_SECONDS = 60.0  # for the lock of the file, at most


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the agents of a run meet.

    >>> Meeting(steps=("7.0.0",), endpoint="n1:29700", token="a secret of the job").endpoint
    'n1:29700'
    """

    steps: tuple[str, ...]  # the names of the job steps that take part, oldest first
    endpoint: str  # the coordinator's host:port
    token: str  # the run's secret


def begin_or_join(path: Path, step: str, make: Callable[[], Meeting], *, is_running: Callable[[str], bool]) -> Meeting:
    """Return where the run meets, as the first agent of a step.

    If a step in the file still runs, this one joins its run. Else it begins the run anew, with what ``make`` returns.
    """
    with _locked(path):
        found = read(path)
        if found is not None and (step in found.steps or any(map(is_running, found.steps))):
            return found if step in found.steps else _write(path, replace(found, steps=(*found.steps, step)))
        return _write(path, make())


def follow(path: Path, step: str, *, patience: float) -> Meeting:
    """Return where the run meets, as any other agent of a step: once the first one has written it.

    Raises ``UsageError`` if it has not for ``patience`` seconds.
    """
    end = time.monotonic() + patience
    while (found := read(path)) is None or step not in found.steps:
        if time.monotonic() > end:
            raise UsageError(
                f"the first agent of this job has not written {path} for {patience:g} s",
                hint="--log-dir must be in a folder that all nodes share; or give --rdzv-endpoint and HOLDFAST_TOKEN",
            )
        time.sleep(PAUSE)
    return found


def read(path: Path) -> Meeting | None:
    """Return the meeting in a file; None if there is no file, or it is none of ours.

    Raises ``UsageError`` for a file of somebody else: who wrote it would know the secret, and have us come to them.
    """
    try:
        with path.open() as file:
            owner, text = os.fstat(file.fileno()).st_uid, file.read()
    except PermissionError as e:
        raise _not_ours(path) from e
    except (OSError, ValueError):
        return None
    if owner != os.geteuid():
        raise _not_ours(path)
    try:
        stored = json.loads(text)
        return Meeting(**{**stored, "steps": tuple(stored["steps"])})
    except (ValueError, TypeError, KeyError):
        return None


def _not_ours(path: Path) -> UsageError:
    return UsageError(f"{path} is somebody else's", hint="another --log-dir, or another --rdzv-id")


def _write(path: Path, meeting: Meeting) -> Meeting:
    """Write it so that a reader sees all of it or nothing, and nobody else can read it."""
    # A new file of a random name: one that lies ready could have been put there, with other rights.
    number, fresh = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    with open(number, "w") as file:
        json.dump(asdict(meeting), file)
        file.flush()
        os.fsync(number)
    os.replace(fresh, path)
    return meeting


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two jobs that start at once must not both begin the run. Where a file system knows no locks, they may.

    Nobody has the lock for long: it asks SLURM whether a few steps still run. A lock that hangs is given up.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        hint = "give a --log-dir that you may write to"
        raise UsageError(f"the agents of this job cannot meet: {e}", hint=hint) from e
    with open(lock) as file:
        end = time.monotonic() + LOCK_SECONDS
        while not _try_lock(file.fileno()) and time.monotonic() < end:
            time.sleep(PAUSE)
        yield


def _try_lock(fd: int) -> bool:
    """Return whether there is nothing left to wait for."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here
    return True
