"""Measuring in the middle of a run: what it changes is put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.engine.model import LayeredModel


@contextmanager
def undisturbed(model: LayeredModel) -> Iterator[None]:
    """Afterwards gradients, buffers, modes and random numbers are as before.

    >>> model = LayeredModel([nn.BatchNorm1d(2)], seed=0, device=torch.device("cpu"))
    >>> with undisturbed(model):
    ...     model(torch.ones(3, 2)).sum().backward()
    >>> model.layers[0].running_mean, model.layers[0].weight.grad
    (tensor([0., 0.]), None)
    """
    wholes = [model.module, *model.layers]
    modules = list({id(module): module for whole in wholes for module in whole.modules()}.values())
    modes = [module.training for module in modules]
    gradients = [(p, p.grad) for module in modules for p in module._parameters.values() if p is not None]
    elsewhere = {id(buffer) for unit in model.units if not model.is_held(unit) for buffer in unit.buffers}
    buffers = [_Buffer(module, name, id(b) not in elsewhere) for module in modules for name, b in _buffers(module)]
    python, numpy = random.getstate(), np.random.get_state()
    for p, _ in gradients:
        p.grad = None
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        try:
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for buffer in buffers:
                buffer.restore()
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            random.setstate(python)
            np.random.set_state(numpy)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


class _Buffer:
    """A forward pass may write into it, or put another tensor in its place."""

    def __init__(self, module: nn.Module, name: str, is_held: bool) -> None:
        self._module, self._name = module, name
        self._tensor: Tensor = module._buffers[name]  # type: ignore[assignment]
        self._before = self._tensor.detach().clone() if is_held else None

    @torch.no_grad()
    def restore(self) -> None:
        self._module._buffers[self._name] = self._tensor
        # Compared, because BatchNorm writes without telling: the tensor's version stays as it was.
        if self._before is not None and not torch.equal(self._tensor, self._before):
            self._tensor.copy_(self._before)
