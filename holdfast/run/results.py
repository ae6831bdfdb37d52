"""What all workers ask for together, outside of steps: each once, and again for those who have joined since."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from holdfast.cluster import faults
from holdfast.cluster.group import Group, alone
from holdfast.commit.cohort import Cohort, Kind, Operation
from holdfast.data.fetch import Dataset
from holdfast.engine.engine import Engine, Loss
from holdfast.engine.state import State
from holdfast.plan.tree import tree_sum
from holdfast.run.gather import gather_sha256, write_model
from holdfast.run.script import Script


class Settle(Protocol):
    """Makes replicas equal that train apart; ``full``: the optimizer's state too."""

    def __call__(self, why: str, *, full: bool = True) -> None: ...


class Results:
    """Evaluations, the model as a file, and the hash of a run's state."""

    def __init__(self, engine: Engine, state: State, cohort: Cohort, script: Script, settle: Settle) -> None:
        self._engine, self._state, self._cohort, self._script, self._settle = engine, state, cohort, script, settle

    @property
    def _known(self) -> dict[str, Any]:
        """Those that a joiner has missed."""
        known: dict[str, Any] = self._state.progress["results"]
        return known

    def evaluate(self, dataset: Dataset, measure: Loss) -> float:
        if self._cohort.group is None:  # before training: nobody to share with
            self._engine.model.make_whole()
            return tree_sum(self._engine.evaluate(dataset, measure, alone()))
        attempt = partial(self._engine.evaluate, dataset, measure)
        return self._once(Operation(kind=Kind.EVALUATION, attempt=attempt), "an evaluation")

    def save_model(self, path: Path) -> None:
        def attempt(group: Group) -> list[float]:
            write_model(group, self._engine.model, self._engine.layout, path)
            return []

        if self._cohort.group is None:
            write_model(None, self._engine.model, None, path)
        else:
            self._once(Operation(kind=Kind.SAVE, attempt=attempt), "the model is saved")

    def _once(self, operation: Operation, why: str) -> float:
        """Commits an operation unless it was committed before this worker joined.

        A joiner's script runs through loops that are over without entering their bodies, so only what
        comes after a loop has to be remembered for it.
        """

        def commit() -> float:
            self._settle(why, full=False)
            faults.at_step(self._state.progress["step"])
            return self._cohort.commit(operation)

        return float(self._remembered("operation", commit))

    def sha256(self, *, weights_only: bool = False) -> str:
        if self._cohort.group is None:
            return self._state.sha256(weights_only=weights_only)

        def compute() -> str:
            self._settle("a hash")
            return self._hash(weights_only)

        # Not counted with the others: whole workers may ask alone.
        return str(self._remembered("hash", compute))

    def _remembered(self, kind: str, find: Callable[[], Any]) -> Any:
        key = self._script.next_key(kind)
        if key in self._known:
            return self._known[key]
        value = find()
        if self._script.is_after_a_loop:
            self._known[key] = value
        return value

    def _hash(self, weights_only: bool) -> str:
        if self._engine.layout.is_whole:
            return self._state.sha256(weights_only=weights_only)
        found: list[str] = []

        def attempt(group: Group) -> list[float]:
            found[:] = [gather_sha256(group, self._state, weights_only=weights_only)]
            return []

        self._cohort.commit(Operation(kind=Kind.HASH, attempt=attempt))
        return found[0]
