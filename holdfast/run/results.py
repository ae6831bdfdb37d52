"""Results that all workers ask for together, outside of steps: evaluations, predictions, the model as a file, the hash.

Each is computed once. Its value is remembered for workers that join later and ask for it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from holdfast.cluster import faults
from holdfast.cluster.group import Group, alone
from holdfast.cluster.texts import Texts
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import Kind, Operation, agree
from holdfast.data.fetch import Dataset
from holdfast.engine.averages import Ema
from holdfast.engine.engine import Engine
from holdfast.engine.measures import Measure, evaluate
from holdfast.engine.predictions import Keep, predict, recalled, to_remember
from holdfast.engine.rooms import Rooms
from holdfast.engine.state import State
from holdfast.engine.walk import evaluation_order
from holdfast.rng import Generators, generators, set_generators
from holdfast.run.gather import WRITER, gather_sha256, write_model
from holdfast.run.script import Script
from holdfast.run.with_weights import WithWeights, averages_here, computing_with

Folder = str | os.PathLike[str]


class Settle(Protocol):
    """A function that makes replicas equal that train apart. ``full``: the optimizer's state too."""

    def __call__(self, why: str, *, full: bool = True) -> None: ...


class Results:
    """Evaluations, predictions, the model as a file, and the hash of a run's state."""

    def __init__(self, engine: Engine, state: State, cohort: Cohort, script: Script, settle: Settle) -> None:
        self._engine, self._state, self._cohort, self._script, self._settle = engine, state, cohort, script, settle
        self._in_step: dict[str, tuple[Any, Generators]] | None = None

    def begin_step(self) -> None:
        """Remember what is asked for in the body of a ``Loop`` until its next step: the body may run again."""
        self._in_step = {}

    def evaluate(
        self, dataset: Dataset, measures: Mapping[str, Measure], *, weights: Ema | None = None
    ) -> dict[str, float]:
        """Return the weighted mean of each measure over a data set. Raises ``UsageError`` if it is empty.

        ``weights``: an average to compute with; None: the weights.
        """
        if self._cohort.group is None:  # before training this worker is on its own
            self._engine.model.make_whole()
            with computing_with(self._engine, weights):
                return evaluate(self._engine, dataset, measures, alone())
        operation = Evaluation(self._engine, self._cohort, dataset, measures, weights)

        def find() -> dict[str, float]:
            self._commit(WithWeights(operation, self._engine, weights), "an evaluation")
            return operation.found

        # Checkpoints from before there were several measures have the value alone.
        return self._remembered("operation", find, of_json=lambda known: known if type(known) is dict else {"": known})

    def predict(self, dataset: Dataset, keep: Keep, to: Folder | None, *, weights: Ema | None = None) -> Any:
        """Return what ``keep`` gives for all samples of a data set. Raises ``UsageError`` if it is empty."""
        if self._cohort.group is None:
            self._engine.model.make_whole()
            with computing_with(self._engine, weights):
                return predict(self._engine, dataset, keep, alone(), Rooms(to))
        operation = Prediction(self._engine, self._cohort, dataset, keep, to, weights)

        def find() -> Any:
            self._commit(WithWeights(operation, self._engine, weights), "predictions")
            return operation.found

        return self._remembered("operation", find, to_json=to_remember, of_json=recalled)

    def save_model(self, path: Path, *, weights: Ema | None = None) -> None:
        """Write the model as one safetensors file. Raises ``HoldfastError`` if that is not possible.

        ``weights``: an average that is written in place of the weights.
        """
        if self._cohort.group is None:
            averages = None if weights is None else averages_here(self._engine, weights)
            write_model(None, self._engine.model, None, path, weights=averages)
        else:
            operation = WriteModel(self._engine, self._cohort, path, weights)
            self._remembered("operation", lambda: self._commit(operation, "the model is saved"))

    def write(self, write: Callable[[], None]) -> None:
        """Let the first worker write files with a function; if it is lost before all know, the next one writes them."""
        if self._cohort.group is None:
            write()
        else:
            operation = WriteFiles(self._engine, self._cohort, write)
            self._remembered("operation", lambda: self._commit(operation, "files are written"))

    def tell(self, value: Any) -> list[Any]:
        """Return what each worker has to say, by rank, on every worker. ``value``: this one's, as JSON takes it."""
        if self._cohort.group is None:
            return [value]
        operation = Tell(self._engine, self._cohort, value)

        def find() -> list[Any]:
            self._commit(operation, "workers tell each other something")
            return operation.found

        return list(self._remembered("operation", find))

    def _commit(self, operation: Operation, why: str) -> float:
        """Commit an operation; return its value. ``why``: for what replicas that train apart become equal."""
        self._settle(why, full=False)
        faults.at_step(self._state.progress.step)
        return self._cohort.commit(operation)

    def sha256(self, *, weights_only: bool = False) -> str:
        """Return the hash of the run's state, or of the weights alone, the same on every worker.

        Raises ``Drift`` if workers have different values of the same.
        """
        if self._cohort.group is None:
            return self._state.sha256(weights_only=weights_only)

        def compute() -> str:
            self._settle("a hash")
            faults.at_step(self._state.progress.step)
            hashing = GatherHash(self._state, weights_only=weights_only)
            self._cohort.commit(hashing)
            return hashing.found

        return str(self._remembered("hash", compute))

    def _remembered(
        self,
        kind: str,
        find: Callable[[], Any],
        *,
        to_json: Callable[[Any], Any] = lambda value: value,
        of_json: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """Return the remembered value of what the script asks for here, or find it and remember it.

        A joiner's script skips the bodies of loops that are over, so only what comes after a loop is remembered.
        ``to_json`` and ``of_json`` turn it into JSON values and back.
        """
        key = self._script.next_key(kind)
        known = self._state.progress.results
        if key in known:
            return of_json(known[key])
        if self._in_step is not None and key in self._in_step:
            value, drawn = self._in_step[key]
            set_generators(drawn)
            return value
        value = find()
        if self._script.is_after_a_loop:
            self._state.progress.results[key] = to_json(value)
        elif self._in_step is not None:
            self._in_step[key] = value, generators()
        return value


class Evaluation(Operation):
    """The operation that computes means of measures over a data set, in ``found``; shared by all workers."""

    kind: Kind = "evaluation"

    def __init__(
        self, engine: Engine, cohort: Cohort, dataset: Dataset, measures: Mapping[str, Measure], weights: Ema | None
    ) -> None:
        self._engine, self._cohort, self._dataset, self._measures = engine, cohort, dataset, measures
        self._asked = f"{[*measures]} {weights}"
        self.found: dict[str, float] = {}

    def attempt(self, group: Group) -> list[float]:
        values = 2 * len(self._measures) * evaluation_order(self._engine, self._dataset).micro_batches(0)
        agree(self, group, self._engine.model.device, size=values, asked=self._asked, joiners=self._cohort.joiners)
        self.found = evaluate(self._engine, self._dataset, self._measures, group)
        return []


class Prediction(Operation):
    """The operation that computes what the model gives for each sample of a data set, in ``found``.

    Every worker has all of it before it votes. A worker that is lost before that takes its share along: all shares
    are computed again.
    """

    kind: Kind = "prediction"

    def __init__(
        self, engine: Engine, cohort: Cohort, dataset: Dataset, keep: Keep, to: Folder | None, weights: Ema | None
    ) -> None:
        self._engine, self._cohort, self._dataset, self._keep, self._to = engine, cohort, dataset, keep, to
        self._asked = f"{weights}"
        self.found: Any = None

    def attempt(self, group: Group) -> list[float]:
        size, joiners = len(self._dataset), self._cohort.joiners
        agree(self, group, self._engine.model.device, size=size, asked=self._asked, joiners=joiners)
        self.found = predict(self._engine, self._dataset, self._keep, group, Rooms(self._to))
        return []

    def drop(self) -> None:
        self.found = None


class WriteModel(Operation):
    """The operation that writes the model as one file.

    The file is written before the vote: if the writer is lost, the next one writes it again.
    """

    kind: Kind = "save"

    def __init__(self, engine: Engine, cohort: Cohort, path: Path, weights: Ema | None = None) -> None:
        self._engine, self._cohort, self._path, self._weights = engine, cohort, path, weights

    def attempt(self, group: Group) -> list[float]:
        # Not the path: only the first worker uses its own, and each machine may have a folder of another name.
        agree(self, group, self._engine.model.device, size=1, asked=f"{self._weights}", joiners=self._cohort.joiners)
        averages = None if self._weights is None else averages_here(self._engine, self._weights)
        write_model(group, self._engine.model, self._engine.layout, self._path, weights=averages)
        return []


class WriteFiles(Operation):
    """The operation in which the first worker writes files with a function of the script's, before the vote."""

    kind: Kind = "save"

    def __init__(self, engine: Engine, cohort: Cohort, write: Callable[[], None]) -> None:
        self._engine, self._cohort, self._write = engine, cohort, write

    def attempt(self, group: Group) -> list[float]:
        agree(self, group, self._engine.model.device, size=1, asked="files", joiners=self._cohort.joiners)
        if group.rank == WRITER:
            self._write()
        return []


class Tell(Operation):
    """The operation in which workers tell each other a value; ``found`` are all of them, by rank."""

    kind: Kind = "save"

    def __init__(self, engine: Engine, cohort: Cohort, value: Any) -> None:
        self._engine, self._cohort, self._text = engine, cohort, json.dumps(value).encode()
        self.found: list[Any] = []

    def attempt(self, group: Group) -> list[float]:
        device = self._engine.model.device
        agree(self, group, device, size=1, asked="values", joiners=self._cohort.joiners)
        self.found = [json.loads(text) for text in Texts(group, device).exchange(self._text)]
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
