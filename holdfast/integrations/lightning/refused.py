"""What a ``Trainer`` and a ``LightningModule`` may ask for that holdfast cannot honour: refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities.model_helpers import is_overridden

from holdfast.errors import UsageError

CALLBACKS: dict[type[Any], str] = {
    cb.Timer: "workers' clocks differ; max_steps= or max_epochs=",
    cb.StochasticWeightAveraging: "strategy.loop.ema",
    cb.WeightAveraging: "strategy.loop.ema",
    cb.GradientAccumulationScheduler: "global_batch= is what a step has",
    cb.BaseFinetuning: "freeze layers before the training",
    cb.ModelPruning: "prune after the training",
    cb.BatchSizeFinder: "find it without the strategy",
    cb.LearningRateFinder: "find it without the strategy",
    cb.OnExceptionCheckpoint: "HoldfastStrategy(checkpoint=…)",
}
OF_ONE_WORKER = "gradients are those of one worker before the commit: strategy.last.grad_norm, gradient_clip_val="
HOOKS = {
    "backward": "loss.backward() of the whole is holdfast's",
    "on_before_optimizer_step": OF_ONE_WORKER,
    "configure_gradient_clipping": "Trainer(gradient_clip_val=…)",
    "on_before_batch_transfer": "on_after_batch_transfer, which gets each micro-batch",
}


def refuse(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise ``UsageError`` for the first thing that cannot be honoured."""
    for what, hint in _found(trainer, module):
        raise UsageError(f"{what} cannot be honoured", hint=hint)


def _found(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[str, str]]:
    if not module.automatic_optimization:
        yield "automatic_optimization=False", "holdfast.Loop trains several models in turns"
    for name, hint in HOOKS.items():
        if is_overridden(name, module, pl.LightningModule):
            yield f"LightningModule.{name}", hint
    yield from _in_trainer(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, hint in CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"the callback {type(callback).__name__}", hint
        if getattr(callback, "save_on_exception", False):
            yield "ModelCheckpoint(save_on_exception=True)", "HoldfastStrategy(checkpoint=…)"
        if is_overridden("on_before_optimizer_step", callback, pl.Callback):
            yield f"{type(callback).__name__}.on_before_optimizer_step", OF_ONE_WORKER


def _in_trainer(trainer: Any) -> Iterator[tuple[str, str]]:
    connector = trainer._accelerator_connector
    if trainer.accumulate_grad_batches != 1:
        yield "Trainer(accumulate_grad_batches=…)", "global_batch= is what a step has"
    if trainer.gradient_clip_val is not None and (trainer.gradient_clip_algorithm or "norm") != "norm":
        yield "Trainer(gradient_clip_algorithm='value')", "'norm'"
    if trainer.precision not in ("32-true", "bf16-mixed"):
        yield f"Trainer(precision={trainer.precision!r})", "'32-true' or 'bf16-mixed'"
    if trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run:
        yield "Trainer(limit_train_batches=…)", "max_steps="
    if trainer.overfit_batches:
        yield "Trainer(overfit_batches=…)", "a small data set"
    if trainer.reload_dataloaders_every_n_epochs:
        yield "Trainer(reload_dataloaders_every_n_epochs=…)", "one data set for the whole run"
    if trainer._val_check_time_interval is not None:
        yield "Trainer(val_check_interval=…) as a time", "a number of steps: workers' clocks differ"
    if connector._num_nodes_flag != 1:
        yield "Trainer(num_nodes=…)", "machines are those on which holdfast run is started"
    if trainer.num_devices != 1 or (connector._accelerator_flag == "cpu" and len(connector._parallel_devices) != 1):
        yield "Trainer(devices=…)", "workers are those of holdfast run -n 4"
    if connector._layer_sync is not None:
        yield "Trainer(sync_batchnorm=True)", "leave it out: statistics are those of each micro-batch"
    if trainer.ckpt_path is not None:
        yield "trainer.fit(ckpt_path=…)", "HoldfastStrategy(checkpoint=…) resumes by itself"
    if trainer.max_steps == -1 and trainer.fit_loop.max_epochs == -1:
        yield "Trainer(max_epochs=-1)", "max_steps="
