"""The model as a list of layers: the unit of state, and the place where random numbers are seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import nn

from holdfast.engine.rng import seed_of, seed_torch
from holdfast.errors import UsageError

Layers = nn.Module | Iterable[nn.Module]


class LayeredModel:
    """Runs layers one after the other, each with the random numbers of its place.

    A ``nn.Sequential`` or a list is cut at its items; any other module is one layer. Names of
    parameters are those of the module that was given.

    >>> model = LayeredModel([nn.Linear(2, 2), nn.ReLU()], seed=0, device=torch.device("cpu"))
    >>> len(model.layers), list(model.module.state_dict())
    (2, ['0.weight', '0.bias'])
    """

    def __init__(self, layers: Layers, *, seed: int, device: torch.device) -> None:
        module = layers if isinstance(layers, nn.Module) else _as_module(layers)
        self.module = module.to(device)
        self.layers = list(module) if _is_plain_list(module) else [module]
        self.seed = seed
        self.device = device
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        if not self.trainable:
            raise UsageError("the model has no parameter to train", hint="check requires_grad")

    def forward(self, x: Any, *, step: int, index: int, between: Callable[[], None]) -> Any:
        """The output for micro-batch (step, index); ``between`` is called before each layer."""
        for number, layer in enumerate(self.layers):
            between()
            seed_torch(seed_of(self.seed, step, index, number), self.device)
            x = layer(x)
        return x

    def __call__(self, x: Any) -> Any:
        """The output, with whatever random numbers come."""
        for layer in self.layers:
            x = layer(x)
        return x

    def parts(self) -> list[tuple[list[nn.Parameter], list[torch.Tensor]]]:
        """Parameters and buffers of each layer; what several layers share belongs to the first."""
        seen: set[int] = set()
        found = []
        for layer in self.layers:
            parameters = [p for p in layer.parameters() if id(p) not in seen]
            buffers = [b for b in layer.buffers() if id(b) not in seen]
            seen.update(id(t) for t in [*parameters, *buffers])
            found.append((parameters, buffers))
        return found

    def buffer_versions(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Changes whenever a forward pass writes into a buffer, or puts another in its place."""
        return {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}


def _is_plain_list(module: nn.Module) -> TypeGuard[nn.Sequential | nn.ModuleList]:
    """A subclass of nn.Sequential with a forward of its own is one layer: only it knows what it does."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _as_module(layers: Iterable[nn.Module]) -> nn.Module:
    listed = list(layers)
    if not listed or not all(isinstance(layer, nn.Module) for layer in listed):
        raise UsageError("layers must be torch modules", hint="pass a module, nn.Sequential or a list")
    return nn.Sequential(*listed)
