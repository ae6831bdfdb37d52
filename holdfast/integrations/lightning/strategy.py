"""``HoldfastStrategy``: a strategy of Lightning whose steps are those of a ``holdfast.Loop``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from holdfast.checks import near
from holdfast.data.source import Data
from holdfast.errors import UsageError
from holdfast.integrations.alone import be_alone
from holdfast.integrations.lightning.journal import JournalLogger
from holdfast.integrations.lightning.logged import log_step, noting
from holdfast.integrations.lightning.position import Position
from holdfast.integrations.lightning.refused import refuse
from holdfast.integrations.loaders import data_of
from holdfast.integrations.loop_settings import LoopSettings, divided
from holdfast.integrations.shares import steps_per_epoch
from holdfast.journal.rows import FACTS
from holdfast.run.loop import Loop
from holdfast.run.loop_step import LoopStep
from holdfast.run.script import Step
from holdfast.words import a_kind


class HoldfastStrategy(Strategy):
    """A strategy of Lightning that keeps ``trainer.fit`` going while workers come and go.

    - ``global_batch``: samples of a step. The batches of the training ``DataLoader`` are the micro-batches.
    - ``seed``, ``weight``, ``numerics``, ``checkpoint``: as for ``holdfast.Loop``.

    To Lightning a step is one batch. ``training_step`` is called for each of this worker's micro-batches; if somebody
    is lost, it is called again for those of the next attempt. Each worker validates on all of the data. ``self.log`` in
    ``training_step`` logs the mean over the step. Raises ``UsageError`` for what cannot be honoured.

    >>> strategy = HoldfastStrategy(global_batch=64, checkpoint="runs/digits")
    >>> trainer = pl.Trainer(strategy=strategy, max_epochs=3)  # doctest: +SKIP
    """

    strategy_name = "holdfast"

    def __init__(self, *, global_batch: int, **given: Unpack[LoopSettings]) -> None:
        super().__init__()
        settings, others = divided(given)
        for name in others:
            raise UsageError(
                f"a HoldfastStrategy has no argument {name!r}", hint=near(name, [*LoopSettings.__annotations__])
            )
        self._is_alone = "HOLDFAST_WORKER" not in os.environ
        be_alone()
        self._settings = settings
        self._global_batch = global_batch
        self._data: tuple[Data, int] | None = None
        self._loop: Loop | None = None
        self._steps: Any = None
        self._step: LoopStep | None = None
        self._position: Position | None = None
        self._total = 0  # steps
        self._is_fitting = False  # between the first batch that this process gets and the end of the training
        self.last: Step | None = None  # the last one that this process has committed
        self._set_rank()

    @property
    def loop(self) -> Loop:
        """The ``Loop`` underneath: ``evaluate``, ``log_to``, ``save_model``, ``sha256`` …. It is made by ``fit``."""
        if self._loop is None:
            raise UsageError("there is no loop before trainer.fit", hint="in on_fit_start, or after it")
        return self._loop

    def logger(self) -> JournalLogger:
        """Return a logger for ``Trainer(logger=…)`` that writes into the run's journal."""
        return JournalLogger(self)

    # --- before the training ---------------------------------------------------------------------

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def setup(self, trainer: pl.Trainer) -> None:
        """Take this worker's place among the others, and go to where they are."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            assert self.lightning_module is not None
            refuse(trainer, self.lightning_module)
            if self._loop is not None:
                raise UsageError("trainer.fit was called twice", hint="one fit in a script; max_epochs= for more")
        super().setup(trainer)
        if fits:
            trainer.fit_loop.setup_data()
            self._begin(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the steps in place of the training data; what else is read is read whole by each worker."""
        if self._trainer.state.fn != TrainerFn.FITTING or self._trainer.state.stage != RunningStage.TRAINING:
            return dataloader
        if self._data is not None:
            raise UsageError("there are several training DataLoaders", hint="one; holdfast.Loop takes what you like")
        self._data = data_of(dataloader)
        return Steps(self, steps_per_epoch(self._data[0], self._global_batch))

    def _begin(self, trainer: Any) -> None:
        assert self._data is not None
        data, micro_batch = self._data
        self._position = Position(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._loop = Loop(
            model=trainer.lightning_module, optimizer=self.optimizers[0], data=data, global_batch=self._global_batch,
            micro_batch=micro_batch,
            state={"lightning": self._position, **({"schedulers": schedulers} if schedulers else {})}, **self._settings,
        )  # fmt: skip
        limits = [trainer.fit_loop.max_epochs * trainer.fit_loop.max_batches, trainer.max_steps]
        self._total = int(min(limit for limit in limits if limit >= 0))
        self._steps = self._loop.steps(self._total)
        self._go_on()
        if self._position.taken:
            trainer.num_sanity_val_steps = 0
            self._position.restore()
        elif self._step is not None:
            self._position.set_folders(self._loop._results.tell(self._position.folders())[0])

    def _go_on(self) -> None:
        """Come to the next step, or to the same one again. Workers join and leave here."""
        self._step = next(self._steps, None)
        self._set_rank()

    def _set_rank(self) -> None:
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # what Lightning's strategies do

    # --- the training ----------------------------------------------------------------------------

    def fetch(self) -> GlobalBatch:
        """Come to the next step, for Lightning asks for its next batch; return what it gets."""
        assert self._position is not None
        if self._is_fitting:
            self._refuse_skipped()
            self._position.take()
            self._go_on()
        assert self._step is not None
        if not self._is_fitting:
            self._is_fitting = True
            if self._position.taken:
                self._position.arrive()
            self._step.seed_again()  # a worker that joins has called hooks that the others have not
            if self.loop.has_agent:
                self._trainer._signal_connector.teardown()  # SIGTERM is a notice for the agent
        return GlobalBatch(self._step.number, self.loop.engine.order.batch_size(self._step.number))

    def _refuse_skipped(self) -> None:
        assert self._step is not None
        if self._step.made is None:
            raise UsageError(
                f"step {self._step.number} was not computed", hint="on_train_batch_start cannot skip it by giving -1"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute and commit a step: call ``training_step`` for each micro-batch, again if somebody is lost."""
        groups = [{key: value for key, value in each.items() if key != "params"} for each in self._groups]
        while (made := self._attempt(args[1:])) is None:
            self._go_on()
            for group, values in zip(self._groups, groups, strict=True):  # what the module set before optimizer.step
                group.update(values)
        self.last = made
        assert self.lightning_module is not None
        log_step(self.lightning_module, made.notes or [])
        return torch.tensor(made.loss, device=self.root_device)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizers[0].param_groups

    def _attempt(self, more: tuple[Any, ...]) -> Step | None:
        step, trainer, notes = self._step, self._trainer, list[Any]()
        assert step is not None
        for given in step.micro_batches():
            batch = self.batch_to_device(trainer.precision_plugin.convert_input(given))
            notes.append([])
            with noting(trainer.lightning_module, batch, notes[-1]):
                loss = _loss_of(super().training_step(batch, *more))
            call._call_callback_hooks(trainer, "on_before_backward", loss)
            call._call_lightning_module_hook(trainer, "on_before_backward", loss)
            step.backward(loss)
            call._call_callback_hooks(trainer, "on_after_backward")
            call._call_lightning_module_hook(trainer, "on_after_backward")
        return step.commit(clip_norm=trainer.gradient_clip_val, notes=None if step.is_broken else notes)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which computes the step and commits it: the update is made then."""
        return closure()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Do nothing: the step is committed."""
        return closure_loss

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device."""
        return batch if isinstance(batch, GlobalBatch) else super().batch_to_device(batch, device, dataloader_idx)

    def on_train_end(self) -> None:
        """End the loop. If Lightning has stopped early, it is left: so is it for workers that join later."""
        assert self._position is not None
        assert self._step is not None
        if self._is_fitting:
            self._refuse_skipped()
            self._position.take(at_end=True)
        if self._step.number == self._total - 1:
            next(self._steps, None)
        else:
            self._steps.close()
        self._step, self._is_fitting = None, False

    def journal(self, values: Mapping[str, Any]) -> None:
        """Log values into the journal, for the step that is committed."""
        if self._loop is not None and (self._step is None or self._step.made is not None):
            named = {name: value for name, value in values.items() if name != "epoch"}  # which Lightning always adds
            self._loop.log({f"lightning/{name}" if name in FACTS else name: value for name, value in named.items()})

    # --- files, and what workers have to agree on ------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning. The first worker does; if it is lost meanwhile, the next."""
        self._once(lambda: self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of Lightning, on the first worker."""
        self._once(lambda: self.checkpoint_io.remove_checkpoint(filepath))

    def _once(self, act: Any) -> None:
        if self._is_fitting or (self._loop is not None and self._step is None):
            self.loop._results.write(act)
        elif self.is_global_zero:
            act()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the first worker's value, on every worker."""
        return self._told(obj)[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers, or any of them, decide so."""
        told = self._told(bool(decision))
        return min(told) if all else max(told)

    def _told(self, value: Any) -> list[Any]:
        """Return what all workers say. Outside of the training each is on its own."""
        if not self._is_fitting:
            return [value]
        try:
            json.dumps(value)
        except (TypeError, ValueError) as e:
            raise UsageError(f"{a_kind(value)} cannot be broadcast", hint="numbers, texts, lists, dicts") from e
        return self.loop._results.tell(value)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a value as it is: all workers validate on the same data."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return a value as it is: outside of ``training_step`` it is the same on all workers."""
        if self._step is not None and self._step.is_computing:
            raise UsageError("self.all_gather in training_step cannot be honoured", hint="self.log a number")
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: what needs all workers waits for them by itself."""

    # --- places ----------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return self._settings["numerics"].choose_device()

    def model_to_device(self) -> None:
        """Move the model to the device."""
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of the workers that train. Before they do, none is, but for a worker alone."""
        entered = self._loop is not None and self._loop._cohort.group is not None
        return self.loop.is_first_worker if entered else self._is_alone

    @property
    def global_rank(self) -> int:
        """0 on the first worker, 1 on all others."""
        return 0 if self.is_global_zero else 1

    @property
    def local_rank(self) -> int:
        """0: each worker prepares its data."""
        return 0

    @property
    def world_size(self) -> int:
        """1: to Lightning each worker is alone."""
        return 1


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"training_step has returned {'no loss' if loss is None else type(loss).__name__}",
            hint="the loss of each micro-batch, or a dict that has it; weight= may give one no weight",
        )
    return loss


class GlobalBatch:
    """A step, which Lightning takes for a batch. Hooks that are given a batch are given this one.

    ``number``: of the step. It iterates over one tensor with a row for each sample: Lightning asks for their number.
    """

    def __init__(self, number: int, samples: int) -> None:
        self.number, self.samples = number, samples

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.empty(self.samples, 0)


class Steps:
    """The training data as Lightning reads them: one item for each step of an epoch. Lightning counts them."""

    def __init__(self, strategy: HoldfastStrategy, length: int) -> None:
        self._strategy, self._length = strategy, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[GlobalBatch]:
        while True:
            yield self._strategy.fetch()
