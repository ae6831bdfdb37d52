"""Fetches samples from the user's data set, as one batch on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from holdfast.errors import UsageError


class Dataset(Protocol):
    """A map-style data set: ``dataset[i]`` is ``(input, target)``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def fetch(
    data: Dataset, samples: Sequence[int], collate: Callable[[list[Any]], Any], device: torch.device
) -> tuple[Any, Any]:
    """Return inputs and targets of these ``samples`` as one batch on ``device``.

    Raises ``UsageError`` if ``collate`` does not give two things.

    >>> data = [(torch.tensor([1.0]), 7), (torch.tensor([2.0]), 8)]
    >>> fetch(data, [1, 0], torch.utils.data.default_collate, torch.device("cpu"))[1]
    tensor([8, 7])
    """
    batch = collate([data[i] for i in samples])
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UsageError(
            "dataset[i] must give (input, target)", hint="several inputs can be a tuple or dict in its place"
        )
    return _to(batch[0], device), _to(batch[1], device)


def _to(value: Any, device: torch.device) -> Any:
    """Move all tensors in nested tuples, lists and dicts to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value
