"""Fetches samples from the user's data set, and brings batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from holdfast.errors import UsageError
from holdfast.rng import seed_everything, seed_of
from holdfast.words import a_kind

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")


class Dataset(Protocol):
    """A map-style data set: ``dataset[i]`` is a sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def is_map_style(data: object) -> bool:
    """Return whether a data set has a length and numbered samples.

    >>> is_map_style([1, 2]), is_map_style(iter([1, 2])), is_map_style(None)
    (True, False, False)
    """
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def refuse_loader(data: object) -> None:
    """Raise ``UsageError`` for a ``DataLoader`` that gives batches. One that gives samples is a stream."""
    if isinstance(data, DataLoader) and data.batch_sampler is not None:
        raise UsageError(
            f"{a_kind(data)} gives batches, and a run makes its own from samples",
            hint="data=holdfast.Data(loader.dataset, collate=…, num_workers=…)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A batch to be read: its samples, and the seed of the random numbers that are drawn meanwhile.

    The batch is a pure function of it, so it does not matter which process reads it, nor when.
    """

    seed: int
    samples: tuple[int, ...]


def fetch(data: Dataset, request: Request, collate: Collate) -> Any:
    """Read a batch. Raises whatever the user's data set and ``collate`` raise, with a note that names the sample.

    >>> fetch([1, 2, 3], Request(seed=0, samples=(2, 0)), torch.utils.data.default_collate)
    tensor([3, 1])
    """
    seed_everything(request.seed, CPU)
    with _one_thread():
        samples = [_sample(data, number) for number in request.samples]
        try:
            return collate(samples)
        except Exception as e:
            e.add_note(f"while samples {list(request.samples)} of the data set were collated")
            raise


def after_reading(request: Request) -> None:
    """Seed what comes after a batch was read, such as the loss's mixup: the same wherever it was read."""
    seed_everything(seed_of(request.seed, "read"), CPU)


def _sample(data: Dataset, number: int) -> Any:
    try:
        return data[number]
    except StopIteration as e:  # in the generators that it would pass through, it would mean their end
        raise RuntimeError(f"sample {number} of the data set raised StopIteration") from e
    except Exception as e:
        e.add_note(f"while sample {number} of the data set was read")
        raise


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as loaders do: sums inside an operator depend on the number of threads."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pair(batch: Any) -> tuple[Any, Any]:
    """Return a batch's inputs and targets. Raises ``UsageError`` if it is not two things."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UsageError(
            "dataset[i] must give (input, target)",
            hint="several inputs can be a tuple or dict in its place; or model= with loss=lambda model, batch: …",
        )
    return batch[0], batch[1]


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors to the device: in nested tuples, lists and dicts, and objects that have a method ``to``.

    >>> to_device({"x": [torch.ones(1)]}, torch.device("cpu"))
    {'x': [tensor([1.])]}
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda" and value.is_pinned())  # pinned: untested here
    if type(value) is dict:
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    move = getattr(value, "to", None)  # such as the BatchEncoding of Hugging Face's tokenizers
    if callable(move):
        return move(device)
    return {key: to_device(item, device) for key, item in value.items()} if isinstance(value, dict) else value
