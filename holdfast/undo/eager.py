"""Updates each layer as soon as its gradient is complete, before the step is known to count, and can take it back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from holdfast.cluster import faults
from holdfast.engine.gradients import Bucket
from holdfast.engine.model import LayeredModel
from holdfast.engine.update import Terms, Update
from holdfast.errors import HoldfastError, UsageError
from holdfast.undo.ledger import Ledger
from holdfast.words import say_aloud


@dataclass(frozen=True, kw_only=True)
class Undone:
    """Units that were taken back, and those that are torn: neither old nor new."""

    units: set[int]
    torn: set[int]


class Eager:
    """The eager half of a step: what happens before its vote.

    Parameters change in the reduction's thread, while the backward pass of earlier layers goes on: autograd is done
    with their values by then, and only the gradients of these parameters may be touched. A weight that several layers
    share waits for the end, when its uses are added up. A step that is given up is taken back with the gradients
    that it used, which are still where they were summed: nothing is copied.
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
        assert not self._ledger.begun, "a step begins on top of another"
        self._step = step
        self._update.begin(step)

    def summed(self, bucket: Bucket) -> None:
        """The gradients of a bucket are complete. Called in the reduction's thread."""
        self._change([p for p in bucket.parameters if id(p) in self._own])
        faults.point("eager")

    def added_up(self) -> None:
        """The uses of shared weights are added up: the rest of the step."""
        self._change([p for p in self._shared if p.grad is not None])

    def commit(self) -> Terms:
        """The step counts: from here on nothing can take it back."""
        self._ledger.clear()
        terms = self._update.terms()
        self._update.end()
        return terms

    def undo(self) -> Undone:
        """Take back what the current step has done; return what was, and what is torn, which nothing can take back."""
        ledger = self._ledger
        if not ledger.begun:
            return Undone(units=set(), torn=set())
        undone, torn = self._units(ledger.done), self._units(ledger.torn)
        try:
            if not faults.sabotaged("skip-undo"):
                self._update.undo(ledger.done, first=ledger.first)
        except (
            UsageError
        ) as e:  # numbers that have left their range, and it has changed nothing: others may be better off
            say_aloud(str(e))
            undone, torn = set(), undone | torn
        ledger.clear()
        if torn and not self._step:  # nobody would notice that it is gone
            raise HoldfastError("the first step could not be taken back", hint="the run has to begin again")
        return Undone(units=undone - torn, torn=torn)

    def _change(self, parameters: Sequence[nn.Parameter]) -> None:
        if parameters:
            with self._ledger.entry(parameters, self._update.optimizer):
                self._update.some(parameters)

    def _units(self, parameters: Iterable[nn.Parameter]) -> set[int]:
        return {self._unit[p] for p in parameters}
