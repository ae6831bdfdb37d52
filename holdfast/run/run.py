"""``holdfast.Run``, the training of a script."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.cluster import faults, lifeline
from holdfast.cluster.client import Client, Place
from holdfast.cluster.events import Events
from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Membership, Solo
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import End
from holdfast.data.fetch import Dataset
from holdfast.data.source import Data
from holdfast.engine.engine import Loss
from holdfast.engine.model import Layers
from holdfast.engine.numerics import Numerics
from holdfast.engine.profile.hook import about_to_train, end_if_measured, may_write
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.step import TrainingStep
from holdfast.engine.update import Schedule
from holdfast.errors import UsageError
from holdfast.log.log import LogSettings
from holdfast.plan.placement import Placement
from holdfast.recovery.resume import Checkpoints
from holdfast.run.label import make_label, make_shape
from holdfast.run.parts import make_arranger, make_engine
from holdfast.run.results import Results
from holdfast.run.saver import Saver
from holdfast.run.script import Script
from holdfast.run.script import Step as Step
from holdfast.run.settings import Settings
from holdfast.sync.policy import Policy
from holdfast.sync.report import EVERY_STEP, Report, Totals
from holdfast.sync.run_training import RunTraining
from holdfast.words import count

logger = logging.getLogger(__name__)


class Run:
    """Training that goes on while workers come and go.

    - ``layers``: a list of modules (or of functions that make them) or ``nn.Sequential``. Any other module is one
      layer.
    - ``loss``: a function of output and target that gives the mean over its samples.
    - ``optimizer``: a function of the parameters that makes an optimizer.
    - ``data``: a map-style data set, where ``data[i]`` is ``(input, target)``; or ``Data`` with more settings.
    - ``global_batch``, ``micro_batch``: samples of a step, and of a part of it that is computed at once.
    - ``seed``: of all random numbers: the order of samples, dropout, layers that are made. From 0 on, below 2**64.
    - ``collate``: a function of a list of samples that makes one batch of them.
    - ``schedule``: a function of the step that gives the learning rate, or one of the optimizer that gives a torch
      scheduler.
    - ``clip_norm``: the norm that gradients are clipped to, above 0. None: they are not.
    - ``numerics``: "exact", where the weights do not depend on how many workers there are or what happened to them;
      "fast", which may differ in the last bits; or ``Numerics`` with more settings.
    - ``tolerate``: how many workers may be lost at once: more than so many hold each layer. None: one, if there are
      enough workers.
    - ``placement``: ``Placement``, where layers go. None: the planner forms pipelines from what it measures.
    - ``checkpoint``: a folder that all workers see, or ``Checkpoints`` with more settings. A run that finds a
      checkpoint there goes on from it. None: no checkpoints.
    - ``log``: True, to keep what stages send each other until the next checkpoint. Layers of which every copy is
      lost are then computed again from that, alone. Bytes or text such as "2GB" are a budget for all workers together;
      ``LogSettings`` has more settings.
    - ``sync``: when replicas talk: at every step, or as a policy decides (``SelSync``, ``LocalSGD``, ``FedAvg``,
      ``DiLoCo``, ``SSP``; docs/sync.md). Under a policy each worker holds the whole model and trains on its share of
      the batch, and ``step.loss`` is its own.

    Raises ``UsageError`` for settings that make no sense.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    >>> run = Run(layers=nn.Linear(2, 1), loss=nn.functional.mse_loss, data=data,
    ...           optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    ...           global_batch=4, micro_batch=2)
    >>> [step.number for step in run.steps(3)]
    [0, 1, 2]
    """

    def __init__(
        self,
        *,
        layers: Layers,
        loss: Loss,
        optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
        data: Dataset | Data,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        numerics: Literal["exact", "fast"] | Numerics = "exact",
        tolerate: int | None = None,
        placement: Placement | None = None,
        checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
        log: bool | int | str | LogSettings = False,
        sync: Literal["every-step"] | Policy = "every-step",
    ) -> None:
        settings = Settings(
            layers=layers,
            loss=loss,
            optimizer=optimizer,
            data=Data.of(data),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            collate=collate,
            schedule=schedule,
            clip_norm=clip_norm,
            numerics=Numerics.of(numerics),
            tolerate=tolerate,
            placement=Placement.of(placement),
            checkpoint=Checkpoints.of(checkpoint),
            log=log,
            sync=sync,
        )
        self.engine, self._log = make_engine(settings)
        self._take_part(settings)

    def _take_part(self, settings: Settings) -> None:
        """Make the state of this worker, and take its place among the others."""
        engine, kept = self.engine, settings.checkpoint
        label = make_label(settings, engine)
        self._progress = Progress(label=label)
        self._state = State(
            engine.model,
            engine.update,
            self._progress,
            holdings=engine.holdings,
            exact=engine.exact,
            look=engine.look_at,
        )
        self._events = Events(os.environ.get("HOLDFAST_EVENTS"))
        self._saver = Saver(kept, self._state, self._events, self._log) if kept else None
        self._arranger = make_arranger(settings, engine, self._state, self._events, self._saver, self._log)
        self._trace = bool(os.environ.get("HOLDFAST_TRACE"))
        self._script = Script()
        self._said = ""  # about what can be survived
        self._wished = settings.tolerate or 0  # what the user has asked for in so many words
        membership = _membership(label | make_shape(settings))
        self._cohort = Cohort(membership, self._arranger, engine.model.device, self._events)
        self._results = Results(engine, self._state, self._cohort, self._script, self._settle)
        self._apart = None
        if settings.policy is not None:
            parts = (engine, self._state, self._cohort, self._events)
            self._apart = RunTraining(settings.policy, *parts, between=self._between_steps)
        faults.plan(membership.worker)
        _runs.append(self)

    # --- training --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._progress.step

    @property
    def workers(self) -> int:
        """Number of workers that train at the moment."""
        return self._cohort.size

    @property
    def is_first_worker(self) -> bool:
        """Whether this worker is the first of those that train. Before training begins, none is."""
        return self._cohort.is_first

    def steps(self, total: int) -> Iterator[Step]:
        """Train until ``total`` steps are committed. Yields each step when it is, whatever was lost meanwhile.

        Raises ``UsageError`` if data, model, loss or the workers' scripts do not fit together, ``LossNotFinite`` if
        the loss is NaN or infinite, ``TooFewWorkers`` if those left cannot hold the model, ``CheckpointError`` if a
        checkpoint cannot be resumed from, and whatever the user's functions raise.
        """
        about_to_train(self)  # `holdfast profile` measures instead
        self._cohort.boundary()
        while self.step < total:
            self._save_if_due()  # a log begins with a checkpoint
            step = self._next_step()
            self._script.move_to(f"in {step.number + 1}")
            yield step
            self._between_steps()
        self._script.move_to(f"after {total}")
        if self.step == total:  # a joiner's script runs through loops that are long over
            self._settle("the last step")
            self._save_if_due(last=True)

    def _between_steps(self) -> None:
        self._save_if_due()
        if self._cohort.stops:
            self._settle("workers join or leave")
        self._cohort.boundary()

    def finish(self) -> None:
        """End the training: return when all workers have committed the last step. Called at the end of the script.

        A worker whose last vote broke needs somebody to tell it that the step is committed.
        """
        if self._cohort.group is not None:
            self._settle("the end")
            self._save_if_due(last=True)  # the loop may have been left
            if self._saver is not None:
                self._saver.settle(self._cohort)
            self._cohort.commit(End())
            self._cohort.membership.finished()

    def leave(self) -> None:
        """Complete what is being written: return when no checkpoint is any more, and close the log."""
        if self._saver is not None:
            self._saver.leave()
        if self._log is not None:
            self._log.close()

    def _save_if_due(self, *, last: bool = False) -> None:
        if self._saver is not None:
            if self._saver.is_due(self._cohort, last=last):
                self._settle("a checkpoint")
            self._saver.if_due(self._cohort, last=last)
        elif self._cohort.everybody_leaves:
            lifeline.report("unsaved", step=self.step, reason="the run has no checkpoint folder", wanted=False)

    def _settle(self, why: str, *, full: bool = True) -> None:
        """Make replicas equal that train apart. ``why`` is for the report; ``full``: the optimizer's state too."""
        if self._apart is not None:
            self._apart.settle(why, full=full)
            self._apart.compute_together()

    def _next_step(self) -> Step:
        """Commit the next step."""
        number, cohort = self.step, self._cohort
        faults.at_step(number)
        begin, generation = time.monotonic(), cohort.generation
        report = EVERY_STEP
        if self._apart is None:
            loss = cohort.commit(self._training_step())
        else:
            loss, report = self._apart.next_step()
        if self._saver is not None and cohort.generation == generation:  # a recovery is not the cost of a save
            self._saver.costs.step(time.monotonic() - begin, saving=self._saver.busy)
        self._event("commit", step=number, loss=loss)
        self._say_what_is_survived()
        return self._step(number, loss, report)

    def _training_step(self) -> TrainingStep:
        return TrainingStep(self.engine, self._progress, traced=self._note_samples if self._trace else None)

    def _note_samples(self, samples: list[int]) -> None:
        self._event("vote", step=self.step, samples=samples)

    def _step(self, number: int, loss: float, report: Report) -> Step:
        return Step(
            number=number,
            loss=loss,
            epoch=number // self.engine.order.steps_per_epoch,
            workers=self._cohort.size,
            is_first_worker=self._cohort.is_first,
            sync=report,
        )

    def _event(self, event: str, **fields: Any) -> None:
        cohort = self._cohort
        self._events.write(event, worker=cohort.membership.worker, generation=cohort.generation, **fields)

    def _say_what_is_survived(self) -> None:
        """Warn if the workers are too few for the wished tolerance: once for each number of them, not at each step."""
        wished, possible = self._wished, self._arranger.layout.tolerate
        said = f"{count(self.workers, 'worker')} cannot survive the loss of {wished}" if possible < wished else ""
        if said and said != self._said and self.is_first_worker:
            logger.warning(said)
        self._said = said

    @property
    def sync_totals(self) -> Totals:
        """Totals of this worker: steps, synchronisations, bytes sent, and how far replicas were apart."""
        if self._apart is not None:
            return self._apart.totals
        return Totals(steps=self.step, synchronised=self.step, exchanged=self.step, sent=self._cohort.sent)

    # --- evaluation and results ------------------------------------------------------------------

    def evaluate(self, dataset: Dataset, measure: Loss | None = None) -> float:
        """Return the mean of ``measure(output, target)``, by default the loss, over a data set.

        Workers share the work, so every worker must call it. A worker that joins later gets the values of
        the evaluations it has missed between loops, so that its script decides as the others' did. Raises
        ``UsageError`` if the data set is empty, or if workers ask for different things.
        """
        end_if_measured(self)
        return self._results.evaluate(dataset, measure or self.engine.loss)

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors, whole or not at all.

        Every worker must call it; the first one writes, and if it is lost in the middle, the next. Raises
        ``HoldfastError`` if the file cannot be written or no worker holds some weight, ``UsageError`` if workers ask
        for different things.
        """
        if may_write(self, path):  # not for `holdfast profile`
            self._results.save_model(Path(path))

    def sha256(self, *, weights_only: bool = False) -> str:
        """Return the SHA-256 of weights and optimizer state: equal hashes, equal runs.

        ``weights_only`` leaves out the optimizer's state. Where workers hold parts of the model, every worker must
        call it. Raises ``HoldfastError`` if no worker holds some part of the state, or if copies of it differ.
        """
        return self._results.sha256(weights_only=weights_only)


_clients: list[Client] = []
_runs: list[Run] = []


def _membership(label: Label) -> Membership:
    place = Place.from_environment()
    if place is not None:
        if _clients:
            raise UsageError("a script can have one Run", hint="a second one has to be another script")
        _clients.append(Client(place, label=label))
        return _clients[0]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several workers without a holdfast agent", hint="start the script with: holdfast run -n 4 train.py"
        )
    return Solo()


def leave() -> None:
    """Complete what this worker has begun to write, because it is sent away."""
    for run in _runs:
        run.leave()


def farewell() -> None:
    """End all runs, because the script is over, and tell the coordinator that this worker's end is no failure."""
    for run in _runs:
        run.finish()
    for client in _clients:
        client.bye()
