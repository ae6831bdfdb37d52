"""Measures an optimizer before its first step: what it keeps and how long it takes, tried out on spare tensors."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.engine.update import Update

TRIES = 2  # updates that are timed, after the one that makes the slots; the faster one counts
ADAM_SLOTS = 2  # tensors for each weight, as Adam has them: the guess for an optimizer that cannot be tried


class OptimizerCost(NamedTuple):
    """The bytes that an optimizer keeps for some parameters, and the seconds of their update."""

    slot_bytes: int
    seconds: float


class Shadow:
    """Copies of a run's optimizer, with its class and settings but none of its state, that update spare tensors.

    Each kind of layer is tried once, with tensors of its parameters' shapes, so that no more memory is used than
    training one such layer takes.

    >>> p = nn.Parameter(torch.zeros(8, 4))
    >>> update = Update([p], lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9))
    >>> Shadow(update).kept([p]).slot_bytes, update.optimizer.state
    (128, defaultdict(<class 'dict'>, {}))
    """

    def __init__(self, update: Update) -> None:
        self._optimizer = update.optimizer
        self._clip_norm = update.clip_norm
        groups = update.optimizer.param_groups
        self._group = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self._known: dict[Any, OptimizerCost] = {}
        self.is_guess = False  # whether the optimizer could not be tried, and ADAM_SLOTS were assumed

    def kept(self, parameters: Sequence[nn.Parameter]) -> OptimizerCost:
        """Return what the optimizer keeps for those of a layer's parameters that it trains."""
        trained = [p for p in parameters if id(p) in self._group]
        if not trained:
            return OptimizerCost(0, 0.0)
        kind = tuple((self._group[id(p)], p.shape, p.dtype) for p in trained)
        if kind not in self._known:
            try:
                self._known[kind] = self._try(trained)
            except Exception:  # an optimizer may need a closure, or its own parameters
                self.is_guess = True
                self._known[kind] = OptimizerCost(ADAM_SLOTS * sum(p.nbytes for p in trained), 0.0)
        return self._known[kind]

    def _try(self, parameters: Sequence[nn.Parameter]) -> OptimizerCost:
        tensors = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=p.device)) for p in parameters]
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, 1e-3)
        double = self._double([self._group[id(p)] for p in parameters], tensors)
        seconds = [self._step(double, tensors) for _ in range(1 + TRIES)]
        slots = [value for slot in double.state.values() for value in slot.values()]
        return OptimizerCost(sum(value.nbytes for value in slots if isinstance(value, torch.Tensor)), min(seconds[1:]))

    def _double(self, groups: Sequence[int], tensors: Sequence[nn.Parameter]) -> Optimizer:
        if any(isinstance(value, Optimizer) for value in vars(self._optimizer).values()):
            raise TypeError("an optimizer in an optimizer: the inner one would do the update")
        double: Any = object.__new__(type(self._optimizer))
        vars(double).update(vars(self._optimizer))
        vars(double).pop("step", None)  # a scheduler replaces it by one that belongs to the real optimizer
        hooks: dict[str, Any] = {name: OrderedDict() for name in vars(double) if name.endswith("_hooks")}
        vars(double).update(hooks, state=defaultdict(dict), param_groups=[])
        for number in sorted(set(groups)):
            real = self._optimizer.param_groups[number]
            settings = {key: copy.deepcopy(value) for key, value in real.items() if key != "params"}
            mine = [tensor for group, tensor in zip(groups, tensors, strict=True) if group == number]
            double.param_groups.append({**settings, "params": mine})
        return double

    def _step(self, double: Optimizer, tensors: Sequence[nn.Parameter]) -> float:
        begin = time.perf_counter()
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(tensors, self._clip_norm)
        double.step()
        if tensors[0].is_cuda:  # untested here
            torch.cuda.synchronize(tensors[0].device)
        return time.perf_counter() - begin
