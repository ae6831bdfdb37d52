"""Resuming from a run's newest sound checkpoint: all workers use the same one, and each reads its own layers.

The layout may depend on what a checkpoint says. So resuming has three parts: find the checkpoints, read what all
workers share, and then, once the layout is known, read the layers.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoint import index, series
from holdfast.checkpoint.disk import explained, make_folder
from holdfast.checkpoint.formats import recognise
from holdfast.checkpoint.loading import Filler
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.ranks import Alone, Ranks, together
from holdfast.cluster.events import Events
from holdfast.cluster.labels import Label, difference
from holdfast.engine.state import State, nothing
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.plan import save_interval

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

    Raises ``UsageError`` for values that are none of these.

    >>> Checkpoints(folder="runs/gpt", every=100).keep
    3
    """

    folder: str | os.PathLike[str]
    every: int | Literal["auto"] = "auto"
    keep: int = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise UsageError(f"{self.folder!r} is no folder for checkpoints", hint="a path, as in 'runs/gpt'")
        if self.every != "auto" and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"every={self.every!r} is not a number of steps", hint="1 or more, or 'auto'")
        if type(self.keep) is not int or self.keep < 1:
            raise UsageError(f"keep={self.keep!r} is not a number of checkpoints", hint="1 or more")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise UsageError(f"keep_every={self.keep_every!r} is not a number of steps", hint="1 or more, or None")

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

    def resume(self, ranks: Ranks | None = None, *, hold: Callable[[], None] = lambda: None) -> bool:
        """Fill the state from the newest checkpoint that is sound for every worker; return False if there is none yet.

        All workers of ``ranks`` call it together. ``hold`` is called after ``open``, to give the layers of this worker
        memory, and again for each older checkpoint that is tried. Raises ``CheckpointError`` if all checkpoints
        are damaged, ``Unfit`` if one is of another model.
        """
        ranks = ranks or Alone()
        found = together(ranks, "resume", lambda: self.candidates() if ranks.rank == 0 else [])
        # The first worker's list counts: on a network's file system others may see new folders later.
        steps: list[int] = json.loads(ranks.exchange(json.dumps(found).encode())[0])
        failures: list[CheckpointError] = []
        for step in steps:
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

    def candidates(self) -> list[int]:
        """Return the steps with a checkpoint, newest first. Raises ``CheckpointError`` if the folder is itself one."""
        root = self.settings.root
        with explained(root, "create"):
            make_folder(root.absolute())
        steps = series.steps_in(root)
        if not steps and (foreign := recognise(root)) is not None:
            raise CheckpointError(
                f"{root} is itself a checkpoint ({foreign}), not a folder for a run's",
                hint="fill the model from it with holdfast.checkpoint.load, and give the run another folder",
            )
        if not steps:
            logger.info("no checkpoint in %s yet: training starts at step 0", root)
        return steps[::-1]

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
