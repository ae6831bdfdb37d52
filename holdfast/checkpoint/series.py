"""The series of checkpoints of one run, ``step-00000012`` and so on, in its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

from holdfast.checkpoint import index
from holdfast.checkpoint.disk import discard, explained, sync_folder

_STEP = re.compile(r"step-(\d{8,})")


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint in the folder of its run.

    >>> folder_of(Path("runs"), 12).name
    'step-00000012'
    """
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """The steps that have a complete checkpoint, oldest first."""
    return sorted(step for step, folder in _folders(root) if index.exists(folder))


def newest(root: Path) -> Path | None:
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


def delete(root: Path, step: int) -> None:
    """Deletes a step's checkpoint, its index first: an interrupted deletion leaves stray files, no half checkpoint."""
    folder = folder_of(root, step)
    if folder.is_dir():
        with explained(folder, "delete"):
            (folder / index.NAME).unlink(missing_ok=True)
            sync_folder(folder)
        _remove(folder)


def clean(root: Path, *, before: int, idle: float = 0.0) -> None:
    """Removes what interrupted saves and deletions of steps before ``before`` have left.

    Only where nothing has changed for ``idle`` seconds: another worker may be about to commit.
    """
    for step, folder in _folders(root):
        if step < before and not index.exists(folder) and time.time() - folder.stat().st_mtime >= idle:
            _remove(folder)


def _remove(folder: Path) -> None:
    discard(index.litter(folder))
    try:
        folder.rmdir()
    except OSError:
        pass  # there is something in it that is not ours


def _folders(root: Path) -> list[tuple[int, Path]]:
    with explained(root, "read"):
        if not root.is_dir():
            return []
        found = [(int(m[1]), path) for path in root.iterdir() if (m := _STEP.fullmatch(path.name)) and path.is_dir()]
    return [(step, path) for step, path in found if path == folder_of(root, step)]
