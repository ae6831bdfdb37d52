"""``holdfast.Run``: what a training script writes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_model as write_safetensors
from torch import nn
from torch.optim import Optimizer

from holdfast.cluster import faults
from holdfast.cluster.client import Client, Place
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Membership, Solo
from holdfast.data.order import Order
from holdfast.engine.engine import Dataset, Engine, Loss, label_of
from holdfast.engine.memory import keep_freed_memory
from holdfast.engine.model import LayeredModel, Layers
from holdfast.engine.profile.hook import about_to_train, end_if_measured, may_write
from holdfast.engine.state import State
from holdfast.engine.statistics import refuse_running_statistics
from holdfast.engine.update import Schedule, Update
from holdfast.errors import UsageError
from holdfast.plan.tree import tree_sum
from holdfast.recovery.cohort import Cohort, Kind, Operation
from holdfast.recovery.saver import Saver, Settings


@dataclass(frozen=True, kw_only=True)
class Step:
    """One committed training step.

    >>> Step(number=3, loss=0.5, epoch=0, workers=4, is_first_worker=True).loss
    0.5
    """

    number: int
    loss: float
    epoch: int
    workers: int
    is_first_worker: bool


class Run:
    """Training that goes on while workers come and go.

    ``layers`` is a list of modules or ``nn.Sequential``; any other module is one layer. ``loss`` gives
    the mean over its samples. In ``numerics="exact"`` the weights do not depend on how many workers
    there are or what happened to them; ``"fast"`` may differ in the last bits. ``schedule`` is a
    function of the step that gives the learning rate, or a function of the optimizer that gives a torch
    scheduler. ``tolerate`` is the number of simultaneous losses to survive; here every worker holds the
    whole model, so it is a wish that the run checks, and says when too few workers are left to grant it.

    ``checkpoint`` is a folder that all workers see; a run that finds a checkpoint there goes on from it. One is
    saved ``every`` so many steps ("auto": as its measured cost and the failures so far advise) and at the
    end; the newest ``keep`` stay, and those of steps that ``keep_every`` divides.

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
        data: Dataset,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        numerics: Literal["exact", "fast"] = "exact",
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        tolerate: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | Literal["auto"] = "auto",
        keep: int = 3,
        keep_every: int | None = None,
        collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
        device: str | torch.device | None = None,
    ) -> None:
        _check_settings(numerics, seed, tolerate)
        _check_batches(data, global_batch, micro_batch)
        exact = numerics == "exact"
        if exact:  # sums inside an operator depend on the number of threads
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        keep_freed_memory()
        chosen = _choose_device(device)
        model = LayeredModel(layers, seed=seed, device=chosen)
        if exact:
            refuse_running_statistics(model.module)
        order = Order(size=len(data), global_batch=global_batch, micro_batch=micro_batch, seed=seed, shuffle=shuffle)
        update = Update(model.trainable, optimizer, schedule=schedule, clip_norm=clip_norm)
        self.engine = Engine(
            model=model,
            update=update,
            loss=loss,
            data=data,
            order=order,
            collate=collate,
            exact=exact,
            autocast=autocast,
        )
        self.tolerate = tolerate
        self._progress: dict[str, Any] = {"step": 0, "results": {}}
        self._state = State(model, update, self._progress, exact=exact)
        self._events = Events(os.environ.get("HOLDFAST_EVENTS"))
        kept = checkpoint and Settings(root=Path(checkpoint), every=every, keep=keep, keep_every=keep_every)
        self._saver = Saver(kept, self._state, self._events) if kept else None
        self._trace = bool(os.environ.get("HOLDFAST_TRACE"))
        self._place = "after 0"  # where the script is: in the body of a loop, or after one
        self._done_here = 0
        self._warned = False
        label = label_of(model.module, order, numerics=numerics, clip_norm=clip_norm, autocast=autocast)
        self._progress["label"] = label
        resume = None if self._saver is None else self._saver.resume
        self._cohort = Cohort(_membership(label), self._state, chosen, self._events, resume=resume)
        faults.plan(self._cohort.membership.worker)
        _runs.append(self)

    # --- training --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return int(self._progress["step"])

    @property
    def workers(self) -> int:
        """How many workers train at the moment."""
        return self._cohort.size

    @property
    def is_first_worker(self) -> bool:
        return self._cohort.is_first

    def steps(self, total: int) -> Iterator[Step]:
        """Train until ``total`` steps are committed; yields each as it is, whatever happens inside."""
        about_to_train(self)  # `holdfast profile` measures instead
        self._cohort.boundary()
        while self.step < total:
            step = self._one_step()
            self._move_to(f"in {self.step}")
            yield step
            self._save_if_due()
            self._cohort.boundary()
        self._move_to(f"after {total}")
        if self.step == total:  # a joiner's script runs through loops that are long over
            self._save_if_due(last=True)

    def finish(self) -> None:
        """Called at the end of the script: nobody leaves before all have committed the last step.

        A worker whose last vote broke needs somebody to tell it that the step is committed.
        """
        if self._cohort.group is not None:
            self._save_if_due(last=True)  # the loop may have been left
            if self._saver is not None:
                self._saver.settle(self._cohort)
            self._cohort.commit(Operation(kind=Kind.END, attempt=lambda group: []))
            self._cohort.membership.finished()

    def leave(self) -> None:
        """Returns when no checkpoint is being written any more."""
        if self._saver is not None:
            self._saver.leave()

    def _save_if_due(self, *, last: bool = False) -> None:
        if self._saver is not None:
            self._saver.if_due(self._cohort, last=last)

    def _one_step(self) -> Step:
        number = self.step
        faults.at_step(number)
        engine, cohort = self.engine, self._cohort

        def attempt(group: Group) -> list[float]:
            losses = engine.attempt(number, group)
            if self._trace:
                self._event("vote", step=number, samples=engine.used)
            return losses

        def apply() -> None:
            engine.apply(number)
            self._progress["step"] = number + 1

        begin, generation = time.monotonic(), cohort.generation
        loss = cohort.commit(Operation(kind=Kind.STEP, attempt=attempt, apply=apply, drop=engine.drop))
        if self._saver is not None and cohort.generation == generation:  # a recovery is not the cost of a save
            self._saver.costs.step(time.monotonic() - begin, saving=self._saver.busy)
        self._event("commit", step=number, loss=loss)
        self._check_tolerance()
        return Step(
            number=number,
            loss=loss,
            epoch=number // engine.order.steps_per_epoch,
            workers=cohort.size,
            is_first_worker=cohort.is_first,
        )

    def _event(self, event: str, **fields: Any) -> None:
        cohort = self._cohort
        self._events.write(event, worker=cohort.membership.worker, generation=cohort.generation, **fields)

    def _check_tolerance(self) -> None:
        few = self.workers <= self.tolerate
        if few and not self._warned and self.is_first_worker:
            print(f"holdfast: {self.workers} workers cannot survive the loss of {self.tolerate}", flush=True)
        self._warned = few

    def _move_to(self, place: str) -> None:
        if place != self._place:
            self._place = place
            self._done_here = 0

    # --- evaluation and results ------------------------------------------------------------------

    def evaluate(self, dataset: Dataset, measure: Loss | None = None) -> float:
        """The mean of ``measure(output, target)``, by default the loss, over a data set.

        Workers share the work, so every worker must call it. A worker that joins later gets the values of
        the evaluations it has missed between loops, so that its script decides as the others' did.
        """
        end_if_measured(self)
        measure = measure or self.engine.loss
        if self._cohort.group is None:  # before training: nobody to share with
            return tree_sum(self.engine.evaluate(dataset, measure, None))
        attempt = partial(self.engine.evaluate, dataset, measure)
        return self._once(Operation(kind=Kind.EVALUATION, attempt=attempt))

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as safetensors, whole or not at all.

        Every worker must call it; the first one writes, and if it is lost in the middle, the next.
        """

        def attempt(group: Group) -> list[float]:
            if group.rank == 0:
                _write_whole(self.engine.model.module, Path(path))
            return []

        if not may_write(self, path):  # `holdfast profile`
            return
        if self._cohort.group is None:
            _write_whole(self.engine.model.module, Path(path))
        else:
            self._once(Operation(kind=Kind.SAVE, attempt=attempt))

    def _once(self, operation: Operation) -> float:
        """Commits an operation unless it was committed before this worker joined.

        A joiner's script runs through loops that are over without entering their bodies, so only what
        comes after a loop has to be remembered for it.
        """
        key = f"{self._place}/{self._done_here}"
        self._done_here += 1
        if key in self._progress["results"]:
            return float(self._progress["results"][key])
        faults.at_step(self.step)
        value = self._cohort.commit(operation)
        if self._place.startswith("after"):
            self._progress["results"][key] = value
        return value

    def sha256(self, *, weights_only: bool = False) -> str:
        """The SHA-256 of weights and optimizer state: equal hashes, equal runs."""
        return self._state.sha256(weights_only=weights_only)


def _write_whole(module: nn.Module, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        write_safetensors(module, str(unfinished))
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_settings(numerics: str, seed: int, tolerate: int) -> None:
    if numerics not in ("exact", "fast"):
        raise UsageError(f"numerics={numerics!r} is not known", hint="'exact' or 'fast'")
    if seed < 0 or tolerate < 0:
        raise UsageError("seed and tolerate cannot be negative")


def _check_batches(data: Dataset, global_batch: int, micro_batch: int) -> None:
    if global_batch < 1 or micro_batch < 1 or global_batch % micro_batch:
        nearest = max(1, round(global_batch / max(1, micro_batch))) * max(1, micro_batch)
        raise UsageError(
            f"global_batch={global_batch} is not a multiple of micro_batch={micro_batch}",
            hint=f"global_batch={nearest} would be",
        )
    streams = isinstance(data, torch.utils.data.IterableDataset)
    if streams or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(
            "data must be map-style: len(data) and data[i]", hint="a stream has no order that can be repeated"
        )
    if len(data) < global_batch:
        raise UsageError(
            f"the data set has {len(data)} samples, fewer than global_batch={global_batch}",
            hint=f"global_batch={len(data) // micro_batch * micro_batch} or less"
            if len(data) >= micro_batch
            else f"micro_batch={len(data)} or less",
        )


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():  # untested here
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


_clients: list[Client] = []
_runs: list[Run] = []


def _membership(label: str) -> Membership:
    place = Place.from_environment()
    if place is not None:
        if _clients:
            raise UsageError("a script can have one Run", hint="a second one has to be another script")
        _clients.append(Client(place, label=re.sub(r"\s+", " ", label)))
        return _clients[0]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several workers without a holdfast agent", hint="start the script with: holdfast run -n 4 train.py"
        )
    return Solo()


def leave() -> None:
    """This worker is sent away: what it has begun to write is completed first."""
    for run in _runs:
        run.leave()


def farewell() -> None:
    """The script is over: tell the coordinator that this worker's end is no failure."""
    for run in _runs:
        run.finish()
    for client in _clients:
        client.bye()
