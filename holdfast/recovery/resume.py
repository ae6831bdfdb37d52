"""Resuming from a run's newest sound checkpoint: all workers use the same one, and each reads its own layers.

The layout may depend on what a checkpoint says. So resuming has three parts: find the checkpoints, read what all
workers share, and then, once the layout is known, read the layers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.checkpoint import index, lease, series
from holdfast.checkpoint.disk import explained, make_folder
from holdfast.checkpoint.formats import recognise
from holdfast.checkpoint.loading import Filler
from holdfast.checkpoint.newest_sound import superseded
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.places import Place, Remote, place_of
from holdfast.checkpoint.ranks import Alone, Ranks, together
from holdfast.checks import by_name, truth
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.labels import Change, Label, changes, table
from holdfast.cluster.pulse import PULSE
from holdfast.engine.state import State, nothing
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.log.log import LogSettings
from holdfast.plan import save_interval
from holdfast.recovery import sight
from holdfast.recovery.copy import pass_on
from holdfast.recovery.fence import Fence

logger = logging.getLogger(__name__)


class Unfit(HoldfastError):
    """Error: a checkpoint is sound, but of another model.

    It is no ``CheckpointError``, after which an older checkpoint is tried: no older one would fit better.
    """

    exit_code = CheckpointError.exit_code


@by_name
@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Settings of a run's checkpoints. A run that finds some in its folder goes on from the newest sound one.

    - ``folder``: where they are. All workers must see it. It is made if it is not there. ``"s3://bucket/run"`` (or
      ``gs://``, ``az://``) is a folder in an object store, for which no file system need be shared.
    - ``every``: steps from one to the next. "auto": as their measured cost and the failures so far advise. One more is
      saved at the end of a run.
    - ``keep``: how many of the newest ones stay; older ones are deleted.
    - ``keep_every``: those of steps that this number divides stay too. None: no others.
    - ``trainable_only``: True, to save only parameters that are trained, for adapters on a large frozen base. The
      script makes the base each time; a run that resumes is refused if it is another one.
    - ``log``: True, to keep what stages send each other until the next checkpoint. Layers of which every copy is
      lost are then computed again from that, alone. Bytes or text such as "2GB" are a budget for all workers together;
      ``LogSettings`` has more settings.
    - ``lease``: seconds after which another run may take the folder of one that was never heard of again, as its
      machine is gone. On NFS at least 90: its clients may see a folder as it was 60 s ago.
    - ``local`` and ``remote``, instead of ``folder``: a fast folder that all workers see, and a place in an object
      store. Checkpoints are taken in the first, and copied to the second in the background, the newest whenever the
      last copy is done. A run resumes from the newest sound one of both.

    Raises ``UsageError`` for values that are none of these.

    >>> Checkpoints(folder="runs/gpt", every=100).keep
    3
    """

    folder: str | os.PathLike[str] = ""
    every: int | Literal["auto"] = "auto"
    keep: int = 3
    keep_every: int | None = None
    trainable_only: bool = False
    log: bool | int | str | LogSettings = False
    lease: float = lease.SECONDS
    local: str | os.PathLike[str] = ""
    remote: str = ""

    def __post_init__(self) -> None:
        if self.local or self.remote:
            self._set_tiers()
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise UsageError(f"{self.folder!r} is no folder for checkpoints", hint="a path, as in 'runs/gpt'")
        place_of(self.folder)  # refuses a store without a bucket
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"every={self.every!r} is not a number of steps", hint="1 or more, or 'auto'")
        if type(self.keep) is not int or self.keep < 1:
            raise UsageError(f"keep={self.keep!r} is not a number of checkpoints", hint="1 or more")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise UsageError(f"keep_every={self.keep_every!r} is not a number of steps", hint="1 or more, or None")
        truth("trainable_only", self.trainable_only)
        LogSettings.of(self.log)
        if (
            isinstance(self.lease, bool)
            or not isinstance(self.lease, int | float)
            or not 0 < self.lease <= lease.LONGEST_SECONDS
        ):
            limit = f"a number of seconds up to {lease.LONGEST_SECONDS:g}"
            raise UsageError(f"lease={self.lease!r} is not {limit}", hint="90, for example")

    def _set_tiers(self) -> None:
        """Check ``local`` and ``remote``, and make the local one the folder."""
        if self.folder not in ("", self.local):
            raise UsageError("folder= and local= are both given", hint="local= and remote=, or folder= alone")
        if not (self.local and self.remote):
            raise UsageError("local= and remote= belong together", hint="folder= for one place alone")
        if not isinstance(place_of(self.remote), Remote) or isinstance(place_of(self.local), Remote):
            hint = "as in local='/nvme/gpt', remote='s3://bucket/gpt'"
            raise UsageError("local= is no folder of a disk, or remote= is in no object store", hint=hint)
        object.__setattr__(self, "folder", self.local)

    @classmethod
    def of(cls, given: Any) -> Checkpoints | None:
        """Return the settings that a user means by ``checkpoint=given``: a folder alone, or all of them."""
        return given if given is None or isinstance(given, Checkpoints) else cls(folder=given)

    @property
    def root(self) -> Place:
        """The folder as a path, or as a place in an object store."""
        return place_of(self.folder)

    @property
    def store(self) -> Remote | None:
        """The second place, to which checkpoints are copied; None if there is none."""
        place = place_of(self.remote) if self.remote else None
        return place if isinstance(place, Remote) else None

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
        self.resumed_at: int | None = None  # the step of the checkpoint that this process has begun with
        self.fence = Fence(settings.root, settings.lease)
        self.store_fence = None if settings.store is None else Fence(settings.store, settings.lease)
        self._store_step: int | None = None  # the step whose checkpoint is read from the store, not from the folder

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
        for step, in_store in self._look_together(ranks, claim):
            self._store_step = step if in_store else None
            failure = self.agreed(ranks, step, self.open)
            if failure is None:
                hold()
                failure = self.agreed(ranks, step, self.fill)
            if failure is None:
                self.resumed_at = step
                if ranks.rank == 0:
                    self._announce(step)
                return True
            failures.append(failure)
        if failures:
            raise failures[0]
        return False

    def _look_together(self, ranks: Ranks, claim: lease.Claim) -> list[tuple[int, bool]]:
        """Look for checkpoints on all workers; return their steps, newest first, and whether each is in the store.

        Raises ``CheckpointError`` if workers see different folders, at the latest ``sight.CACHE_SECONDS`` after the
        first look, and if another run has the folder.
        """
        prepared = together(ranks, "resume", lambda: self._prepare(claim) if ranks.rank == 0 else None)
        self._mark, left_out, in_store = json.loads(ranks.exchange(json.dumps(prepared).encode())[0])
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            mine = sight.look(self.settings.root, self._mark, claim.worker)
            said = [json.loads(text) for text in ranks.exchange(json.dumps([waited, mine.to_json()]).encode())]
            verdict = sight.compare([sight.View.from_json(view) for _, view in said], waited=said[0][0])
            if verdict.refusal:
                raise CheckpointError(verdict.refusal, hint=sight.HINT)
            if not verdict.again:
                found = [(step, False) for step in verdict.steps if step not in left_out]
                found += [(step, True) for step in in_store]
                return sorted(found, key=lambda one: (-one[0], one[1]))  # of the same step, that of the folder first
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

    def _prepare(self, claim: lease.Claim) -> tuple[str, list[int], list[int]]:
        """Make the folder and take its lease.

        Return the run's name if it has the lease, steps to leave out, and the steps that the second place has.

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
        left_out, in_store = superseded(root, series.steps_in(root)), self._prepare_store(claim)
        return claim.run if held else "", left_out, in_store

    def _prepare_store(self, claim: lease.Claim) -> list[int]:
        """Take the lease of the second place, if there is one; return the steps that are there."""
        store = self.settings.store
        if store is None or self.store_fence is None:
            return []
        with explained(store, "create"):
            make_folder(store)
        self.store_fence.begin(claim)
        steps = series.steps_in(store)
        return [step for step in steps if step not in superseded(store, steps)]

    def folder_of(self, step: int) -> Place:
        """Return the folder of a step's checkpoint: in the store, if that is where the run began from."""
        store = self.settings.store
        root = self.settings.root if store is None or step != self._store_step else store
        return series.folder_of(root, step)

    def open(self, step: int) -> None:
        """Take over what all workers share, and check that the checkpoint is of this model. Reads no layers."""
        label = self._state.progress.label
        into = self._state.targets(nothing)
        catalogue = self._read(step, into)
        try:
            self._state.restore(into)
        except CheckpointError as e:
            raise self._unfit(e) from e
        progress = self._state.progress
        progress.label = label
        progress.saved = progress.step
        progress.due = progress.step + self.settings.first
        progress.resumed += 1
        progress.seconds = catalogue.details.get("seconds", 0.0)
        progress.rows = catalogue.details.get("rows", [])

    def fill(self, step: int) -> None:
        """Read all layers that have memory here. After an error some of them may be overwritten: do not use them."""
        if self.settings.trainable_only:
            self._state.make_frozen()
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
        folder, label = self.folder_of(step), self._state.progress.label
        logger.info("resumed from %s", folder)
        found = changes(label, self._before)
        kept = [one for one in found if _is_of_groups(one)]
        if changed := [one for one in found if one not in kept]:
            number = "a changed setting" if len(changed) == 1 else f"{len(changed)} changed settings"
            logger.warning("resumed with %s, which may change the weights:\n%s", number, table(changed))
        if kept:
            what = "the optimizer goes on with the values of the checkpoint (then), not with the script's (now)"
            logger.warning("%s; a schedule= changes the learning rate:\n%s", what, table(kept))
        for remark in self._state.remarks:
            logger.warning("resumed from %s: %s", folder, remark)
        self._events.write("resumed", step=step, path=str(folder), **_listed(found))
        if self._mark:  # without the lease nothing may be removed
            series.clean(self.settings.root, before=step)

    def _read(self, step: int, into: dict[str, Any]) -> Catalogue:
        try:
            catalogue = index.open(self.folder_of(step))
            self._files = sorted(catalogue.files)
            self._before = _label_of(catalogue)
            self._state.fit(into, catalogue.tree)
            self._planned(catalogue, into).carry_out()
        except CheckpointError as e:
            logger.warning("cannot resume from step %d: %s", step, e)
            raise
        return catalogue

    def _planned(self, catalogue: Catalogue, into: dict[str, Any]) -> Filler:
        filler = Filler(catalogue, cast=False, layout={}, trainable_only=self.settings.trainable_only)
        try:
            filler.plan(into)
            filler.refuse_unexpected([filler.left])
        except CheckpointError as e:
            raise self._unfit(e) from e
        return filler

    def _unfit(self, error: CheckpointError) -> Unfit:
        """Return the error for a checkpoint that does not fit, with a table of the settings that have changed."""
        found = changes(self._state.progress.label, self._before)
        since = f"\nThese settings have changed since it was saved:\n{table(found)}" if found else ""
        return Unfit(f"{error}{since}")


def _label_of(catalogue: Catalogue) -> Label:
    """Return the label of the run that saved a checkpoint; empty if it has none, or a text as in older ones."""
    run = catalogue.tree.get("run")
    progress = run.get("progress") if isinstance(run, dict) else None
    label = progress.get("label") if isinstance(progress, dict) else None
    return {str(name): str(value) for name, value in label.items()} if isinstance(label, dict) else {}


def _is_of_groups(change: Change) -> bool:
    """Return whether a setting is a value of the optimizer's groups, which come from the checkpoint, as in torch."""
    return change.setting.startswith("the optimizer's ") and change.setting != "the optimizer's class"


def _listed(found: Sequence[Change]) -> dict[str, Any]:
    """Return changes for an event; nothing if there are none."""
    return {"changed": {one.setting: [one.then, one.now] for one in found}} if found else {}
