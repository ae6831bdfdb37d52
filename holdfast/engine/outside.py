"""What an optimizer keeps outside its parameters' state: found after each step, and refused by name.

A run carries ``optimizer.state[parameter]``, which moves with its layer, and the values in ``param_groups``, which are
the same on every worker. Copies, checkpoints and replays have both. Nothing else is carried, so nothing else may
change: with a counter of its own, a joiner would begin at zero where others are at a thousand.
"""

from __future__ import annotations

import inspect
import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.engine.fingerprint import fingerprint
from holdfast.engine.several import Several
from holdfast.errors import UsageError

MARKS = 2**20  # marks are below this: a float64 holds the sum of the squares of 8,000 of them exactly
LARGEST = 10_000  # containers and objects looked into: an attribute may refer to anything, and each step waits for it
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Attributes that torch itself keeps in every optimizer, and those that a scheduler adds. They are no state.
_OF_TORCH = {*vars(Optimizer([nn.Parameter(torch.zeros(1))], {})), "_opt_called", "_step_count", "step"}


class Outside:
    """The attributes and stray keys of an optimizer, as they were before its first step.

    Modules among the attributes are not looked into: an optimizer that refers to its model does not own it.

    >>> class Counts(torch.optim.SGD):
    ...     calls = 0
    ...     def step(self):
    ...         self.calls += 1
    >>> optimizer = Counts([nn.Parameter(torch.zeros(1))])
    >>> outside = Outside(optimizer); outside.begin()
    >>> optimizer.step(); outside.refuse_changes()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    holdfast.errors.UsageError: optimizer Counts keeps 'calls' outside its parameters' state, ...
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parts = [*optimizer.parts.values()] if isinstance(optimizer, Several) else [optimizer]
        self._parameters = {p: number for number, p in enumerate(_parameters(optimizer))}
        self._before: list[dict[str, Any]] | None = None  # for each of several optimizers

    def begin(self) -> None:
        """Note what is there before the first step. Later calls do nothing."""
        if self._before is None:
            self._before = [self._attributes(part) for part in self._parts]

    def refuse_changes(self) -> None:
        """Raise ``UsageError`` if something outside has changed since the first ``begin``, or a stray key appeared."""
        assert self._before is not None
        strays = [key for key in self._optimizer.state if key not in self._parameters]
        if strays:
            shown = strays[0] if isinstance(strays[0], str) else type(strays[0]).__name__
            raise _refusal(self._optimizer, f"'{shown}' in its state beside its parameters")
        for part, before in zip(self._parts, self._before, strict=True):
            now = self._attributes(part)
            for name in dict.fromkeys([*now, *before]):
                if name not in now or name not in before or now[name] != before[name]:
                    raise _refusal(part, f"'{name}' outside its parameters' state")

    def _attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        # A wrapper's inner optimizer may share these with it: then they are carried.
        shared = (optimizer, optimizer.state, optimizer.param_groups, *optimizer.param_groups)
        known = {id(each): each for each in shared}
        own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
        return {name: _content(value, self._parameters, known) for name, value in own.items()}


def _refusal(optimizer: Optimizer, what: str) -> UsageError:
    return UsageError(
        f"optimizer {type(optimizer).__name__} keeps {what}, where neither joiners nor checkpoints get it",
        hint="keep it in state[parameter], or in param_groups if it only counts steps",
    )


def mark_of_groups(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return a number below ``MARKS`` that stands for the values in an optimizer's groups: equal values, equal marks.

    >>> mark_of_groups([{"lr": 0.1}]) == mark_of_groups([{"lr": 0.1}]) != mark_of_groups([{"lr": 0.2}])
    True
    """
    return zlib.crc32(repr(content_of_groups(groups)).encode()) % MARKS


def content_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values in an optimizer's groups as something that can be kept and compared."""
    return [{key: _content(value, {}, {}) for key, value in group.items() if key != "params"} for group in groups]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's ``step`` cannot be called without a function that computes the loss again.

    >>> needs_closure(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
    True
    """
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # a scheduler has put a wrapper around its own ``step``
    except TypeError:
        return True
    return False


def _content(value: Any, parameters: Mapping[nn.Parameter, int], known: dict[int, Any]) -> Any:
    """Return a value as plain values that are equal exactly if nothing in it has changed.

    ``parameters`` stand for themselves, whatever their elements. ``known``: by id, what is not looked into, or not
    again. It grows, and keeps objects alive, so that no other one can get the id of one that was made for the look.
    """
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)  # as text: NaN equals itself then, and True is not 1
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.Parameter) and value in parameters:
            return "parameter", parameters[value]
        return "tensor", fingerprint(value)
    if id(value) in known or isinstance(value, nn.Module) or len(known) > LARGEST:
        return "known", type(value).__name__
    known[id(value)] = value

    def inner(item: Any) -> Any:
        return _content(item, parameters, known)

    if isinstance(value, Mapping):
        return "mapping", [(inner(key), inner(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return "sequence", [inner(item) for item in value]
    if isinstance(value, set | frozenset):
        return "set", sorted(repr(inner(item)) for item in value)
    return _of_object(value, inner)


def _of_object(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Return the content of an object that is no plain value and no container."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return kind, inner(value.get_state())
    if isinstance(value, random.Random):
        return kind, inner(value.getstate())
    if isinstance(value, np.random.Generator):
        return kind, inner(value.bit_generator.state)
    if isinstance(value, type) or inspect.isroutine(value):
        return kind, value.__qualname__
    return kind, inner(object.__getstate__(value))  # attributes and slots, whatever the class does when it is pickled


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
