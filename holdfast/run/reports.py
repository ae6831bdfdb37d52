"""Reports of what workers have written for a checkpoint, left as files beside its data.

Training goes on while a checkpoint is written, so the group's connections are busy then. Each worker leaves its report
as a file beside its data, and the first worker collects them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from holdfast.checkpoint import index
from holdfast.checkpoint.places import Place, Remote
from holdfast.checkpoint.save_texts import WriteReport, read_report, write_report
from holdfast.checkpoint.saving import Save
from holdfast.errors import CheckpointError

LOOK_SECONDS = 0.01  # between two looks at a folder
STORE_LOOK_SECONDS = 0.1  # between two looks into an object store: each is a request
PATIENCE = 3.0  # seconds for a report to become visible on a network's file system, once no more will be written
PARTED_SECONDS = 10.0  # without a write to any file: then nobody writes, unless a disk takes so long for a flush
STORE_PARTED_SECONDS = 60.0  # the same for an object store, which shows nothing of an object before it is whole
FAILED = b"failed"  # content of the report of a worker that could not write its share


def post(save: Save, report: WriteReport | None) -> None:
    """Leave this worker's report beside its data; None: leave the note that its share could not be written.

    Raises ``OSError`` if a report cannot be written.
    """
    target = save.path / index.report_name(save.id, save.ranks.rank)
    content = FAILED if report is None else write_report(report)
    try:
        if isinstance(target, Remote):
            target.write_bytes(content)
            return
        unfinished = target.with_suffix(".unfinished")
        unfinished.write_bytes(content)
        unfinished.replace(target)  # it gets its name only when it is complete
    except OSError:
        if report is not None:
            raise


def collect(
    save: Save,
    members: Sequence[str],
    *,
    alive: Callable[[], Collection[str]],
    everywhere: threading.Event,
    parted: threading.Event,
) -> list[WriteReport]:
    """Wait for the reports of all members; return them by rank. Raises ``CheckpointError`` if one will never come.

    That is so if a member is not ``alive`` any more, or has not reported once ``everywhere`` is set: then all have
    written what they ever will. Once ``parted`` is set, this worker is sent away, and hears of nobody's death any more:
    then a member that writes nothing for ``PARTED_SECONDS`` (in a store ``STORE_PARTED_SECONDS``) counts as dead.
    """
    in_store = isinstance(save.path, Remote)
    look_seconds = STORE_LOOK_SECONDS if in_store else LOOK_SECONDS
    parted_seconds = STORE_PARTED_SECONDS if in_store else PARTED_SECONDS
    found: dict[int, bytes] = {}
    hopeless_since: float | None = None
    seen, changed = _traces(save.path), time.monotonic()
    while len(found) < len(members):
        for rank in range(len(members)):
            path = save.path / index.report_name(save.id, rank)
            if rank not in found and path.exists():
                found[rank] = path.read_bytes()
        failed = [members[rank] for rank, text in found.items() if text == FAILED]
        away = [name for rank, name in enumerate(members) if rank not in found]
        hopeless = everywhere.is_set() or any(name not in alive() for name in away)
        hopeless_since = (hopeless_since or time.monotonic()) if hopeless else None
        if parted.is_set() and (now := _traces(save.path)) != seen:
            seen, changed = now, time.monotonic()
        if parted.is_set() and hopeless_since is None and time.monotonic() - changed > parted_seconds:
            hopeless_since = changed
        if failed or (away and hopeless_since is not None and time.monotonic() - hopeless_since > PATIENCE):
            raise CheckpointError(f"worker {', '.join(failed or away)} did not write its share")
        if away:
            time.sleep(look_seconds)
    return [read_report(found[rank]) for rank in range(len(members))]


def _traces(folder: Place) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last write of each file in a folder. One that is gone meanwhile is left out.

    The size alone does not tell: room for a file is reserved before it is written.
    """
    found = {}
    for path in folder.iterdir():
        try:
            facts = path.stat()
        except OSError:
            continue
        found[path.name] = (facts.st_size, facts.st_mtime_ns)
    return found
