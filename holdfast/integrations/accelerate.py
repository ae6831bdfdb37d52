"""``Accelerator``: a loop that was written for Accelerate, on ``holdfast.Loop``."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.scheduler import AcceleratedScheduler  # type: ignore[import-untyped]
from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.data.source import Data
from holdfast.engine.numerics import Numerics
from holdfast.errors import UsageError
from holdfast.integrations.alone import be_alone
from holdfast.integrations.loaders import data_of
from holdfast.integrations.loop_settings import LoopSettings, divided
from holdfast.integrations.shares import Shares, steps_per_epoch
from holdfast.run.loop import Loop
from holdfast.run.script import Step

REFUSED = {
    "save_state": "checkpoint= saves, and a run resumes by itself",
    "load_state": "checkpoint= saves, and a run resumes by itself",
    "skip_first_batches": "a run that resumes goes on where it was",
    "clip_grad_value_": "accelerator.clip_grad_norm_",
    "set_trigger": "decide from what is the same on all workers, such as accelerator.last.loss",
    "check_trigger": "decide from what is the same on all workers, such as accelerator.last.loss",
    "init_trackers": "accelerator.log, and accelerator.loop.log_to('wandb') before the training",
    "trigger_sync_in_backward": "gradients are summed in optimizer.step()",
}


class AcceleratorSettings(LoopSettings, total=False):
    """Settings of an ``Accelerator``: those of its loop, and Accelerate's own that are honoured."""

    mixed_precision: str
    cpu: bool
    device_placement: bool


class Accelerator(accelerate.Accelerator):
    """Accelerate's ``Accelerator`` for a loop that survives: its training data are this worker's share of each step.

    - ``global_batch``: samples of a step. The batches of the training loader are the micro-batches.
    - ``seed``, ``weight``, ``numerics``, ``checkpoint``: as for ``holdfast.Loop``.
    - ``mixed_precision`` ("no" or "bf16"), ``cpu``, ``device_placement``: Accelerate's own. Others are refused by name.

    The loop is Accelerate's usual one, over ``accelerator.epochs(3)`` in place of ``range(3)``. ``optimizer.step()`` of
    a worker's last micro-batch commits the step. If somebody was lost, the loader gives micro-batches of the same step
    again, and the scheduler does not move. Raises ``UsageError`` for what cannot be honoured.
    """

    def __init__(self, *, global_batch: int, **given: Unpack[AcceleratorSettings]) -> None:
        settings, own = divided(given)
        _refuse(own)
        self._rank = int(os.environ.get("RANK", "0"))
        be_alone()
        # Counting micro-batches is holdfast's: a scheduler that counted those of this worker would differ from others'.
        plugin = GradientAccumulationPlugin(num_steps=1, adjust_scheduler=False, sync_with_dataloader=False)
        super().__init__(gradient_accumulation_plugin=plugin, **own)
        if self.mixed_precision not in ("no", "bf16"):
            raise UsageError(f"mixed_precision={self.mixed_precision!r} cannot be honoured", hint="'no' or 'bf16'")
        numerics = _with_autocast(settings["numerics"], self.mixed_precision)
        self._settings: dict[str, Any] = {**settings, "global_batch": global_batch, "numerics": numerics}
        self._model_given: nn.Module | None = None
        self._optimizer_given: Optimizer | None = None
        self._data: tuple[Data, int] | None = None
        self._schedulers_given: list[LRScheduler] = []
        self._loop: Loop | None = None
        self._shares: Shares | None = None
        self.last: Step | None = None  # the last one that this process has committed
        self._clip: float | None = None
        self._norm: Tensor | None = None  # what ``clip_grad_norm_`` has returned, to be filled in
        self.step_was_skipped = True  # the last ``optimizer.step()`` has not committed

    # --- before the training ---------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Return what a loop uses in place of its model, optimizer, loaders and schedulers, in the same order.

        The first ``DataLoader`` has the training data. Every worker reads all of the others, which evaluate.
        """
        in_order = sorted(args, key=lambda each: isinstance(each, LRScheduler))  # an optimizer before its scheduler
        found = {id(each): self._prepared(each) for each in in_order}
        return tuple(found[id(each)] for each in args) if len(args) != 1 else found[id(args[0])]

    def _prepared(self, given: Any) -> Any:
        if self._loop is not None and isinstance(given, nn.Module | Optimizer | LRScheduler):
            raise UsageError("prepare comes before accelerator.epochs and accelerator.loop", hint="prepare all at once")
        if isinstance(given, nn.Module):
            self._refuse_second(self._model_given, "model")
            self._model_given = given.to(self.device) if self.device_placement else given
            return given
        if isinstance(given, Optimizer):
            self._refuse_second(self._optimizer_given, "optimizer")
            self._optimizer_given = given
            self._optimizer = OptimizerOfSteps(self, given)
            return self._optimizer
        if isinstance(given, LRScheduler):
            self._schedulers_given.append(given)
            return SchedulerOfSteps(given, self._optimizer)
        if isinstance(given, DataLoader) and self._data is None:
            self._data = data_of(given)
            return Share(self, given)
        return super().prepare_data_loader(given) if isinstance(given, DataLoader) else given

    def _refuse_second(self, known: object, what: str) -> None:
        if known is not None:
            raise UsageError(f"prepare has got a second {what}", hint="holdfast.Loop trains several models in turns")

    @property
    def loop(self) -> Loop:
        """The ``Loop`` underneath: ``evaluate``, ``predict``, ``log_to``, ``ema``, ``save_model``, ``sha256`` ….

        Raises ``UsageError`` before model, optimizer and training loader are prepared.
        """
        if self._loop is None:
            if self._model_given is None or self._optimizer_given is None or self._data is None:
                raise UsageError(
                    "there is no model, no optimizer or no DataLoader yet",
                    hint="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
                )
            data, micro_batch = self._data
            state = {"schedulers": self._schedulers_given, "registered": [*self._custom_objects]}
            self._loop = Loop(
                model=self._model_given, optimizer=self._optimizer_given, data=data, micro_batch=micro_batch,
                state={key: value for key, value in state.items() if value}, **self._settings,
            )  # fmt: skip
        return self._loop

    # --- the loop --------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, which is the length of the training loader."""
        assert self._data is not None
        return steps_per_epoch(self._data[0], self._settings["global_batch"])

    @property
    def shares(self) -> Shares:
        """The training data, step by step. What the prepared loader yields."""
        if self._shares is None:
            loop = self.loop
            assert self._data is not None
            self._shares = Shares(loop, self._data[0])
        return self._shares

    def epochs(self, total: int, *, steps: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch, from the one that the run is in: a worker that joins begins there.

        ``total``: of epochs. ``steps``: the most steps of all epochs together. Each epoch is one pass over the training
        loader. Raises ``UsageError`` if that is left in its middle, and what ``Loop.steps`` raises.
        """
        return self.shares.epochs(total, steps=steps)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the prepared training loader."""
        for batch in self.shares:
            self.sync_gradients = self.shares.is_last
            self.step_was_skipped, self._clip, self._norm = True, None, None
            yield batch

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of a batch of the training loader. ``loss``: the mean over it."""
        if kwargs:
            raise UsageError(f"backward({next(iter(kwargs))}=…) cannot be honoured", hint="accelerator.backward(loss)")
        self.shares.backward(loss)

    def commit(self) -> None:
        """Commit the step, if the batch under way is this worker's last one. ``optimizer.step()`` calls it."""
        made = self.shares.commit(clip_norm=self._clip)
        self.sync_gradients, self.step_was_skipped = made is not None, made is None
        if made is not None:
            self.last = made
            if self._norm is not None and made.grad_norm is not None:
                self._norm.fill_(made.grad_norm)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the step is not committed: this worker has more batches of it, or somebody was lost."""
        return self.step_was_skipped

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Have the step clipped when it is committed. Returns the norm of the gradient, which is NaN until then."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if norm_type != 2 or {id(p) for p in given if p.requires_grad} != trained:
            raise UsageError(
                "only the 2-norm of all trained parameters together can be clipped",
                hint="accelerator.clip_grad_norm_(model.parameters(), 1.0)",
            )
        self._clip = None if math.isinf(max_norm) else max_norm
        self._norm = torch.tensor(math.nan, dtype=torch.float64)
        return self._norm

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context without effect: which batch is the last of its step is known without it."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context without effect: gradients are summed in ``optimizer.step()``."""
        return nullcontext()

    # --- what is around the loop -----------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of the workers that train; before they do, the one of rank 0."""
        entered = self._loop is not None and self._loop._cohort.group is not None
        return self.loop.is_first_worker if entered else self._rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """The same as ``is_main_process``: one worker prints."""
        return self.is_main_process

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return a function that does nothing but on the first worker."""
        assert function is not None

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return called

    on_local_main_process = on_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker."""
        if self.is_main_process:
            print(*args, **kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values into the journal's row of the committed step, as ``Loop.log`` does; called on every worker."""
        if not self.shares.is_computing:  # else it is broken, or there are more batches of it
            self.loop.log(values)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object on the first worker."""
        if self.is_main_process:
            super().save(obj, f, safe_serialization=safe_serialization)

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str], **given: Any) -> None:
        """Write the weights as ``model.safetensors`` into a folder; called on every worker."""
        if given:
            raise UsageError(
                f"save_model({next(iter(given))}=…) cannot be honoured", hint="accelerator.loop.save_model"
            )
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.loop.save_model(Path(save_directory) / "model.safetensors")

    def gather(self, tensor: Any) -> Any:
        """Return a value as it is: outside of steps all workers have the same."""
        self._refuse_in_step("gather")
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return a value as it is: each worker evaluates all of the data."""
        self._refuse_in_step("gather_for_metrics")
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return a value as it is: outside of steps all workers have the same."""
        self._refuse_in_step("reduce")
        return super().reduce(tensor, reduction, scale)

    def _refuse_in_step(self, what: str) -> None:
        if self._shares is not None and self._shares.is_computing:
            raise UsageError(
                f"accelerator.{what} between a batch and the commit: which workers have which batches may change",
                hint="after optimizer.step(), accelerator.last.loss is the mean over the step",
            )


def _refuse(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in AcceleratorSettings.__annotations__ or (name == "gradient_accumulation_steps" and value == 1):
            continue
        hint = "global_batch= is what a step has" if "accumulation" in name else "leave it out"
        raise UsageError(f"Accelerator({name}=…) cannot be honoured", hint=hint)


def _refusing(name: str, hint: str) -> Callable[..., Any]:
    def refuse(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"accelerator.{name} cannot be honoured", hint=hint)

    return refuse


for _name, _hint in REFUSED.items():
    setattr(Accelerator, _name, _refusing(_name, _hint))


def _with_autocast(numerics: Numerics, precision: str) -> Numerics:
    return numerics if precision == "no" else replace(numerics, autocast=torch.bfloat16)


class OptimizerOfSteps(AcceleratedOptimizer):
    """The optimizer of a prepared loop: ``step`` commits."""

    def __init__(self, accelerator: Accelerator, optimizer: Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Commit the step, if the batch under way is this worker's last one."""
        if closure is not None:
            raise UsageError("optimizer.step(closure) cannot be honoured", hint="optimizer.step()")
        self._accelerator.commit()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: gradients begin at zero in each step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last call of ``step`` has not committed."""
        return self._accelerator.step_was_skipped


class SchedulerOfSteps(AcceleratedScheduler):
    """The scheduler of a prepared loop: it moves once for each step that is committed."""

    def __init__(self, scheduler: LRScheduler, optimizer: OptimizerOfSteps) -> None:
        super().__init__(scheduler, optimizer)


class Share:
    """The training data of a prepared loop: this worker's micro-batches. Its length is that of an epoch, in steps."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        self._accelerator = accelerator
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        return self._accelerator.batches()

    def __len__(self) -> int:
        return self._accelerator.steps_per_epoch
