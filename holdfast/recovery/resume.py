"""Resuming from a run's newest sound checkpoint: all workers use the same one, and each reads its own layers.

The layout may depend on what a checkpoint says. So resuming has three parts: find the checkpoints, read what all
workers share, and then, once the layout is known, read the layers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoint import index, lease, series
from holdfast.checkpoint.disk import explained, make_folder
from holdfast.checkpoint.formats import recognise
from holdfast.checkpoint.loading import Filler
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.ranks import Alone, Ranks, together
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.labels import Label, difference
from holdfast.cluster.pulse import PULSE
from holdfast.engine.state import State, nothing
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.plan import save_interval
from holdfast.recovery import sight
from holdfast.recovery.copy import pass_on
from holdfast.recovery.fence import Fence

TERMS = 8  # newest checkpoints whose writers are compared: one that had lost the lease commits one or two at most
logger = logging.getLogger(__name__)


class Unfit(HoldfastError):
    """Error: a checkpoint is sound, but of another model.

    It is no ``CheckpointError``, after which an older checkpoint is tried: no older one would fit better.
    """

    exit_code = CheckpointError.exit_code


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Settings of a run's checkpoints. A run that finds some in its folder goes on from the newest sound one.

    - ``folder``: where they are. All workers must see it. It is made if it is not there.
    - ``every``: steps from one to the next. "auto": as their measured cost and the failures so far advise. One more is
      saved at the end of a run.
    - ``keep``: how many of the newest ones stay; older ones are deleted.
    - ``keep_every``: those of steps that this number divides stay too. None: no others.
    - ``lease``: seconds after which another run may take the folder of one that was never heard of again, as its
      machine is gone. On NFS at least 90: its clients may see a folder as it was 60 s ago.

    Raises ``UsageError`` for values that are none of these.

    >>> Checkpoints(folder="runs/gpt", every=100).keep
    3
    """

    folder: str | os.PathLike[str]
    every: int | Literal["auto"] = "auto"
    keep: int = 3
    keep_every: int | None = None
    lease: float = lease.SECONDS

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise UsageError(f"{self.folder!r} is no folder for checkpoints", hint="a path, as in 'runs/gpt'")
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"every={self.every!r} is not a number of steps", hint="1 or more, or 'auto'")
        if type(self.keep) is not int or self.keep < 1:
            raise UsageError(f"keep={self.keep!r} is not a number of checkpoints", hint="1 or more")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise UsageError(f"keep_every={self.keep_every!r} is not a number of steps", hint="1 or more, or None")
        if (
            isinstance(self.lease, bool)
            or not isinstance(self.lease, int | float)
            or not 0 < self.lease <= lease.LONGEST_SECONDS
        ):
            limit = f"a number of seconds up to {lease.LONGEST_SECONDS:g}"
            raise UsageError(f"lease={self.lease!r} is not {limit}", hint="90, for example")

    @classmethod
    def of(cls, given: Any) -> Checkpoints | None:
        """Return the settings that a user means by ``checkpoint=given``: a folder alone, or all of them."""
        return given if given is None or isinstance(given, Checkpoints) else cls(folder=given)

    @property
    def root(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)

    @property
    def first(self) -> int:
        """Steps from a start to the first checkpoint."""
        return save_interval.FIRST if self.every == "auto" else self.every


class Resumer:
    """Reads a run's checkpoints into its state: ``open`` what all workers share, ``fill`` what this worker holds.

    Both raise ``CheckpointError`` for a damaged checkpoint, and log it: an older one may be sound. They raise
    ``Unfit`` for a checkpoint of another model.
    """

    def __init__(self, settings: Checkpoints, state: State, events: Events) -> None:
        self.settings = settings
        self._state = state
        self._events = events
        self._before: Label = {}  # label of the run that saved the open checkpoint
        self._files: list[str] = []  # names of the files of the checkpoint that was read last
        self._longest: int | None = None  # steps for which the log has room; None: no limit
        self._mark = ""  # name of the run, if it holds the lease of its folder; empty: the folder cannot be written
        self.fence = Fence(settings.root, settings.lease)

    def resume(
        self,
        ranks: Ranks | None = None,
        *,
        claim: lease.Claim | None = None,
        hold: Callable[[], None] = lambda: None,
    ) -> bool:
        """Fill the state from the newest checkpoint that is sound for every worker; return False if there is none yet.

        All workers of ``ranks`` call it together. ``claim``: who this worker is; the first one takes the lease of the
        folder with it. None: one process, a run of its own. ``hold`` is called after ``open``, to give the layers of
        this worker memory, and again for each older checkpoint that is tried.

        Raises ``CheckpointError`` if all checkpoints are damaged, workers see different folders, or another run has
        the folder; ``Unfit`` if a checkpoint is of another model.
        """
        ranks = ranks or Alone()
        claim = claim or lease.Claim()
        failures: list[CheckpointError] = []
        for step in self._look_together(ranks, claim):
            failure = self.agreed(ranks, step, self.open)
            if failure is None:
                hold()
                failure = self.agreed(ranks, step, self.fill)
            if failure is None:
                if ranks.rank == 0:
                    self._announce(step)
                return True
            failures.append(failure)
        if failures:
            raise failures[0]
        return False

    def _look_together(self, ranks: Ranks, claim: lease.Claim) -> list[int]:
        """Look for checkpoints on all workers; return their steps, newest first.

        Raises ``CheckpointError`` if workers see different folders, at the latest ``sight.CACHE_SECONDS`` after the
        first look, and if another run has the folder.
        """
        prepared = together(ranks, "resume", lambda: self._prepare(claim) if ranks.rank == 0 else None)
        self._mark, left_out = json.loads(ranks.exchange(json.dumps(prepared).encode())[0])
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            mine = sight.look(self.settings.root, self._mark, claim.worker)
            said = [json.loads(text) for text in ranks.exchange(json.dumps([waited, mine.to_json()]).encode())]
            verdict = sight.compare([sight.View.from_json(view) for _, view in said], waited=said[0][0])
            if verdict.refusal:
                raise CheckpointError(verdict.refusal, hint=sight.HINT)
            if not verdict.again:
                return [step for step in verdict.steps[::-1] if step not in left_out]
            time.sleep(sight.AGAIN_SECONDS)
            PULSE.sign()  # it waits, and does not hang

    def welcome(self, group: Group, *, worker: str, teller: int, listeners: Collection[int]) -> None:
        """Check that workers which join see the run's folder. All members of the generation call it.

        ``worker``: the name of this one. ``teller``: the rank of a worker that knows the run. ``listeners``: the ranks
        of those that join. Raises ``sight.Unsighted`` on a listener that has not seen it for ``sight.SOON_SECONDS``:
        no longer, because the others wait.
        """
        self._mark = pass_on(group, self._mark, sender=teller, listeners=listeners, device=self._state.model.device)
        begin = time.monotonic()
        while group.rank in listeners:
            view = sight.look(self.settings.root, self._mark, worker)
            if view.is_right:
                return
            if time.monotonic() - begin > sight.SOON_SECONDS:
                sight.refuse_joiner(view)
            time.sleep(sight.AGAIN_SECONDS)

    def agreed(self, ranks: Ranks, step: int, work: Callable[[int], None]) -> CheckpointError | None:
        """Do ``work(step)`` on all workers; return the error of one that failed, or None.

        Raises ``Unfit`` on every worker if the checkpoint does not fit one of them.
        """
        failure: CheckpointError | None = None
        misfit: Unfit | None = None
        try:
            work(step)
        except CheckpointError as e:
            failure = e
        except Unfit as e:
            misfit = e
        mine = [str(failure or misfit or ""), misfit is not None, self._files]
        said = [json.loads(text) for text in ranks.exchange(json.dumps(mine).encode())]
        if misfit is not None:
            raise misfit
        for rank, (text, unfit, files) in enumerate(said):
            if unfit:
                raise Unfit(f"worker {rank} cannot resume: {text}")
            if failure is None and text:
                failure = CheckpointError(f"worker {rank} cannot resume: {text}")
            if failure is None and files != self._files:
                failure = CheckpointError(f"worker {rank} sees another checkpoint of step {step} than others do")
        return failure

    # --- the parts of resuming -------------------------------------------------------------------

    def _prepare(self, claim: lease.Claim) -> tuple[str, list[int]]:
        """Make the folder and take its lease; return the run's name if it has the lease, and steps to leave out.

        The first worker calls it. Raises ``CheckpointError`` if the folder is itself a checkpoint, cannot be made, or
        belongs to another run.
        """
        root = self.settings.root
        with explained(root, "create"):
            make_folder(root.absolute())
        steps = series.steps_in(root)
        if not steps and (foreign := recognise(root)) is not None:
            raise CheckpointError(
                f"{root} is itself a checkpoint ({foreign}), not a folder for a run's",
                hint="fill the model from it with holdfast.checkpoint.load, and give the run another folder",
            )
        held = self.fence.begin(claim)
        if not steps:
            logger.info("no checkpoint in %s yet: training starts at step 0", root)
        return claim.run if held else "", self._superseded(series.steps_in(root))

    def _superseded(self, steps: list[int]) -> list[int]:
        """Return the steps among the newest whose checkpoints come from a worker that had lost the lease."""
        found = sorted(lease.superseded([(step, self._term(step)) for step in steps[-TERMS:]]))
        for step in found:
            logger.warning("the checkpoint of step %d is left out: the run went on from an earlier one", step)
        return found

    def _term(self, step: int) -> int | None:
        """Return the term of a checkpoint's writer; None if it has none, or cannot be read."""
        try:
            term = index.read(series.folder_of(self.settings.root, step)).details.get("term")
        except CheckpointError:
            return None
        return term if isinstance(term, int) else None

    def open(self, step: int) -> None:
        """Take over what all workers share, and check that the checkpoint is of this model. Reads no layers."""
        label = self._state.progress.label
        into = self._state.targets(nothing)
        catalogue = self._read(step, into)
        try:
            self._state.restore(into)
        except CheckpointError as e:
            raise Unfit(str(e)) from e
        progress = self._state.progress
        # Before labels had names, they were a text: that is not compared.
        self._before = progress.label if isinstance(progress.label, dict) else {}
        progress.label = label
        progress.saved = progress.step
        progress.due = progress.step + self.settings.first
        progress.resumed += 1
        progress.seconds = catalogue.details.get("seconds", 0.0)

    def fill(self, step: int) -> None:
        """Read all layers that have memory here. After an error some of them may be overwritten: do not use them."""
        self._read(step, self._state.targets())
        self._state.filled()

    def fill_units(self, step: int, units: Collection[int]) -> None:
        """Read some units only, while a run goes on. The caller restores the optimizer's settings afterwards."""
        with self._state.others_keep_their_slots(units):
            self._read(step, self._state.targets(lambda unit: unit.number in units))

    def limit(self, longest: int | None) -> None:
        """Save at least every ``longest`` steps, because the log has room for no more. None: no limit."""
        self._longest = longest

    @property
    def interval(self) -> int:
        """Steps from one checkpoint to the next, as far as is known."""
        if self.settings.every != "auto":
            return self.settings.every
        progress = self._state.progress
        return max((progress.due or 0) - (progress.saved or 0), self.settings.first)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first."""
        return series.steps_in(self.settings.root)

    def _announce(self, step: int) -> None:
        """Log that all have resumed, and remove unfinished checkpoints. The first worker calls it."""
        folder, label = series.folder_of(self.settings.root, step), self._state.progress.label
        logger.info("resumed from %s", folder)
        if (changed := difference(label, self._before, joint=", before it was ")) is not None:
            logger.warning("resumed with differences that may change the weights: %s", changed)
        self._events.write("resumed", step=step, path=str(folder))
        if self._mark:  # without the lease nothing may be removed
            series.clean(self.settings.root, before=step)

    def _read(self, step: int, into: dict[str, Any]) -> Catalogue:
        try:
            catalogue = index.open(series.folder_of(self.settings.root, step))
            self._files = sorted(catalogue.files)
            self._state.fit(into, catalogue.tree)
            self._planned(catalogue, into).carry_out()
        except CheckpointError as e:
            logger.warning("cannot resume from step %d: %s", step, e)
            raise
        return catalogue

    def _planned(self, catalogue: Catalogue, into: dict[str, Any]) -> Filler:
        filler = Filler(catalogue, cast=False, layout={})
        try:
            filler.plan(into)
            filler.refuse_unexpected([filler.left])
        except CheckpointError as e:
            raise Unfit(str(e)) from e
        return filler
