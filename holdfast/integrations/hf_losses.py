"""The integrated ``Trainer``'s batches: their sizes, how their losses are weighed, and how its schedule is stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers.trainer import GreedyLR

from holdfast.errors import UsageError


def batches(loader: DataLoader[Any], micro_batch: int, accumulation: int) -> tuple[int, int]:
    """Return the samples of a micro-batch and of a step. Raises ``UsageError`` if the data set has fewer than a step.

    A data set that is smaller than a micro-batch is one.
    """
    samples = len(loader.dataset) if isinstance(loader.dataset, Sized) else 0
    if 0 < samples <= micro_batch:
        return samples, samples
    if 0 < samples < micro_batch * accumulation:
        raise UsageError(
            f"the training data set has {samples} samples, fewer than per_device_train_batch_size={micro_batch} times "
            f"gradient_accumulation_steps={accumulation}, a step",
            hint=f"gradient_accumulation_steps={samples // micro_batch}, for example",
        )
    return micro_batch, micro_batch * accumulation


class Items:
    """The weight of a micro-batch: the number of its labels that count, or 1 where losses are means of means.

    ``example``: a micro-batch, the same on every worker. It shows whether losses are those of the whole step.
    """

    def __init__(self, trainer: Any, example: Callable[[], Mapping[str, Any]]) -> None:
        self._trainer = trainer
        self._is_added = trainer.args.gradient_accumulation_steps > 1 and is_added(trainer, example)

    def __call__(self, batch: Mapping[str, Any]) -> float:
        trainer = self._trainer
        if self._is_added:
            return 1.0
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        is_sum = _is_divided(trainer, items)
        if is_sum and items is not None:
            return float(items)
        if is_sum and trainer.args.gradient_accumulation_steps > 1:
            raise UsageError(
                "the loss is to be divided by the number of labels, and the batch has no 'labels'",
                hint="gradient_accumulation_steps=1, or let the collator give labels",
            )
        return 1.0

    def factor(self, micro_batches: int) -> int:
        """Return what the loss of one of a step's micro-batches is multiplied by: their mean becomes their sum."""
        return micro_batches if self._is_added else 1


def _is_divided(trainer: Any, items: object) -> bool:
    """Return whether transformers takes it that a loss was divided by the number of labels in the whole step."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def is_added(trainer: Any, example: Callable[[], Mapping[str, Any]]) -> bool:
    """Return whether transformers adds up the losses of a step's micro-batches, each a mean over its own samples.

    It does if it takes a loss for one that was divided by ``num_items_in_batch``, and the loss has ignored that, as
    those of sequence classification do. So do we: gradients and losses are those of the plain Trainer.
    """
    if not _is_divided(trainer, items=1):
        return False
    model = trainer.model
    model.eval()  # nothing is drawn, and no running statistics move
    with torch.random.fork_rng(devices=[]), torch.no_grad(), trainer.compute_loss_context_manager():
        batch = trainer._prepare_inputs(example())
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        losses = [
            float(trainer.compute_loss(model, dict(batch), num_items_in_batch=items * times))
            for times in ((1, 2) if items else ())
        ]
    model.train()
    return len(losses) == 2 and losses[0] == losses[1] != 0.0


def is_stepped_by_a_metric(scheduler: Any) -> bool:
    """Return whether a schedule is stepped after evaluations, by their metric."""
    return isinstance(scheduler, ReduceLROnPlateau | GreedyLR)
