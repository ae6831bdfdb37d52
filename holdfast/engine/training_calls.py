"""Training calls of modules with statistics: each leaves the module's buffers as they were, and gives a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from holdfast.engine.measured import Measurement, Source
from holdfast.engine.norm_calls import NARROW, NormCalls
from holdfast.engine.running import CUMULATIVE
from holdfast.errors import UsageError

COMBINE = "combine_statistics"  # the method by which a module declares that it combines measurements itself
COUNTER = "num_batches_tracked"  # BatchNorm's name for its number of batches
_OF_TORCH = (_BatchNorm.forward, _InstanceNorm.forward)


@dataclass(frozen=True, kw_only=True, eq=False)
class Use(Source):
    """A module with statistics in one of the layers. ``buffers``: its own, by name."""

    name: str
    module: nn.Module
    buffers: dict[str, Tensor]

    @property
    def is_declared(self) -> bool:
        """Whether the module itself tells how measurements are combined."""
        return hasattr(type(self.module), COMBINE)

    @property
    def mean(self) -> Tensor:
        return self.buffers["running_mean"]


Forward = Callable[..., Any]
Called = tuple[Any, list[Measurement]]  # a call's output, and what it has measured


def call(use: Use, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """Call a module's forward pass in training, and leave its buffers as they were, even if it raises."""
    if use.is_declared:
        return _call_declared(use, forward, args, kwargs)
    if type(use.module).forward in _OF_TORCH and use.module.track_running_stats:
        return _call_of_torch(use, forward, args, kwargs)
    return _call_norm(use, forward, args, kwargs)


def _call_of_torch(use: Use, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """Call one of torch's own normalisations: the same as ``_call_norm``, but it is known how they read attributes.

    With a momentum of one and no counter, they leave mean and variance of the batch in the buffers that they are given.
    """
    module: Any = use.module
    own, momentum = module._buffers, module.momentum
    counts = COUNTER in use.buffers and isinstance(module, _BatchNorm)
    taken = [torch.zeros_like(use.mean), torch.zeros_like(use.buffers["running_var"])]
    own["running_mean"], own["running_var"] = taken
    module.momentum = 1.0
    if counts:
        own[COUNTER] = None
    try:
        output = forward(*args, **kwargs)
    finally:
        own.update(use.buffers)
        module.momentum = momentum
    if momentum is None:
        momentum = CUMULATIVE if counts else 0.0
    given = args[0] if args else kwargs["input"]
    return output, [Measurement(taken, momentum, int(counts), given.dtype in NARROW)]


def _call_norm(use: Use, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """Call a normalisation of any class. It raises a copy of its counter; its running statistics are spared."""
    own, counter = use.module._buffers, use.buffers.get(COUNTER)
    taken: list[Measurement] = []
    raised = None
    if counter is not None:
        raised = own[COUNTER] = counter.clone()
    try:
        with NormCalls({id(use.mean)}, taken.append):
            output = forward(*args, **kwargs)
    finally:
        if counter is not None:
            raised = own[COUNTER]
            own[COUNTER] = counter
    counted = 0 if counter is None or raised is None else int(raised - counter)
    if not taken:
        if counted and counter is not None:  # a rule of its own: the guard decides on it
            counter.add_(counted)
        return output, []
    taken[0].counted = counted
    if counted and getattr(use.module, "momentum", 0.0) is None:
        for one in taken:
            one.momentum = CUMULATIVE
    return output, taken


def _call_declared(use: Use, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """Call a module that declares how its buffers are combined. It works on copies of them."""
    own = use.module._buffers
    own.update({name: buffer.clone() for name, buffer in use.buffers.items()})
    try:
        output = forward(*args, **kwargs)
        after = {name: own.get(name) for name in use.buffers}
    finally:
        own.update(use.buffers)
    values = []
    for name, buffer in use.buffers.items():
        value = after[name]
        if value is None or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
            raise other_shape(use, name)
        values.append(value.detach().contiguous())
    return output, [Measurement(values)]


def other_shape(use: Use, name: str) -> UsageError:
    """Return the error of a buffer that no measurement can stand for."""
    return UsageError(
        f"'{use.name}' replaces its buffer '{name}' by one of another shape or type",
        hint="keep a buffer's shape and type",
    )
