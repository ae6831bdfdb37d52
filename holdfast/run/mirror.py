"""The mirror: copies a run's checkpoints from a fast folder to an object store, one at a time, in the background.

Whenever it is free it takes the newest one that is complete. So a slow store gets fewer of them, and training waits for
none. The store's folder has a lease of its own: another run may have the same store, and another local folder.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from holdfast.checkpoint import series
from holdfast.checkpoint.background import Work
from holdfast.checkpoint.copying import copy_to_store
from holdfast.checkpoint.places import Remote
from holdfast.cluster.events import Events
from holdfast.errors import HoldfastError
from holdfast.recovery.fence import Fence

logger = logging.getLogger(__name__)


class Mirror:
    """This worker's part in it: only the first worker of a generation copies. ``keep`` …: as in ``Checkpoints``."""

    def __init__(
        self, local: Path, store: Remote, fence: Fence, events: Events, *, keep: int, keep_every: int | None
    ) -> None:
        self._local, self._store, self._fence, self._events = local.absolute(), store, fence, events
        self._keep, self._keep_every = keep, keep_every
        self._lock = threading.Lock()
        self._wanted: int | None = None  # the newest step that is complete, and not yet begun
        self._copying: int | None = None
        self._work: Work | None = None

    def offer(self, step: int) -> None:
        """Note that a checkpoint is complete; it is copied unless a newer one is before its turn comes."""
        with self._lock:
            self._wanted = step
            if self._work is None:
                self._work = Work(self._carry_out, f"copying {self._local} to {self._store}")

    @property
    def held(self) -> frozenset[int]:
        """The steps whose local checkpoints have to stay until they are copied."""
        with self._lock:
            return frozenset(step for step in (self._wanted, self._copying) if step is not None)

    def finish(self, seconds: float) -> None:
        """Wait until the newest checkpoint is copied, or cannot be, at most so long."""
        with self._lock:
            work = self._work
        if work is not None:
            work.join(seconds)

    def _carry_out(self) -> None:
        while True:
            with self._lock:
                self._copying, self._wanted = self._wanted, None
                if self._copying is None:
                    self._work = None
                    return
                step = self._copying
            self._copy(step)

    def _copy(self, step: int) -> None:
        begin = time.monotonic()
        try:
            self._fence.check()
            source, target = series.folder_of(self._local, step), series.folder_of(self._store, step)
            written = copy_to_store(source, target, guard=self._fence.check)
            self._events.write("mirrored", step=step, bytes=written, seconds=round(time.monotonic() - begin, 3))
            self._retire(step)
        except (HoldfastError, OSError) as e:
            self._events.write("mirror-failed", step=step, reason=str(e))
            logger.warning("the checkpoint of step %d is not in %s: %s; training goes on", step, self._store, e)

    def _retire(self, newest: int) -> None:
        steps = [step for step in series.steps_in(self._store) if step <= newest]
        for old in series.to_delete(steps, keep=self._keep, keep_every=self._keep_every):
            self._fence.check()
            series.delete(self._store, old)
        self._fence.check()
        series.clean(self._store, before=newest)
        series.clean_shared(self._store, guard=self._fence.check)
