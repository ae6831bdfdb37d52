"""Losses that read parameters: refused where the worker that computes the loss may not hold these parameters later.

In a pipeline the last stage computes the loss. It holds its own layers only, and other ones after a kill. A penalty on
the weights of another layer would be computed with values that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.engine.model import LayeredModel
from holdfast.errors import UsageError


@contextmanager
def refuse_reads(model: LayeredModel) -> Iterator[None]:
    """Raise ``UsageError`` if a tensor of the model is read in this context, by its name.

    >>> import torch
    >>> layer = torch.nn.Linear(1, 1)
    >>> with refuse_reads(LayeredModel(layer, seed=0, device=torch.device("cpu"))):
    ...     layer.weight.square().sum()
    Traceback (most recent call last):
    holdfast.errors.UsageError: the loss reads 'weight', which the worker that computes it may not hold later (leave \
out Placement(stages=…, memory=…): then every worker holds the whole model)
    """
    with _Watch(model):
        yield


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator and its arguments, also without gradients."""

    def __init__(self, model: LayeredModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        module = model.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._names = {_memory(tensor): name for name, tensor in reversed(named) if tensor.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (name := self._names.get(_memory(value))) is not None:
                raise UsageError(
                    f"the loss reads '{name}', which the worker that computes it may not hold later",
                    hint="leave out Placement(stages=…, memory=…): then every worker holds the whole model",
                )
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from that of others: views of a parameter have the parameter's."""
    return tensor.untyped_storage().data_ptr()
