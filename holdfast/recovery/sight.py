"""Whether all workers of a run see the same folder of checkpoints.

A folder may be mounted on some machines only, or a relative path may mean another folder on each of them. Then some
workers would resume and others begin, or the first checkpoint could never be completed. So at the begin of a run the
first worker takes the folder's lease, and every worker looks for a file of that lease and for checkpoints. Workers
that do not see the lease see another folder: the run is refused, in words. Workers that join later look for it too.

On NFS a worker may see an older state of the folder for a while: clients keep attributes of a folder, and names that
were not there, for up to 60 s. Two things keep such a worker from being refused:

- Every look begins with a change of the folder: a file is made and removed. A client that changes a folder drops what
  it remembers of it.
- A difference is looked at again for ``SOON_SECONDS``, or for ``CACHE_SECONDS`` where a worker could not change the
  folder, as it may then have to wait until its client asks the server again.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.checkpoint import series
from holdfast.checkpoint.lease_on_store import chain_of
from holdfast.checkpoint.places import Place, Remote
from holdfast.errors import CheckpointError
from holdfast.words import count

SOON_SECONDS = 3.0  # for a change that the server has to be seen on a client that asks it
CACHE_SECONDS = 70.0  # longer than NFS clients keep attributes of a folder (acdirmax, 60 s by default)
AGAIN_SECONDS = 0.2  # between two looks
HINT = "mount the same folder on every machine, or give the run an absolute path that means the same everywhere"


class Unsighted(CheckpointError):
    """Error: a worker that wants to join does not see the run's folder. The run goes on without it."""

    refused = True  # the agent shows it, and starts no other worker in its place


@dataclass(frozen=True, kw_only=True)
class View:
    """One worker's view of the folder."""

    worker: str  # its name
    machine: str  # the machine that it runs on
    folder: str  # the path under which it looked
    steps: tuple[int, ...] = ()  # steps with a complete checkpoint, oldest first
    marked: bool | None = None  # it sees the run's lease; None: there is none, as the folder cannot be written
    fresh: bool = True  # it has changed the folder before it looked
    error: str = ""  # why it could not look

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values, for ``from_json``."""
        return vars(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> View:
        """Read what ``to_json`` gave."""
        return View(**values | {"steps": tuple(values["steps"])})

    @property
    def is_right(self) -> bool:
        """Whether it is a view of the run's folder, as far as can be told."""
        return not self.error and self.marked is not False

    @property
    def seconds(self) -> float:
        """Seconds after which a look at the same folder shows what others have done there."""
        return SOON_SECONDS if self.fresh else CACHE_SECONDS

    @property
    def in_words(self) -> str:
        """What it sees, without who sees it."""
        if self.error:
            return f"cannot look into {self.folder}: {self.error}"
        seen = f"{count(len(self.steps), 'checkpoint')}, the newest of step {self.steps[-1]}," if self.steps else "none"
        strange = ", and not the lease that the first worker has just written there" if self.marked is False else ""
        return f"sees {seen} in {self.folder}{strange}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do after all workers have looked. ``refusal``: why they cannot go on together, or nothing."""

    steps: tuple[int, ...] = ()  # the checkpoints to resume from, oldest first
    again: bool = False  # look again: a network's file system may show more by then
    refusal: str = ""


def compare(views: Sequence[View], *, waited: float) -> Verdict:
    """Decide whether workers see the same folder. ``views``: by rank. ``waited``: seconds since their first look.

    >>> full = View(worker="0.0", machine="a", folder="/x", steps=(3,))
    >>> empty = View(worker="1.0", machine="b", folder="/x")
    >>> compare([full, empty], waited=0.0).again
    True
    >>> compare([full, empty], waited=99.0).refusal.partition("; ")[2]
    '1.0 on b sees none in /x'
    """
    first = views[0]
    odd = [view for view in views if not view.is_right or view.steps != first.steps]
    if not odd:
        return Verdict(steps=first.steps)
    if waited < max(view.seconds for view in (first, *odd)):
        return Verdict(again=True)
    if not all(view.is_right and bool(view.steps) == bool(first.steps) for view in odd):
        return Verdict(refusal=f"workers do not see the same checkpoints: {_in_words(views)}")
    # The same folder, of which some see more: what the first worker sees counts, and all must be able to read it.
    return Verdict(steps=first.steps)


def _in_words(views: Sequence[View]) -> str:
    """Who sees what; workers of one machine that see the same are named together."""
    found: dict[tuple[str, str], list[str]] = {}
    for view in views:
        found.setdefault((view.machine, view.in_words), []).append(view.worker)
    return "; ".join(f"{', '.join(names)} on {machine} {words}" for (machine, words), names in found.items())


# --- the folder -----------------------------------------------------------------------------------


def look(root: Place, run: str, worker: str) -> View:
    """Return this worker's view of the folder. ``run``: the run that has its lease; empty: none has."""
    machine, folder, fresh = socket.gethostname(), str(root.absolute()), _refresh(root.absolute())
    steps: tuple[int, ...] = ()
    marked: bool | None = None
    error = ""
    try:
        steps = tuple(series.steps_in(root))
        marked = chain_of(root).has(run) if run else None
    except CheckpointError as e:
        error = str(e)
    return View(worker=worker, machine=machine, folder=folder, steps=steps, marked=marked, fresh=fresh, error=error)


def refuse_joiner(view: View) -> NoReturn:
    """Raise ``Unsighted`` for a worker that wants to join and does not see the run's folder."""
    raise Unsighted(
        f"worker {view.worker} on {view.machine} cannot join, as it could not save: it {view.in_words}", hint=HINT
    )


def _refresh(folder: Place) -> bool:
    """Make this machine's view of a folder new by a change in it, or in the nearest one above; return whether."""
    if isinstance(folder, Remote):
        return True  # its lists are never old
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    path = folder / f".look-{secrets.token_hex(6)}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
