"""Results that all workers ask for together, outside of steps: evaluations, the model as a file, the hash.

Each is computed once. Its value is remembered for workers that join later and ask for it again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from holdfast.cluster import faults
from holdfast.cluster.group import Group, alone
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import Kind, Operation
from holdfast.data.fetch import Dataset
from holdfast.engine.engine import Engine, Loss
from holdfast.engine.state import State
from holdfast.plan.tree import tree_sum
from holdfast.run.gather import gather_sha256, write_model
from holdfast.run.script import Script


class Settle(Protocol):
    """A function that makes replicas equal that train apart. ``full``: the optimizer's state too."""

    def __call__(self, why: str, *, full: bool = True) -> None: ...


class Results:
    """Evaluations, the model as a file, and the hash of a run's state."""

    def __init__(self, engine: Engine, state: State, cohort: Cohort, script: Script, settle: Settle) -> None:
        self._engine, self._state, self._cohort, self._script, self._settle = engine, state, cohort, script, settle

    def evaluate(self, dataset: Dataset, measure: Loss) -> float:
        """Return the mean of ``measure(output, target)`` over a data set. Raises ``UsageError`` if it is empty."""
        if self._cohort.group is None:  # before training this worker is on its own
            self._engine.model.make_whole()
            return tree_sum(self._engine.evaluate(dataset, measure, alone()))
        return self._once(Evaluation(self._engine, dataset, measure), "an evaluation")

    def save_model(self, path: Path) -> None:
        """Write the model as one safetensors file. Raises ``HoldfastError`` if that is not possible."""
        if self._cohort.group is None:
            write_model(None, self._engine.model, None, path)
        else:
            self._once(WriteModel(self._engine, path), "the model is saved")

    def _once(self, operation: Operation, why: str) -> float:
        """Commit an operation, unless it was committed before this worker joined; return its value.

        A joiner's script skips the bodies of loops that are over, so only operations after a loop are remembered.
        """

        def commit() -> float:
            self._settle(why, full=False)
            faults.at_step(self._state.progress.step)
            return self._cohort.commit(operation)

        return float(self._remembered("operation", commit))

    def sha256(self, *, weights_only: bool = False) -> str:
        """Return the hash of the run's state, or of the weights alone, the same on every worker."""
        if self._cohort.group is None:
            return self._state.sha256(weights_only=weights_only)

        def compute() -> str:
            self._settle("a hash")
            return self._hash(weights_only)

        # Hashes are counted separately: a worker that holds the whole model may ask for one alone.
        return str(self._remembered("hash", compute))

    def _remembered(self, kind: str, find: Callable[[], Any]) -> Any:
        """Return the remembered value of what the script asks for here, or find it and remember it."""
        key = self._script.next_key(kind)
        known = self._state.progress.results
        if key in known:
            return known[key]
        value = find()
        if self._script.is_after_a_loop:
            self._state.progress.results[key] = value
        return value

    def _hash(self, weights_only: bool) -> str:
        if self._engine.layout.is_whole:
            return self._state.sha256(weights_only=weights_only)
        hashing = GatherHash(self._state, weights_only=weights_only)
        self._cohort.commit(hashing)
        return hashing.found


class Evaluation(Operation):
    """The operation that computes the mean of a measure over a data set, shared by all workers."""

    kind: Kind = "evaluation"

    def __init__(self, engine: Engine, dataset: Dataset, measure: Loss) -> None:
        self._engine, self._dataset, self._measure = engine, dataset, measure

    def attempt(self, group: Group) -> list[float]:
        return self._engine.evaluate(self._dataset, self._measure, group)


class WriteModel(Operation):
    """The operation that writes the model as one file.

    The file is written before the vote: if the writer is lost, the next one writes it again.
    """

    kind: Kind = "save"

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine, self._path = engine, path

    def attempt(self, group: Group) -> list[float]:
        write_model(group, self._engine.model, self._engine.layout, self._path)
        return []


class GatherHash(Operation):
    """The operation that computes the hash of the state that all workers hold together, in ``found``."""

    kind: Kind = "hash"

    def __init__(self, state: State, *, weights_only: bool) -> None:
        self._state, self._weights_only = state, weights_only
        self.found = ""

    def attempt(self, group: Group) -> list[float]:
        self.found = gather_sha256(group, self._state, weights_only=self._weights_only)
        return []
