"""``latest``: the newest sound checkpoint of a run's folder, for scripts that may begin anew."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from holdfast.checkpoint import index, lease, series
from holdfast.checkpoint.disk import explained
from holdfast.checkpoint.places import Place, Remote, place_of
from holdfast.errors import CheckpointError, UsageError

TERMS = 8  # newest checkpoints whose writers are compared: one that had lost the lease commits one or two at most
logger = logging.getLogger(__name__)


def latest(folder: str | os.PathLike[str] | Remote) -> Place | None:
    """The path of the newest sound checkpoint in a run's folder; None if there is none, or no folder yet.

    Sound is a checkpoint whose index is whole, and whose data files are there with their lengths. The data itself is
    checked when it is read. A newer one that is not sound is skipped, and logged as a warning. Of a folder that is
    itself a checkpoint, it is the folder. On several ranks all ask, and ``load`` refuses ranks with different answers.

    Raises ``CheckpointError`` if there are checkpoints, but none is sound: to begin anew would hide the damage.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from holdfast.checkpoint import save
    >>> folder = Path(tempfile.mkdtemp())
    >>> latest(folder) is None
    True
    >>> save(folder / "step-00000007", {"step": 7})
    >>> latest(folder).name
    'step-00000007'
    """
    if not isinstance(folder, str | os.PathLike | Remote):
        raise UsageError(f"{folder!r} is no folder of checkpoints", hint="a path, as in 'runs/gpt'")
    root = place_of(folder)
    with explained(root, "read"):
        is_file = root.is_file()
    if is_file:
        raise CheckpointError(
            f"{root} is a file", hint="the folder of a run's checkpoints, or one that is not there yet"
        )
    if index.exists(root):
        index.open(root)
        return root
    steps = series.steps_in(root)
    left_out = superseded(root, steps)
    failures: list[CheckpointError] = []
    for step in reversed([step for step in steps if step not in left_out]):
        place = series.folder_of(root, step)
        try:
            index.open(place)
        except CheckpointError as e:
            logger.warning("%s is not sound: %s", place, e)
            failures.append(e)
        else:
            return place
    if failures:
        raise CheckpointError(f"no checkpoint in {root} is sound; of the newest: {failures[0]}")
    return None


def superseded(root: Place, steps: Sequence[int]) -> list[int]:
    """The steps among the newest whose checkpoints come from a worker that had lost the lease. Logs each."""
    found = sorted(lease.superseded([(step, _term(series.folder_of(root, step))) for step in steps[-TERMS:]]))
    for step in found:
        logger.warning("the checkpoint of step %d is left out: the run went on from an earlier one", step)
    return found


def _term(folder: Place) -> int | None:
    """The term of a checkpoint's writer; None if it has none, or cannot be read."""
    try:
        term = index.read(folder).details.get("term")
    except CheckpointError:
        return None
    return term if isinstance(term, int) else None
