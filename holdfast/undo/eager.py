"""Eager updates: each layer is updated as soon as its gradient is complete, before the vote, and can be undone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from holdfast.cluster import faults
from holdfast.engine.gradients import Bucket
from holdfast.engine.model import LayeredModel
from holdfast.engine.update import Terms, Update
from holdfast.errors import HoldfastError, UsageError
from holdfast.undo.ledger import Ledger

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Undone:
    """Units whose update was undone, and *torn* units: their update stopped halfway and cannot be undone."""

    units: set[int]
    torn: set[int]


class Eager:
    """The part of a step's update that happens before its vote.

    Parameters change in the reduction's thread, while the backward pass of earlier layers goes on. That is safe:
    autograd has finished with the values of these parameters, and only their own gradients are touched. A weight that
    several layers share is updated at the end, when the gradients of its uses are added up. A step that is given up
    is undone with the gradients that it used. They are still where they were summed, so nothing is copied.

    Raises ``UsageError`` if the optimizer has a hook that runs before each step.
    """

    def __init__(self, model: LayeredModel, update: Update) -> None:
        if getattr(update.optimizer, "_optimizer_step_pre_hooks", None):
            raise UsageError(
                "a hook runs before each step of the optimizer, and there is one for each layer with update='eager'",
                hint="leave the hook out, or update='commit'",
            )
        self._update = update
        self._step = 0
        self._ledger = Ledger()
        tied = {id(p) for pair in model.aliases for p in pair}
        self._unit = {p: unit.number for unit in model.units for p in unit.parameters}
        self._own = {id(p) for p in update.parameters} - tied
        self._shared = [p for p in update.parameters if id(p) in tied]

    @property
    def begun(self) -> set[int]:
        """The units that the current step has changed, as far as it has come."""
        return self._units(self._ledger.begun)

    def begin(self, step: int) -> None:
        """Begin a step: set its learning rate. The step before it must have been committed or undone."""
        assert not self._ledger.begun, "a step begins on top of another"
        self._step = step
        self._update.begin(step)

    def summed(self, bucket: Bucket) -> None:
        """Update the parameters of a bucket whose gradients are complete. Called in the reduction's thread."""
        self._change([p for p in bucket.parameters if id(p) in self._own])
        faults.point("eager")

    def added_up(self) -> None:
        """Update the shared weights: the gradients of their uses are added up now."""
        self._change([p for p in self._shared if p.grad is not None])

    def commit(self) -> Terms:
        """Make the step final, and return how it was applied. It cannot be undone any more."""
        self._ledger.clear()
        terms = self._update.terms()
        self._update.end()
        return terms

    def undo(self) -> Undone:
        """Undo what the current step has changed so far; return which units were undone, and which are torn.

        Raises ``HoldfastError`` if the very first step is torn: there is no earlier state to get from others.
        """
        ledger = self._ledger
        if not ledger.begun:
            return Undone(units=set(), torn=set())
        undone, torn = self._units(ledger.done), self._units(ledger.torn)
        try:
            if not faults.sabotaged("skip-undo"):
                self._update.undo(ledger.done, first=ledger.first)
        except UsageError as e:
            # Some numbers have left their range. Nothing was undone, so all of it counts as torn: others may still
            # hold these units, or the log may bring them back.
            logger.warning("%s", e)
            undone, torn = set(), undone | torn
        ledger.clear()
        if torn and not self._step:  # before the first commit a new generation would begin from this worker's values
            raise HoldfastError("the first step could not be taken back", hint="the run has to begin again")
        return Undone(units=undone - torn, torn=torn)

    def _change(self, parameters: Sequence[nn.Parameter]) -> None:
        if parameters:
            with self._ledger.entry(parameters, self._update.optimizer):
                self._update.some(parameters)

    def _units(self, parameters: Iterable[nn.Parameter]) -> set[int]:
        return {self._unit[p] for p in parameters}
