"""``holdfast.Run``, the training of a script."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import nn
from torch.utils.data import IterableDataset

from holdfast.checks import function, in_words
from holdfast.cluster import faults
from holdfast.data.fetch import Dataset
from holdfast.data.source import Data
from holdfast.data.stream import Stream
from holdfast.engine.engine import Loss, Weight
from holdfast.engine.model import Layers
from holdfast.engine.numerics import Numerics
from holdfast.engine.step import TrainingStep
from holdfast.engine.update import MakeOptimizer, Schedule
from holdfast.plan.placement import Placement
from holdfast.recovery.resume import Checkpoints
from holdfast.run.script import Step as Step
from holdfast.run.settings import Settings, place_of
from holdfast.run.showing import Showing
from holdfast.run.surroundings import Surroundings
from holdfast.sync.policy import Policy
from holdfast.sync.report import EVERY_STEP


class Run(Surroundings):
    """Training that goes on while workers come and go.

    - ``model``: a module that is trained as a whole. The loss calls it.
    - ``layers``: in place of ``model``, what may be cut into pipelines: a list of modules (or of functions that make
      them) or ``nn.Sequential``. Any other module is one layer.
    - ``loss``: a function of model and batch; with ``layers``, of output and target. It gives the mean over a
      micro-batch.
    - ``weight``: a function of a batch: its weight in the mean over a step, such as the number of its tokens that
      count. None: its number of samples.
    - ``optimizer``: a function of the parameters that makes an optimizer; of pairs of name and parameter, if the name
      of its argument begins with ``named``.
    - ``data``: a map-style data set, whose samples are ``(input, target)`` with ``layers``; a ``Stream`` or an
      ``IterableDataset``; or ``Data`` with more settings.
    - ``global_batch``, ``micro_batch``: samples of a step, and of a part of it that is computed at once.
    - ``seed``: of all random numbers: the order of samples, dropout, layers that are made. From 0 on, below 2**64.
    - ``schedule``: a function of the step that gives the learning rate, or one of the optimizer that gives a torch
      scheduler.
    - ``clip_norm``: the norm that gradients are clipped to, above 0. None: they are not.
    - ``numerics``: "exact", where the weights do not depend on how many workers there are or what happened to them;
      "fast", which may differ in the last bits; or ``Numerics`` with more settings.
    - ``placement``: ``Placement``, where layers go. None: every worker holds the whole model.
    - ``checkpoint``: a folder that all workers see, or ``Checkpoints`` with more settings. A run that finds a
      checkpoint there goes on from it. None: no checkpoints.
    - ``state``: the script's own values by name, such as ``{"best": inf}``: numbers, strings, tensors, lists, tuples
      and dicts of them, and anything with ``state_dict`` and ``load_state_dict``. They are ``run.state`` in the script,
      which changes them on every worker alike.
    - ``sync``: when replicas talk: at every step, or as a policy decides (``SelSync``, ``LocalSGD``, ``FedAvg``,
      ``DiLoCo``, ``SSP``; docs/sync.md). Under a policy each worker holds the whole model and trains on its share of
      the batch, and ``step.loss`` is its own.

    Raises ``UsageError`` for settings that make no sense.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    >>> run = Run(layers=nn.Linear(2, 1), loss=nn.functional.mse_loss, data=data,
    ...           optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    ...           global_batch=4, micro_batch=2)
    >>> [step.number for step in run.steps(3)]
    [0, 1, 2]
    """

    @in_words(hint=place_of)
    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        layers: Layers | None = None,
        loss: Loss,
        weight: Weight | None = None,
        optimizer: MakeOptimizer,
        data: Dataset | Stream | IterableDataset[Any] | Data,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        numerics: Literal["exact", "fast"] | Numerics = "exact",
        placement: Placement | None = None,
        checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
        state: Mapping[str, Any] | None = None,
        sync: Literal["every-step"] | Policy = "every-step",
    ) -> None:
        function("loss", loss, hint="as in nn.functional.mse_loss")  # only a ``Loop`` has none
        settings = Settings(
            model=model,
            layers=layers,
            loss=loss,
            weight=weight,
            optimizer=optimizer,
            data=Data.of(data),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            schedule=schedule,
            clip_norm=clip_norm,
            numerics=Numerics.of(numerics),
            placement=Placement.of(placement),
            checkpoint=Checkpoints.of(checkpoint),
            state={} if state is None else state,
            sync=sync,
        )
        super().__init__(settings)

    def steps(self, total: int | None = None, *, progress: bool | None = None) -> Iterator[Step]:
        """Train until ``total`` steps are committed. Yields each step when it is, whatever was lost meanwhile.

        A stream with ``epochs=`` ends by itself; ``total`` may be left out then, and nowhere else. ``progress``: show
        how far it is: as a bar on a terminal, as a line now and then elsewhere. None: if ``holdfast run`` has started
        the script. A loop that the script leaves, by ``break``, is over: a rerun of the script passes it.

        Raises ``UsageError`` if ``total`` is no number of steps, or if data, model, loss or the workers' scripts do not
        fit together, ``LossNotFinite`` if the loss is NaN or infinite, ``TooFewWorkers`` if those left cannot hold the
        model, ``CheckpointError`` if a checkpoint cannot be resumed from, ``Drift`` if workers hold different values of
        what must be equal, and whatever the user's functions raise.
        """
        return self._steps(total, progress=progress)

    def _turn(self, showing: Showing) -> Iterator[Step]:
        step = self._next_step()
        self._script.move_to(f"in {step.number + 1}")
        showing.step(step)
        yield step
        self._between_steps()

    def _next_step(self) -> Step:
        """Commit the next step."""
        cohort = self._cohort
        faults.at_step(self._progress.step)
        begun = self._begun()
        self._books.begin()
        report = EVERY_STEP
        if self._apart is None:
            loss = cohort.commit(TrainingStep(self.engine, self._progress, traced=self._traced))
        else:
            loss, report = self._apart.next_step()
        return self._committed(loss, report, begun)
