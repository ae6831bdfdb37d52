"""The saver: takes a run's checkpoints between two steps, and writes them while training goes on.

Workers that hold the same layer share the writing of it. The snapshot is an operation that all vote on. The writing is
not: a worker that is lost in the middle of it costs this checkpoint and nothing else.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.checkpoint import index, series
from holdfast.checkpoint.background import Work
from holdfast.checkpoint.lease import Superseded, Taken
from holdfast.checkpoint.places import Remote
from holdfast.checkpoint.safetensors_writer import StagedImages
from holdfast.checkpoint.save_texts import WriteReport
from holdfast.checkpoint.saving import Save
from holdfast.cluster import faults, lifeline
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Generation
from holdfast.cluster.texts import Everybody, Texts
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import Kind, Operation
from holdfast.engine.state import State
from holdfast.errors import Broken, CheckpointError, HoldfastError
from holdfast.log.log import Log
from holdfast.plan import save_interval
from holdfast.recovery.fence import claim_of
from holdfast.recovery.resume import Checkpoints, Resumer
from holdfast.run.mirror import Mirror
from holdfast.run.reports import collect, post

PATIENCE_SECONDS = 10.0  # training waits so long for the last checkpoint to be written, then skips the new one
LONGEST_SECONDS = 600.0  # a worker that leaves waits so long for its disk: the last checkpoint is worth it
PROGRESS_SECONDS = 0.2  # between two reports of how much of the last checkpoint is written
SKIP = -1e12  # value of a worker that cannot take part: negative enough to make the sum of all values negative
logger = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of a full disk, and of a used-up quota
LITTER_SECONDS = 600.0  # an unfinished checkpoint that nobody has written to for so long is removed


class Saver(Resumer):
    """Takes checkpoints when they are due. As a ``Resumer`` it also reads the newest one at the begin.

    Everything that workers must agree on is in ``state.progress``. ``log``: the tensor log, whose records before a
    durable checkpoint are dropped; None: there is none.
    """

    def __init__(self, settings: Checkpoints, state: State, events: Events, log: Log | None = None) -> None:
        super().__init__(settings, state, events)
        self._log = log
        self._taken: list[int] = []  # steps of checkpoints that may be durable by now; older records can go then
        self.costs = save_interval.SaveCosts()
        self._born = time.monotonic()
        self._staged = StagedImages()
        self._members: list[str] = []  # the workers that write the staged snapshot
        self._save: Save | None = None
        self._works: list[Work] = []
        self._written = threading.Event()  # this worker has written its share of the last checkpoint
        self._written.set()
        self._everywhere = threading.Event()  # every worker has written its share of it, or never will
        self._parted = threading.Event()  # this worker leaves, or is sent away: it hears of nobody's death any more
        self._tried: int | None = None  # the step of the last checkpoint that this worker has taken part in
        self.failure = ""  # why this worker could not do its part of the last checkpoint that failed
        self._mirror = self._make_mirror()

    def _make_mirror(self) -> Mirror | None:
        settings, store = self.settings, self.settings.store
        if store is None or self.store_fence is None:
            return None
        places = Path(settings.root), store
        return Mirror(*places, self.store_fence, self._events, keep=settings.keep, keep_every=settings.keep_every)

    def enter(self, generation: Generation, worker: str, *, leads: bool = True) -> None:
        """Hold the lease of the folder in the name of a new generation, if this worker is its first.

        ``leads``: whether this process speaks for it, and is not a further rank of a team.
        """
        claim, first = claim_of(generation, worker), leads and generation.rank_of(worker) == 0
        for fence in filter(None, (self.fence, self.store_fence)):
            fence.enter(claim, first=first)

    def dismiss(self) -> None:
        """Note that this worker leaves as it was asked to, and the run goes on without it."""
        for fence in filter(None, (self.fence, self.store_fence)):
            fence.dismiss()

    def release(self) -> None:
        """Give the leases back, if this worker has them, when the newest checkpoint is in the store, too."""
        if self._mirror is not None:
            self._mirror.finish(LONGEST_SECONDS)
        for fence in filter(None, (self.fence, self.store_fence)):
            fence.release()

    # --- saving ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written."""
        return not self._written.is_set()

    def is_due(self, cohort: Cohort, *, last: bool = False) -> bool:
        """Whether a checkpoint is due. All workers get the same answer: it depends only on what they share.

        ``last``: training ends here.
        """
        progress = self._state.progress
        if not progress.step and progress.due is None:  # nothing is trained, and no log begins with a checkpoint
            return False
        first = self.settings.first if progress.due is None else progress.due
        return (last or cohort.everybody_leaves or progress.step >= first) and progress.step != progress.saved

    def if_due(self, cohort: Cohort, *, last: bool = False) -> None:
        """Take a checkpoint if one is due, and drop log records that are not needed. Call it between two steps.

        Raises ``lease.Taken`` or ``lease.Superseded`` if the folder was lost to another run, or to a newer generation.
        """
        self.fence.raise_if_lost()
        self._forget_records()
        if self.is_due(cohort, last=last):
            faults.at_step(self._state.progress.step)
            cohort.commit(TakeCheckpoint(self, cohort, self._state.progress.step))
        if cohort.everybody_leaves:
            step = self._state.progress.step
            try:
                self.settle(cohort)
                lifeline.report("saved", step=step)
            except CheckpointError as e:  # the agent says so, and ends with another code
                lifeline.report("unsaved", step=step, reason=f"the last checkpoint failed: {e}", wanted=True)

    def _forget_records(self) -> None:
        """Drop the log's records of steps before the newest durable checkpoint.

        A checkpoint with an index is durable: the index is written last.
        """
        if self._log is None:
            return
        if isinstance(self.settings.root, Remote) and any(not work.done for work in self._works):
            return  # a look is a request there, and training waits for it
        for step in reversed(self._taken):
            if index.exists(series.folder_of(self.settings.root, step)):
                self._log.drop(step)
                self._taken = [later for later in self._taken if later > step]
                return

    def settle(self, cohort: Cohort) -> None:
        """Wait until the last checkpoint is durable, before all leave.

        It is taken once more if it does not exist: the worker that should have committed it may be lost. Raises
        ``CheckpointError`` on all workers if it does not exist then either: a run must not seem to have ended well.
        """
        progress = self._state.progress
        for again in (False, True):
            cohort.commit(Flush(self))
            look = LookForCheckpoint(self, self._state.model.device)
            if cohort.commit(look) or not progress.step:
                return
            if again:
                raise unsaved(progress.step, look.failure)
            progress.saved = None
            cohort.commit(TakeCheckpoint(self, cohort, progress.step))

    def last_exists(self) -> bool:
        """Wait for the last checkpoint; return whether it is complete. All have written their share by now."""
        self._everywhere.set()
        self.leave()
        saved = self._state.progress.saved
        if saved is None:
            return False
        folder = self.folder_of(saved)
        try:
            # A run that went back to an older checkpoint may have found a damaged one of this step.
            return index.exists(folder) and (
                self._tried != saved or index.read(folder).details.get("run") == self._mark
            )
        except CheckpointError as e:
            self.failure = self.failure or str(e)
            return False

    def fail_if_unsaved(self) -> None:
        """Raise ``CheckpointError`` if the last checkpoint that was to be saved does not exist. For one process."""
        saved = self._state.progress.saved
        if saved is not None and not self.last_exists():
            raise unsaved(saved, self.failure)

    def attempt(self, group: Group, step: int) -> float:
        """Take the snapshot; return the number of steps to the next one, or ``SKIP`` if it failed.

        Only the first worker returns a number: the vote adds up all values. Raises ``Broken``.
        """
        begin = time.monotonic()
        failed = False
        try:
            self._snapshot(group, step)
        except Broken:
            raise
        except Exception as e:
            self._complain(step, e)
            failed = True
        if any(group.team.exchange("the end of a snapshot", failed)):
            return SKIP
        self.costs.save(stall=time.monotonic() - begin)
        return min(self._steps_to_next(), self._longest or math.inf) if group.is_first else 0.0

    def apply(self, cohort: Cohort, step: int, steps: float) -> None:
        """Begin to write the snapshot, and note when the next one is due. ``steps``: the sum of all values."""
        skipped = steps < 0  # some worker has returned SKIP
        self._state.progress.saved = step
        self._state.progress.due = step + (self.settings.first if skipped else int(steps))
        if not skipped:
            self._start(cohort, step)
            self._taken.append(step)
            if self._log is not None and not self._log.usable:
                self._log.renew()  # a log that begins at a checkpoint is complete

    def _snapshot(self, group: Group, step: int) -> None:
        """Copy this worker's share of the state to the staging area. Raises ``CheckpointError`` if it is in use."""
        self.failure, self._tried = "", step
        if not all(group.team.exchange("the begin of a snapshot", self.flush(PATIENCE_SECONDS))):
            raise CheckpointError("the last one is still being written", hint="a slow disk? save less often")
        ranks = Everybody(group, self._state.model.device)
        if ranks.rank == 0 and self._save is not None and self._save.is_first_with_frozen:
            for work in self._works:  # else frozen weights would be written twice: only a committed index tells of them
                work.join(PATIENCE_SECONDS)
        place, only = series.folder_of(self.settings.root.absolute(), step), self.settings.trainable_only
        self._save = Save(place, self._state.tree(), ranks, trainable_only=only)
        self._save.details["rows"] = [*self._state.progress.rows]  # of the first worker, which writes the index
        self._staged.take(self._save.images)
        self._members = ranks.workers
        faults.point("snapshot")

    def _start(self, cohort: Cohort, step: int) -> None:
        """Write the staged snapshot in a thread."""
        self._everywhere.set()  # of the checkpoint before: every worker has written its share before it voted
        self._written, self._everywhere = threading.Event(), threading.Event()
        assert self._save is not None
        before = [work for work in self._works if not work.done]
        words = (self._save, step, cohort, self._written, self._everywhere, before)
        work = Work(lambda: self._carry_out(*words), f"checkpoint {step}")
        self._works = [*before, work]

    def _steps_to_next(self) -> float:
        """Return the user's interval, or the one that loses the least time by saves and failures."""
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
        """Return the seconds that this run has trained, over all its starts."""
        return self._state.progress.seconds + time.monotonic() - self._born

    def _carry_out(
        self,
        save: Save,
        step: int,
        cohort: Cohort,
        written: threading.Event,
        everywhere: threading.Event,
        before: Sequence[Work],
    ) -> None:
        """Write this worker's share; the first worker then waits for the others and commits. Runs in a thread.

        ``before``: threads of earlier checkpoints. They commit first: who commits removes what is old by then.
        """
        members = self._members
        try:
            faults.point("write", step=step)
            try:
                if save.ranks.rank == 0:
                    self.fence.check()  # it removes what killed saves have left for this step
                post(save, save.write(self._staged.fills, _Progress(save, step, cohort), threads=2))
            except BaseException:
                post(save, None)  # so that the first worker does not wait for this share
                raise
            finally:
                written.set()
            if save.ranks.rank == 0:
                signs = {"everywhere": everywhere, "parted": self._parted}
                reports = collect(save, members, alive=lambda: cohort.workers, **signs)
                for work in before:
                    work.join(LONGEST_SECONDS)
                self._commit(save, step, reports)
        except Exception as e:
            self._complain(step, e)

    def _commit(self, save: Save, step: int, reports: Sequence[WriteReport]) -> None:
        """Write the index, which makes the checkpoint complete, and remove old checkpoints."""
        faults.point("commit", step=step)
        note = self.fence.check()
        save.details |= {"run": note.claim.run, "epoch": note.claim.epoch, "term": note.term}
        save.details["seconds"] = self._seconds()
        save.commit(reports, guard=self.fence.check)
        self._events.write("checkpoint", step=step, bytes=sum(report.bytes for report in reports))
        if self._mirror is not None:
            self._mirror.offer(step)
        try:
            self._retire(step)
        except (HoldfastError, OSError) as e:  # also if the lease was lost while the index got its name
            logger.warning("old checkpoints are not removed: %s", e)

    def _retire(self, newest: int) -> None:
        """Remove old checkpoints, as the settings say.

        Checkpoints of later steps are left out of the count: they could not be resumed from.
        """
        root, settings = self.settings.root, self.settings
        steps = [step for step in series.steps_in(root) if step <= newest]
        held = frozenset() if self._mirror is None else self._mirror.held
        for old in series.to_delete(steps, keep=settings.keep, keep_every=settings.keep_every):
            if old in held:
                continue
            self.fence.check()
            series.delete(root, old)
        self.fence.check()
        series.clean(root, before=newest, idle=LITTER_SECONDS)
        series.clean_shared(root, guard=self.fence.check)

    def _complain(self, step: int, error: Exception) -> None:
        """Report that a checkpoint failed. Training goes on without it."""
        if self._log is not None and isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            self._log.give_up("the disk has no room for a checkpoint")  # the log's files may be what fills the disk
        self.failure = str(error)
        if isinstance(error, Taken | Superseded):
            logger.error("checkpoint of step %d: %s", step, error)
            return
        self._events.write("checkpoint-failed", step=step, reason=str(error))
        logger.warning("no checkpoint of step %d: %s; training goes on", step, error)

    def flush(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until this worker has written its share of the last checkpoint; return whether."""
        return self._written.wait(seconds)

    def leave(self) -> None:
        """Wait until this worker writes nothing more, at most ``LONGEST_SECONDS`` for each file."""
        self._parted.set()
        if self.flush(LONGEST_SECONDS):
            for work in self._works:
                work.join(LONGEST_SECONDS)


class _Progress:
    """Counts the bytes that this worker has written of a checkpoint. If all leave, its agent shows it."""

    def __init__(self, save: Save, step: int, cohort: Cohort) -> None:
        self._size, self._step, self._cohort = save.size, step, cohort
        self._done, self._told = 0, 0.0
        self(0)

    def __call__(self, done: int) -> None:
        self._done += done  # by two threads at times: a percentage need not be exact
        if self._cohort.everybody_leaves and time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            lifeline.report("saving", step=self._step, done=self._done, size=self._size)


class TakeCheckpoint(Operation):
    """The operation that takes a snapshot on all workers. Its value is the number of steps to the next one."""

    kind: Kind = "checkpoint"

    def __init__(self, saver: Saver, cohort: Cohort, step: int) -> None:
        self._saver, self._cohort, self._after = saver, cohort, step

    def attempt(self, group: Group) -> list[float]:
        return [self._saver.attempt(group, self._after)]

    def apply(self, value: float) -> None:
        self._saver.apply(self._cohort, self._after, value)


class Flush(Operation):
    """The operation after which every worker has written its share of the last checkpoint."""

    kind: Kind = "checkpoint"

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def attempt(self, group: Group) -> list[float]:
        self._saver.flush(LONGEST_SECONDS)
        return []


class LookForCheckpoint(Operation):
    """The operation that finds out whether the last checkpoint exists. The first worker looks; its value is 1 or 0.

    ``failure``: why it does not exist, as far as any worker knows.
    """

    kind: Kind = "checkpoint"

    def __init__(self, saver: Saver, device: torch.device) -> None:
        self._saver, self._device = saver, device
        self.failure = ""

    def attempt(self, group: Group) -> list[float]:
        there = self._saver.last_exists()
        first, *others = Texts(group, self._device).exchange(self._saver.failure.encode())
        # The first worker may only know that another one has failed: that one knows why.
        self.failure = next((text.decode() for text in (*others, first) if text), "")
        return [0.0 if group.rank else float(there)]


def unsaved(step: int, failure: str) -> CheckpointError:
    """Return the error for a run whose last checkpoint does not exist."""
    why = f": {failure}" if failure else ""
    return CheckpointError(f"training has ended, but its last checkpoint, of step {step}, could not be saved{why}")
