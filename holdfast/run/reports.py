"""Reports of what workers have written for a checkpoint, left as files beside its data.

Training goes on while a checkpoint is written, so the group is busy then. A worker leaves its report beside
its data; the first one collects them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from holdfast.checkpoint import index
from holdfast.checkpoint.saving import Save, WriteReport, read_report, write_report
from holdfast.errors import CheckpointError

PATIENCE = 3.0  # seconds for a report that was written to be seen through a network's file system
FAILED = b"failed"


def post(save: Save, report: WriteReport | None) -> None:
    """Leaves this worker's report beside its data, or the word that there will be none."""
    target = save.path / index.report_name(save.id, save.ranks.rank)
    unfinished = target.with_suffix(".unfinished")
    try:
        unfinished.write_bytes(FAILED if report is None else write_report(report))
        unfinished.replace(target)  # under its name only when it is complete
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
    """All reports, in the order of the ranks. Does not wait for one that cannot come any more.

    None will come from a worker that is lost, nor from anybody once it is known that all have written
    what they ever will (``everywhere``).
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
