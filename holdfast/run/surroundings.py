"""Surroundings: what a ``Run`` and a ``Loop`` have around their steps: state, journal, evaluations, results."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

from holdfast.checks import function, takes
from holdfast.data.fetch import Dataset
from holdfast.engine.averages import Ema
from holdfast.engine.measures import Measure, check_measures
from holdfast.engine.predictions import Keep, both
from holdfast.engine.profile.hook import end_if_measured, may_write
from holdfast.engine.script_state import ScriptState
from holdfast.engine.walk import check_dataset
from holdfast.errors import UsageError
from holdfast.journal.sinks import Sink, make_sink
from holdfast.run.team import TeamView
from holdfast.run.training import Training


class Surroundings(Training):
    """A training, with the methods that its script calls around the steps."""

    @property
    def team(self) -> TeamView:
        """This process's place in its team, as ``holdfast run --team`` has made it, and its part of a batch."""
        return TeamView(self._team, self.engine.seed_part)

    @property
    def state(self) -> ScriptState:
        """The script's own values, as ``Run(state={…})`` has named them. The script changes them on every worker alike.

        A worker that joins, and a run that resumes, has them as they are when its script enters the training.
        """
        return self._state.script

    @state.setter
    def state(self, value: ScriptState) -> None:  # for run.state |= {…}, which assigns what it has changed
        if value is not self._state.script:
            raise UsageError("run.state cannot be replaced", hint="run.state['best'] = …, or run.state |= {…}")

    def ema(self, decay: float = 0.999) -> Ema:
        """Follow an exponential moving average of the weights from the first step on; return it, to be used as
        ``run.evaluate(…, weights=ema)`` and ``run.save_model(…, weights=ema)``.

        Every worker calls it, before ``run.steps``. It is committed with each step, moves with its layers, and is in
        checkpoints and in the hash. Raises ``UsageError`` for a decay that is none, and where it cannot be followed.
        """
        if self._cohort.group is not None:
            raise UsageError("an average cannot begin in the middle of training", hint="call run.ema before run.steps")
        if self._apart is not None:
            raise UsageError("replicas that train apart have no common average", hint="sync='every-step'")
        if self._team.size > 1:
            raise UsageError("teams have no averages of their weights", hint="leave out ema, or --team")
        if self.engine.eager is not None:
            raise UsageError("update='eager' cannot take an average back", hint="update='commit'")
        return self.engine.update.averages.add(decay)

    # --- the journal -----------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values for the step under way: once, whatever is lost, and whoever joins or resumes.

        ``values``: numbers or text by name. They go into the step's row of ``metrics.jsonl``, beside its loss, learning
        rate and so on; the file is in the folder of the checkpoints, or else in that of the workers' logs. After a loop
        they get a row of their own. Every worker must call it alike: the first one writes what it has, and if it
        is lost, the next. Raises ``UsageError`` for values that are neither, for other values under names that the row
        has already, such as "loss", and before the first step.

        >>> for step in run.steps(100):  # doctest: +SKIP
        ...     run.log({"perplexity": math.exp(step.loss)})
        """
        self._journal.add(values)

    def log_to(self, sink: str | Sink, **options: Any) -> None:
        """Write all rows of the journal somewhere else too: "tensorboard", "wandb" or "mlflow", or an object of yours.

        ``options``: those of the sink (docs/run.md). Every worker must call it, before it trains. Raises
        ``UsageError`` if it is not known or not installed.

        >>> run.log_to("tensorboard", folder="runs/gpt/tensorboard")  # doctest: +SKIP
        """
        self._journal.to(make_sink(sink, options))

    # --- evaluation and results ------------------------------------------------------------------

    @overload
    def evaluate(self, dataset: Dataset, measure: Measure | None = None, *, weights: Ema | None = None) -> float: ...

    @overload
    def evaluate(
        self, dataset: Dataset, measure: Mapping[str, Measure], *, weights: Ema | None = None
    ) -> dict[str, float]: ...

    def evaluate(
        self,
        dataset: Dataset,
        measure: Measure | Mapping[str, Measure] | None = None,
        *,
        weights: Ema | None = None,
    ) -> float | dict[str, float]:
        """Return the mean of a measure over a data set; of several, given by name, a dictionary of means.

        ``measure``: a function of output and target, or of model and batch, as the loss is; None: the loss. It gives
        the mean over a micro-batch, which counts as much as the run's ``weight`` says, or by its samples; or
        ``(mean, weight)``. Several measures take one pass over the data. ``weights``: an average that ``run.ema`` has
        made, to compute with; None: the weights.

        Workers share the work, so every worker must call it. A worker that joins later gets the values of
        the evaluations it has missed between loops, so that its script decides as the others' did. Raises
        ``UsageError`` if the data set is empty or not map-style, or if workers ask for different things.

        >>> run.evaluate(test, {"error": error, "loss": loss})  # doctest: +SKIP
        {'error': 0.0312, 'loss': 0.0871}
        """
        end_if_measured(self)
        named = measure if isinstance(measure, Mapping) else {"": measure or self._loss()}
        check_measures(named, *self._arguments)
        check_dataset(dataset)
        found = self._results.evaluate(dataset, named, weights=weights)
        return found if isinstance(measure, Mapping) else found[""]

    def _loss(self) -> Measure:
        if self.engine.loss is None:
            raise UsageError(
                "a Loop has no loss of its own to evaluate with", hint="loop.evaluate(test, lambda model, batch: …)"
            )
        return self.engine.loss

    def predict(
        self,
        dataset: Dataset,
        keep: Keep | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        weights: Ema | None = None,
    ) -> Any:
        """Return outputs and targets of all samples of a data set, in its order, the same on every worker.

        ``keep``: a function of output and target, or of model and batch, that gives what is kept of a micro-batch:
        tensors with a row for each sample, also in tuples, lists and dicts. The result has the same form. None: output
        and target. Where shapes differ between micro-batches, there is a list with a tensor for each sample. ``to``:
        the folder for what is larger than 256 MiB, which is kept in a file without a name; None: the system's.
        ``weights``: as for ``evaluate``.

        Every worker must call it. A worker that joins later gets what it has missed between loops, up to 1 MiB, and
        is refused if that was larger. Raises ``UsageError`` if the data set is empty or not map-style, if something
        else than tensors is kept, or if workers ask for different things; ``HoldfastError`` if the disk is full.

        >>> labels, truth = run.predict(test, lambda output, target: (output.argmax(-1), target))  # doctest: +SKIP
        """
        end_if_measured(self)
        if keep is None and self.engine.takes_model:
            raise UsageError(
                "with model= only you know what its outputs are",
                hint="keep=lambda model, batch: (model(batch[0]).argmax(-1), batch[1]), for example",
            )
        check_dataset(dataset)
        if keep is not None:
            function("keep", keep, hint="as in lambda output, target: output.argmax(-1)")
            takes("keep", keep, *self._arguments)
        return self._results.predict(dataset, keep or both, to, weights=weights)

    @property
    def _arguments(self) -> tuple[str, str]:
        """What measures, as the loss, are called with."""
        return ("model", "batch") if self.engine.takes_model else ("output", "target")

    def save_model(self, path: str | os.PathLike[str], *, weights: Ema | None = None) -> None:
        """Write the weights as safetensors, whole or not at all.

        Every worker must call it; the first one writes, and if it is lost in the middle, the next. ``weights``: an
        average that ``run.ema`` has made, to be written in place of the weights. Raises ``HoldfastError`` if the file
        cannot be written or no worker holds some weight, ``UsageError`` if workers ask for different things.
        """
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"{path!r} is no path of a file", hint="as in run.save_model('model.safetensors')")
        if self._team.size > 1:
            raise UsageError(
                "a team has no model in one piece to write", hint="checkpoint=, and holdfast ckpt convert for one file"
            )
        if may_write(self, path):  # not for `holdfast profile`
            self._results.save_model(Path(path), weights=weights)

    def write_files(self, write: Callable[[], None]) -> None:
        """Let the first worker write files: ``write()`` is called there. If that worker is lost, the next one writes.

        Every worker must call it, outside of the middle of a step. What ``write`` leaves behind when its worker is
        killed in it must not disturb the next call: write under another name, then rename.

        >>> run.write_files(lambda: model.save_pretrained("out"))  # doctest: +SKIP
        """
        function("write", write, hint="as in lambda: model.save_pretrained('out')")
        end_if_measured(self)
        self._results.write(write)

    def sha256(self, *, weights_only: bool = False) -> str:
        """Return the SHA-256 of weights, optimizer state and the script's state: equal hashes, equal runs.

        ``weights_only`` leaves out all but weights and buffers. Every worker must call it. Raises ``Drift`` if workers
        have different values of the same, naming the first, and ``HoldfastError`` if no worker holds some part.
        """
        return self._results.sha256(weights_only=weights_only)
