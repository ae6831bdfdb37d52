"""The bookkeeper: has the ledger of a run's stream written, one record for each committed step."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from holdfast.commit.cohort import Cohort
from holdfast.data.feed import Feed
from holdfast.data.ledger import NAME, Ledger
from holdfast.engine.progress import Progress

logger = logging.getLogger(__name__)


class Bookkeeper:
    """This worker's part in keeping the ledger. ``folder``: that of the checkpoints; None: beside the events.

    Where there is neither, and for data without positions, there is no ledger.
    """

    def __init__(self, feed: Feed, progress: Progress, cohort: Cohort, folder: Path | None) -> None:
        self._progress, self._cohort = progress, cohort
        events = os.environ.get("HOLDFAST_EVENTS")
        place = folder or (Path(events).parent if events else None)
        facts = feed.facts
        self._ledger = None if facts is None else Ledger(None if place is None else place / NAME, facts)

    def begin(self) -> None:
        """Hear that a step begins. The record of the last one may still be missing."""
        if self._ledger is not None and self._progress.data is not None:
            self._ledger.hold(self._progress.data["record"])

    def end(self) -> None:
        """Have the record of the last committed step written, if this is the first worker, and nobody has."""
        data, group = self._progress.data, self._cohort.group
        if self._ledger is None or data is None or group is None:
            return
        generation = group.generation
        start, first = self._progress.start, group.is_first
        try:
            self._ledger.note(data["record"], start=start, workers=generation.workers, first=first)
        except OSError as e:
            logger.warning("the ledger of the stream cannot be written any more: %s", e)
            self._ledger = None

    def sync(self) -> None:
        """Bring the records to the disk, because a checkpoint is about to be taken."""
        if self._ledger is not None:
            self._ledger.sync()
