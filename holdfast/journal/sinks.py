"""Sinks: other places that rows of the journal go to: TensorBoard, Weights & Biases, MLflow, or a user's own.

Only the first worker opens them. Each is told at which step it begins. It gets every row from there on, in order, and
must forget what it has of these steps: the last rows of a worker that was lost come again, and those of steps that a
resumed run trains again.
"""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import UsageError
from holdfast.journal.rows import OWN

Folder = str | os.PathLike[str]
LATER_SECONDS = 2.5  # TensorBoard reads files in the order of the seconds in their names: wait so long for a new one


class Sink(Protocol):
    """A place that rows go to. An exception in it ends it, with a warning, and not the training."""

    def begin(self, folder: Path, step: int) -> None:
        """Open it, and forget what it has of ``step`` and later ones. ``folder``: where the journal's file is."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take the next row: values by name, and "step", "time" (seconds since 1970), and "after" for a row that
        was logged after a loop.
        """

    def end(self) -> None:
        """Close it: the run ends, or another worker goes on."""


class TensorBoard:
    """Scalars for TensorBoard, in ``folder``; None: ``tensorboard`` beside the journal's file."""

    def __init__(self, *, folder: Folder | None = None) -> None:
        _need("tensorboard", "TensorBoard")
        self._folder = folder
        self._writer: Any = None

    def begin(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard" if self._folder is None else Path(self._folder)
        _wait_for_a_later_second(place)
        self._writer = SummaryWriter(str(place), purge_step=step)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["time"])
        self._writer.flush()  # a killed process loses what is not on its way to the disk

    def end(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: offline, unless ``mode`` says otherwise. ``options`` go to ``wandb.init``.

    A worker that takes over makes another offline folder of the same run.
    """

    def __init__(self, *, mode: str = "offline", **options: Any) -> None:
        _need("wandb", "Weights & Biases")
        self._options = {"mode": mode, **options}
        self._run: Any = None

    def begin(self, folder: Path, step: int) -> None:
        import wandb

        known = _identity(folder / "wandb.id", lambda: uuid.uuid4().hex[:12])
        quiet = wandb.Settings(silent=True, console="off")
        # A run of its own, if the script has one too.
        ours = {"dir": str(folder), "id": known, "resume": "allow", "reinit": "create_new", "settings": quiet}
        self._run = wandb.init(**{**ours, **self._options})
        self._run.config.update({"holdfast_begins_at": step}, allow_val_change=True)

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if name not in OWN}, step=row["step"])

    def end(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at ``uri``; None: as MLflow chooses, such as by ``MLFLOW_TRACKING_URI``.

    MLflow forgets nothing: values of steps that are trained again stay those that it got first.
    """

    def __init__(self, *, uri: str | None = None, experiment: str = "holdfast", name: str | None = None) -> None:
        _need("mlflow", "MLflow")
        self._uri, self._experiment, self._name = uri, experiment, name
        self._client: Any = None
        self._id = ""
        self._steps: dict[str, set[int]] = {}  # by name: the steps that MLflow has a value of

    def begin(self, folder: Path, step: int) -> None:
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        self._steps = {}

        def make() -> str:
            found = client.get_experiment_by_name(self._experiment)
            number = client.create_experiment(self._experiment) if found is None else found.experiment_id
            return str(client.create_run(number, run_name=self._name).info.run_id)

        self._id = _identity(folder / "mlflow.id", make)
        client.update_run(self._id, status="RUNNING")

    def write(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        stamp, metrics = int(1000 * row["time"]), []
        for name, value in numbers(row).items():
            if name not in self._steps:
                self._steps[name] = {known.step for known in self._client.get_metric_history(self._id, name)}
            if row["step"] not in self._steps[name]:
                self._steps[name].add(row["step"])
                metrics.append(Metric(name, value, stamp, row["step"]))
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def end(self) -> None:
        self._client.set_terminated(self._id)


IDENTITIES = ("wandb.id", "mlflow.id")  # files beside the journal's: the runs elsewhere that get the rows
SINKS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def make_sink(given: Any, options: Mapping[str, Any]) -> Sink:
    """Return the sink that a user means by a name and options, or by an object of their own. Raises ``UsageError``."""
    if isinstance(given, str) and given in SINKS:
        try:
            made: Sink = SINKS[given](**options)
        except TypeError as e:
            raise UsageError(f"{given} does not take these options: {e}", hint="docs/run.md lists them") from e
        return made
    has_all = all(callable(getattr(given, name, None)) for name in ("begin", "write", "end"))
    if has_all and not isinstance(given, type) and not options:
        return given
    known = ", ".join(repr(name) for name in SINKS)
    raise UsageError(f"{given!r} is nothing to log to", hint=f"{known}, or an object with begin, write and end")


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row that are numbers: all that a curve can be drawn of.

    >>> numbers({"step": 3, "time": 1.5, "loss": 0.5, "note": "warm", "lost": None})
    {'loss': 0.5}
    """
    found = {name: value for name, value in row.items() if name not in OWN}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _need(module: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{name} is not installed", hint=f"pip install {module}")


def forget(folder: Path) -> None:
    """Forget which runs elsewhere got the rows of the last run in a folder: another one begins."""
    for name in IDENTITIES:
        (folder / name).unlink(missing_ok=True)


def _identity(path: Path, make: Callable[[], str]) -> str:
    """Return the name of a run elsewhere that a file has; make one if there is none."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        made = make()
        path.write_text(made + "\n")
        return made


def _wait_for_a_later_second(folder: Path) -> None:
    """Wait until the name of a new file comes after those of the files that are there."""
    stamps = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*.*")]
    end = time.monotonic() + LATER_SECONDS
    while stamps and int(time.time()) <= max(stamps) and time.monotonic() < end:
        time.sleep(0.05)
