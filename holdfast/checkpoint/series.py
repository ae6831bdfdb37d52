"""The series of checkpoints of one run, ``step-00000012`` and so on, in its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from holdfast.checkpoint import index
from holdfast.checkpoint.disk import discard, explained, sync_folder
from holdfast.checkpoint.places import Place, Remote
from holdfast.checkpoint.s3_uploads import Upload, abort_uploads
from holdfast.checkpoint.shared_files import FOLDER, SHARING, is_shared
from holdfast.errors import CheckpointError

P = TypeVar("P", Path, Remote, Place)
_STEP = re.compile(r"step-(\d{8,})")


def folder_of(root: P, step: int) -> P:
    """The folder of a step's checkpoint in the folder of its run.

    >>> folder_of(Path("runs"), 12).name
    'step-00000012'
    """
    return root / f"step-{step:08d}"


def is_step(path: Place) -> bool:
    """Whether a folder's name is that of a checkpoint in a series.

    >>> is_step(Path("runs/gpt/step-00000012")), is_step(Path("runs/gpt/best"))
    (True, False)
    """
    found = _STEP.fullmatch(path.name)
    return found is not None and path.name == folder_of(path.parent, int(found[1])).name


def steps_in(root: Place) -> list[int]:
    """The steps that have a complete checkpoint, oldest first."""
    return sorted(step for step, folder in _folders(root) if index.exists(folder))


def newest(root: P) -> P | None:
    """The newest complete checkpoint in a run's folder; None if there is none."""
    steps = steps_in(root)
    return folder_of(root, steps[-1]) if steps else None


def to_delete(steps: Iterable[int], *, keep: int, keep_every: int | None) -> list[int]:
    """The steps whose checkpoints may be deleted: all but the newest ``keep`` and each ``keep_every``-th step.

    >>> to_delete([10, 20, 30, 40], keep=2, keep_every=20)
    [10]
    """
    ordered = sorted(steps)
    return [s for s in ordered[: max(len(ordered) - keep, 0)] if not keep_every or s % keep_every]


def delete(root: Place, step: int) -> None:
    """Deletes a step's checkpoint, its index first: an interrupted deletion leaves stray files, no half checkpoint."""
    folder = folder_of(root, step)
    if folder.is_dir():
        with explained(folder, "delete"):
            (folder / index.NAME).unlink(missing_ok=True)
            sync_folder(folder)
        _remove(folder)


def clean(root: Place, *, before: int, idle: float = 0.0) -> None:
    """Removes what interrupted saves and deletions of steps before ``before`` have left.

    Only where nothing has changed for ``idle`` seconds: another worker may be about to commit.
    """
    for step, folder in _folders(root):
        if step < before and not index.exists(folder) and _idle_seconds(folder) >= idle:
            _remove(folder)
    abort_uploads(root, lambda upload: _is_stray(upload, root, before, idle))


def _idle_seconds(folder: Place) -> float:
    """The seconds since something has changed in a folder; 0 if there is none, as others remove it too."""
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_stray(upload: Upload, root: Place, before: int, idle: float) -> bool:
    """Whether an upload to a store is of a checkpoint of an earlier step, and nobody has gone on with it for long."""
    found, folder = _STEP.fullmatch(upload.place.parent.name), upload.place.parent
    return found is not None and folder.parent == root and int(found[1]) < before and time.time() - upload.since >= idle


def clean_shared(root: Place, *, guard: Callable[[], object] = lambda: None) -> None:
    """Removes shared files that no checkpoint of the series needs. ``guard`` raises if this process may not do it.

    A file stays if an index refers to it, and also if the save that wrote it has other files in a checkpoint's folder:
    it may still be going on. Nothing is removed if an index cannot be read: nobody knows then what it refers to.
    """
    shared = root / FOLDER
    if not shared.is_dir():
        return
    with SHARING, explained(shared, "delete"):
        needed: set[str] = set()
        saves: set[str] = set()
        for _, folder in _folders(root):
            saves |= {index.save_of(path.name) for path in index.litter(folder)}
            if index.exists(folder):
                try:
                    needed |= {Path(name).name for name in index.files_of(folder) if is_shared(name)}
                except CheckpointError:
                    return
        useless = [
            path for path in index.litter(shared) if path.name not in needed and index.save_of(path.name) not in saves
        ]
        if useless:
            guard()
            discard(useless)


def _remove(folder: Place) -> None:
    discard(index.litter(folder))
    try:
        folder.rmdir()
    except OSError:
        pass  # there is something in it that is not ours


def _folders(root: P) -> list[tuple[int, P]]:
    with explained(root, "read"):
        if not root.is_dir():
            return []
        found = [(int(m[1]), path) for path in root.iterdir() if (m := _STEP.fullmatch(path.name)) and path.is_dir()]
    return [(step, path) for step, path in found if path == folder_of(root, step)]
