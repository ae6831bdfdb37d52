"""Checkpoints of a run: taken between two steps, written beside the training.

Each worker writes its share of what it holds: a layer that several hold is shared out among them. That all have
taken the snapshot is voted on, as everything is; the writing is not, and a worker that is lost in the
middle of it costs this checkpoint and nothing else.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Sequence

from holdfast.checkpoint import index, series
from holdfast.checkpoint.background import Work
from holdfast.checkpoint.safetensors_writer import StagedImage
from holdfast.checkpoint.saving import Save, WriteReport
from holdfast.cluster import faults
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.texts import Texts
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import Kind, Operation
from holdfast.engine.state import State
from holdfast.errors import Broken, CheckpointError, HoldfastError
from holdfast.log.log import Log
from holdfast.plan import save_interval
from holdfast.recovery.resume import Resumer
from holdfast.recovery.resume import Settings as Settings
from holdfast.run.reports import collect, post

PATIENCE_SECONDS = 10.0  # that training waits for the last checkpoint to be written, before it does without one
LONGEST_SECONDS = 600.0  # that a worker which leaves waits for its disk
SKIP = -1e12  # the vote of one who cannot take part, whatever the others say
logger = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
LITTER_SECONDS = 600.0  # after which what lies in an unfinished checkpoint's folder is nobody's


class Saver(Resumer):
    """Takes checkpoints when they are due, and finds the newest one at the begin.

    What all workers must agree on is in ``state.progress``.
    """

    def __init__(self, settings: Settings, state: State, events: Events, log: Log | None = None) -> None:
        super().__init__(settings, state, events)
        self._log = log
        self._taken: list[int] = []  # checkpoints that may be durable by now, and let go of what was logged before them
        self.costs = save_interval.SaveCosts()
        self._born = time.monotonic()
        self._staged = StagedImage()
        self._members: list[str] = []  # who writes the snapshot that is staged
        self._save: Save | None = None
        self._works: list[Work] = []
        self._written = threading.Event()  # this worker has written its share of the last one
        self._written.set()
        self._everywhere = threading.Event()  # and so has everybody, or never will

    # --- saving ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written."""
        return not self._written.is_set()

    def is_due(self, cohort: Cohort, *, last: bool = False) -> bool:
        """Whether a checkpoint is due. All decide alike: from what they share, and from a vote they have seen."""
        progress = self._state.progress
        if not progress.step and progress.due is None:  # nothing is trained, and no log begins with a checkpoint
            return False
        first = self.settings.first if progress.due is None else progress.due
        return (last or cohort.everybody_leaves or progress.step >= first) and progress.step != progress.saved

    def if_due(self, cohort: Cohort, *, last: bool = False) -> None:
        """Between two steps."""
        self._forget_records()
        if self.is_due(cohort, last=last):
            faults.at_step(self._state.progress.step)
            cohort.commit(TakeCheckpoint(self, cohort, self._state.progress.step))
        if cohort.everybody_leaves:
            self.settle(cohort)

    def _forget_records(self) -> None:
        """Those of steps before the newest durable checkpoint: one with an index, which is written last."""
        if self._log is None:
            return
        for step in reversed(self._taken):
            if index.exists(series.folder_of(self.settings.root, step)):
                self._log.drop(step)
                self._taken = [later for later in self._taken if later > step]
                return

    def settle(self, cohort: Cohort) -> None:
        """Before all leave: returns when the last checkpoint is there, taken again if who should commit it is lost."""
        progress = self._state.progress
        for again in (False, True):
            cohort.commit(Flush(self))
            there = cohort.commit(LookForCheckpoint(self))
            if there or again or not progress.step:
                return
            progress.saved = None
            cohort.commit(TakeCheckpoint(self, cohort, progress.step))

    def last_exists(self) -> bool:
        """Whether the last checkpoint is complete, after waiting for it. All have written their share by now."""
        self._everywhere.set()
        self.leave()
        saved = self._state.progress.saved
        return saved is not None and index.exists(series.folder_of(self.settings.root, saved))

    def attempt(self, group: Group, step: int) -> float:
        """Take the snapshot; return the number of steps to the next one, or ``SKIP`` if it cannot be had."""
        begin = time.monotonic()
        try:
            self._snapshot(group, step)
        except Broken:
            raise
        except Exception as e:
            self._complain(step, e)
            return SKIP
        self.costs.save(stall=time.monotonic() - begin)
        return min(self._steps_to_next(), self._longest or math.inf) if group.rank == 0 else 0.0

    def apply(self, cohort: Cohort, step: int, steps: float) -> None:
        """All have the snapshot, unless ``steps`` is negative: write it, and note when the next one is due."""
        skipped = steps < 0  # somebody could not take part
        self._state.progress.saved = step
        self._state.progress.due = step + (self.settings.first if skipped else int(steps))
        if not skipped:
            self._start(cohort, step)
            self._taken.append(step)
            if self._log is not None and not self._log.usable:
                self._log.renew()  # from here on it is whole again

    def _snapshot(self, group: Group, step: int) -> None:
        if not self.flush(PATIENCE_SECONDS):  # the staging area is still being written from
            raise CheckpointError("the last one is still being written", hint="a slow disk? save less often")
        ranks = Texts(group, self._state.model.device)
        self._save = Save(series.folder_of(self.settings.root.absolute(), step), self._state.tree(), ranks)
        self._staged.take(self._save.image)
        self._members = group.generation.workers
        faults.point("snapshot")

    def _start(self, cohort: Cohort, step: int) -> None:
        self._everywhere.set()  # each has flushed before it voted
        self._written, self._everywhere = threading.Event(), threading.Event()
        assert self._save is not None
        words = (self._save, step, cohort, self._written, self._everywhere)
        work = Work(lambda: self._carry_out(*words), f"checkpoint {step}")
        self._works = [*(known for known in self._works if not known.done), work]

    def _steps_to_next(self) -> float:
        if self.settings.every != "auto":
            return float(self.settings.every)
        step_seconds, lost_seconds = self.costs.step_seconds, self.costs.lost_seconds
        if step_seconds is None or lost_seconds is None:
            return float(save_interval.FIRST)
        resumed = self._state.progress.resumed
        between = self._seconds() / resumed if resumed else None
        chosen = save_interval.choose(step_seconds=step_seconds, lost_seconds=lost_seconds, between_failures=between)
        self._events.write("interval", steps=chosen.steps, reason=chosen.reason)
        return float(chosen.steps)

    def _seconds(self) -> float:
        """How long this run has trained, over all its starts."""
        return self._state.progress.seconds + time.monotonic() - self._born

    def _carry_out(
        self, save: Save, step: int, cohort: Cohort, written: threading.Event, everywhere: threading.Event
    ) -> None:
        """In a thread of its own: writes this worker's share; the first worker then waits for the others'."""
        members = self._members
        try:
            faults.point("write")
            try:
                post(save, save.write(self._staged.fill, threads=2))
            except BaseException:
                post(save, None)  # whoever commits need not wait for us
                raise
            finally:
                written.set()
            if save.ranks.rank == 0:
                self._commit(save, step, collect(save, members, alive=lambda: cohort.workers, everywhere=everywhere))
        except Exception as e:
            self._complain(step, e)

    def _commit(self, save: Save, step: int, reports: Sequence[WriteReport]) -> None:
        faults.point("commit")
        save.details["seconds"] = self._seconds()
        save.commit(reports)
        self._events.write("checkpoint", step=step, bytes=sum(report.written.bytes for report in reports))
        try:
            self._retire(step)
        except (HoldfastError, OSError) as e:
            logger.warning("cannot remove old checkpoints: %s", e)

    def _retire(self, newest: int) -> None:
        """Newer ones can only be such as could not be resumed from; they are not what is kept."""
        root, settings = self.settings.root, self.settings
        steps = [step for step in series.steps_in(root) if step <= newest]
        for old in series.to_delete(steps, keep=settings.keep, keep_every=settings.keep_every):
            series.delete(root, old)
        series.clean(root, before=newest, idle=LITTER_SECONDS)

    def _complain(self, step: int, error: Exception) -> None:
        """A checkpoint that cannot be had is no reason to stop training; silence would be one."""
        if self._log is not None and isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            self._log.give_up("the disk has no room for a checkpoint")  # its files may be what fills it
        self._events.write("checkpoint-failed", step=step, reason=str(error))
        logger.warning("no checkpoint of step %d: %s; training goes on", step, error)

    def flush(self, seconds: float) -> bool:
        """Whether this worker has written its share of the last checkpoint, after waiting for so long."""
        return self._written.wait(seconds)

    def leave(self) -> None:
        """Returns when this worker writes no more."""
        if self.flush(LONGEST_SECONDS):
            for work in self._works:
                work.join(LONGEST_SECONDS)


class TakeCheckpoint(Operation):
    """A checkpoint as an operation: all have taken the snapshot. Its value is the number of steps to the next one."""

    kind: Kind = "checkpoint"

    def __init__(self, saver: Saver, cohort: Cohort, step: int) -> None:
        self._saver, self._cohort, self._after = saver, cohort, step

    def attempt(self, group: Group) -> list[float]:
        return [self._saver.attempt(group, self._after)]

    def apply(self, value: float) -> None:
        self._saver.apply(self._cohort, self._after, value)


class Flush(Operation):
    """Everybody has written its share of the last checkpoint."""

    kind: Kind = "checkpoint"

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def attempt(self, group: Group) -> list[float]:
        self._saver.flush(LONGEST_SECONDS)
        return []


class LookForCheckpoint(Operation):
    """The first worker's word whether the last checkpoint exists: 1 or 0."""

    kind: Kind = "checkpoint"

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def attempt(self, group: Group) -> list[float]:
        return [0.0 if group.rank else float(self._saver.last_exists())]
