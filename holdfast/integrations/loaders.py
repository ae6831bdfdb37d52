"""A torch ``DataLoader`` as holdfast's ``Data``: for trainers whose users bring a loader of micro-batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from holdfast.data.fetch import is_map_style
from holdfast.data.source import Data
from holdfast.errors import UsageError


def data_of(loader: DataLoader[Any]) -> tuple[Data, int]:
    """Return what a training loader reads, and the samples of its batches, which are the micro-batches.

    Its order, from then on, is that of holdfast. Raises ``UsageError`` for a setting that holdfast cannot honour.
    """
    if not isinstance(loader, DataLoader):
        name = type(loader).__name__
        raise UsageError(f"the training data are a {name}", hint="one torch DataLoader; holdfast.Loop takes others")
    sampler: Any = loader.sampler
    if not is_map_style(loader.dataset) or loader.batch_size is None:
        raise UsageError(
            "the training DataLoader has no numbered samples, or no batch_size",
            hint="a data set with len(data) and data[i]; holdfast.Loop takes streams",
        )
    if type(loader.batch_sampler) is not BatchSampler or type(sampler) not in (RandomSampler, SequentialSampler):
        name = type(sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler).__name__
        raise UsageError(f"DataLoader(sampler={name}) cannot be honoured", hint="shuffle=True or shuffle=False")
    shuffles = isinstance(sampler, RandomSampler)
    if shuffles and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise UsageError("DataLoader(sampler=RandomSampler(…)) cannot be honoured", hint="shuffle=True")
    for name, hint in {
        "drop_last": "the last step of an epoch has fewer samples, which count as much as others",
        "generator": "the order is drawn from seed=",
        "worker_init_fn": "holdfast seeds its loader processes",
    }.items():
        if getattr(loader, name):
            raise UsageError(f"DataLoader({name}=…) cannot be honoured", hint=f"leave it out: {hint}")
    data = Data(
        loader.dataset,  # type: ignore[arg-type]  # it was looked at
        collate=loader.collate_fn,
        shuffle=shuffles,
        num_workers=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory,
    )
    return data, loader.batch_size
