"""What ``self.log`` is called with in ``training_step``: noted for each micro-batch, and put together for the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.words import a_kind

SIGNATURE = inspect.signature(pl.LightningModule.log)
KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")  # the others are about one process
REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "mean": lambda values, sizes: sum(v * s for v, s in zip(values, sizes, strict=True)) / sum(sizes),
    "sum": lambda values, sizes: sum(values),
    "min": lambda values, sizes: min(values),
    "max": lambda values, sizes: max(values),
}


@contextmanager
def noting(module: pl.LightningModule, batch: Any, found: list[Any]) -> Iterator[None]:
    """Note the calls of ``module.log`` in this context, where ``training_step`` computes a micro-batch."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        found.append(note_of(batch, SIGNATURE.bind(module, name, value, *args, **kwargs).arguments))

    vars(module)["log"] = log  # ``log_dict`` calls it, too
    try:
        yield
    finally:
        del vars(module)["log"]


def note_of(batch: Any, given: Mapping[str, Any]) -> list[Any]:
    """Return name, value, size of the micro-batch and settings of one call of ``log``, as plain values.

    Raises ``UsageError`` for a value that is not one number: what a ``Metric`` holds is what one worker has seen.
    """
    name: str = given["name"]
    value: Any = given["value"]
    if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise UsageError(
            f"self.log({name!r}, …) in training_step was given {a_kind(value)}",
            hint="a number of the micro-batch; a Metric in validation_step, which each worker computes whole",
        )
    reduction = given.get("reduce_fx", "mean")
    reduction = reduction.lower() if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    reduction = "mean" if reduction == "avg" else reduction
    if reduction not in REDUCTIONS:
        raise UsageError(f"self.log({name!r}, reduce_fx=…) cannot be honoured", hint=" or ".join(REDUCTIONS))
    size = given.get("batch_size") or extract_batch_size(batch)
    return [
        name,
        float(value.detach() if isinstance(value, Tensor) else value),
        size,
        {"reduce_fx": reduction, **{key: given[key] for key in KEPT if key in given}},
    ]


def log_step(module: pl.LightningModule, notes: Sequence[Sequence[Any]]) -> None:
    """Log what was noted of a step's micro-batches, as if they had been one batch."""
    by_name: dict[str, list[Any]] = {}
    for note in (note for of_batch in notes for note in of_batch):
        by_name.setdefault(note[0], []).append(note)
    for name, found in by_name.items():
        _, values, sizes, settings = zip(*found, strict=True)
        value = torch.tensor(REDUCTIONS[settings[0]["reduce_fx"]](values, sizes), device=module.device)
        module.log(name, value, batch_size=sum(sizes), **settings[0])
