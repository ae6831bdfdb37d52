"""Reports of what workers have written for a checkpoint, left as files beside its data.

Training goes on while a checkpoint is written, so the group's connections are busy then. Each worker leaves its report
as a file beside its data, and the first worker collects them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from holdfast.checkpoint import index
from holdfast.checkpoint.saving import Save, WriteReport, read_report, write_report
from holdfast.errors import CheckpointError

PATIENCE = 3.0  # seconds for a report to become visible on a network's file system, once no more will be written
FAILED = b"failed"  # content of the report of a worker that could not write its share


def post(save: Save, report: WriteReport | None) -> None:
    """Leave this worker's report beside its data; None: leave the note that its share could not be written.

    Raises ``OSError`` if a report cannot be written.
    """
    target = save.path / index.report_name(save.id, save.ranks.rank)
    unfinished = target.with_suffix(".unfinished")
    try:
        unfinished.write_bytes(FAILED if report is None else write_report(report))
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
) -> list[WriteReport]:
    """Wait for the reports of all members; return them by rank. Raises ``CheckpointError`` if one will never come.

    That is so if a member is not ``alive`` any more, or has not reported once ``everywhere`` is set: then all have
    written what they ever will.
    """
    found: dict[int, bytes] = {}
    hopeless_since: float | None = None
    while len(found) < len(members):
        for rank in range(len(members)):
            path = save.path / index.report_name(save.id, rank)
            if rank not in found and path.exists():
                found[rank] = path.read_bytes()
        failed = [members[rank] for rank, text in found.items() if text == FAILED]
        away = [name for rank, name in enumerate(members) if rank not in found]
        hopeless = everywhere.is_set() or any(name not in alive() for name in away)
        hopeless_since = (hopeless_since or time.monotonic()) if hopeless else None
        if failed or (away and hopeless_since is not None and time.monotonic() - hopeless_since > PATIENCE):
            raise CheckpointError(f"worker {', '.join(failed or away)} did not write its share")
        if away:
            time.sleep(0.01)
    return [read_report(found[rank]) for rank in range(len(members))]
