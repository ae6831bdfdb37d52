"""A script's own values as plain ones, and back: for workers that join, checkpoints and hashes.

Plain are None, numbers, strings, bytes, dtypes, tensors, and lists, tuples and dicts of them. Anything with
``state_dict`` and ``load_state_dict`` becomes the plain form of its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast import codec
from holdfast.engine.fingerprint import is_plain
from holdfast.errors import HoldfastError, UsageError
from holdfast.words import a_kind

DIGITS = 4300  # of a number: Python writes and reads no more as text unless it is told to
MOST = 10**DIGITS
DEEPEST = 100  # containers in one another; Python itself gives up at some hundreds
# Numbers and texts that come back as what they were, or as what computes alike: a float64 of NumPy is a float.
ALIKE = (bool, int, float, str, bytes, np.float64)
HINT = "numbers, strings, None, tensors, lists, tuples, dicts, and what has state_dict and load_state_dict"


def is_object(value: Any) -> bool:
    """Return whether a value saves and loads itself: modules, optimizers, and classes that do as they do."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def plain(value: Any, where: str, *, of_object: bool = False, depth: int = 0) -> Any:
    """Return the plain form of a value. Its tensors are the value's own: copy them to keep them.

    ``where`` names the value in errors. ``of_object``: it is the state of an object, which takes plain values back;
    else what would come back as another type is refused. Raises ``UsageError`` for a value that has no plain form.

    >>> plain({"best": 0.5, "seen": (1, 2)}, "state")
    {'best': 0.5, 'seen': (1, 2)}
    """
    if depth > DEEPEST:
        raise UsageError(f"{where[:40]}… is in itself, or too deep", hint=HINT)
    inner = partial(plain, of_object=of_object, depth=depth + 1)
    if is_object(value):
        return plain(value.state_dict(), where, of_object=True, depth=depth + 1)
    if type(value) is int and abs(value) >= MOST:
        raise UsageError(f"{where} is a number of more than {DIGITS:,} digits", hint="its hex() as a string")
    if value is None or isinstance(value, torch.dtype) or type(value) in ALIKE:
        return value
    if isinstance(value, bool | int | float | str | bytes | np.generic):  # NumPy's numbers, enums
        if not of_object:
            kind, hint = type(value).__name__, "convert it: float(…), int(…), .item(), .value"
            raise UsageError(f"{where} is of type {kind}, which another worker would get as a plain number", hint=hint)
        return plain(value.item(), where) if isinstance(value, np.generic) else value
    if isinstance(value, Tensor):
        if not is_plain(value):
            raise UsageError(f"{where} is a tensor without plain memory here", hint="an ordinary, dense tensor")
        if value.requires_grad and not of_object:
            raise UsageError(f"{where} requires a gradient", hint="detach() it, or give the module that has it")
        return value.detach()
    if type(value) is dict or (of_object and isinstance(value, dict)):
        for key in value:
            if key is not None and not isinstance(key, bool | int | float | str):
                raise UsageError(f"{where} has a key that is {a_kind(key)}", hint="a string or a number")
        return {key: inner(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([inner(item, f"{where}[{number}]") for number, item in enumerate(value)])
    raise UsageError(f"{where} is of type {type(value).__name__}, which cannot be kept", hint=HINT)


def shared_in(values: dict[str, Any]) -> tuple[str, str] | None:
    """Return two places of a script's values that are one list, dict or tensor; None if there are none.

    Whoever gets the values gets two of it, and what is written into one of them is missing in the other.

    >>> seen = [1]; shared_in({"seen": seen, "best": {"seen": seen}})
    ("state['seen']", "state['best']['seen']")
    """
    known: dict[Any, str] = {}
    waiting = [(f"state[{key!r}]", value) for key, value in values.items()]
    for where, value in waiting:
        if is_object(value):
            continue
        if isinstance(value, dict):
            waiting += [(f"{where}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{where}[{number}]", item) for number, item in enumerate(value)]
        if isinstance(value, Tensor) and value.numel():
            key: Any = ("memory", value.data_ptr())
        elif isinstance(value, dict | list):
            key = id(value)
        else:
            continue
        if (other := known.setdefault(key, where)) != where:
            return other, where
    return None


def objects_in(value: Any, path: str = "") -> Iterator[str]:
    """Yield the place of each object with a state of its own, such as ``['nets'][0]``."""
    if is_object(value):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from objects_in(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from objects_in(item, f"{path}[{number}]")


def copied(value: Any) -> Any:
    """Return a copy of a plain value, with memory of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return type(value)([copied(item) for item in value]) if isinstance(value, list | tuple) else value


def in_order(value: Any) -> Any:
    """Return a plain value with the keys of dicts in a fixed order, for a digest.

    >>> in_order({"b": 1, "a": {2: 3, 1: 4}})
    {'a': {1: 4, 2: 3}, 'b': 1}
    """
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value, key=lambda key: (type(key).__name__, repr(key)))}
    return type(value)([in_order(item) for item in value]) if isinstance(value, list | tuple) else value


def size_of(value: Any) -> int:
    """Return the bytes of a plain value when it is sent."""
    text, tensors = codec.flatten(value)
    return len(text) + sum(tensor.nbytes for tensor in tensors)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether a tensor can be filled in place: no element is there several times, as after ``expand``."""
    repeats = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_plain(tensor) and not repeats


@torch.no_grad()
def taken(mine: Any, told: Any, where: str) -> Any:
    """Return the value that a plain form stands for. What can be filled in place is: the script may refer to it.

    ``mine``: the script's present value. Raises ``HoldfastError`` if an object does not take what was told.
    """
    if is_object(mine):
        try:
            mine.load_state_dict(copied(told))
        except HoldfastError:
            raise
        except Exception as e:
            raise HoldfastError(f"{where} is {a_kind(mine)} that does not take the state that was kept: {e}") from e
        return mine
    if isinstance(told, Tensor):
        if isinstance(mine, Tensor) and mine.shape == told.shape and mine.dtype == told.dtype and _is_writable(mine):
            return mine.copy_(told)
        return told.to(mine.device, copy=True) if isinstance(mine, Tensor) else told.clone()
    if isinstance(told, dict):
        known = mine if isinstance(mine, dict) else {}
        found = {key: taken(known.get(key), item, f"{where}[{key!r}]") for key, item in told.items()}
        known.clear()
        known.update(found)
        return known
    if isinstance(told, list | tuple):
        before = [*mine] if isinstance(mine, list | tuple) else []
        before += [None] * (len(told) - len(before))
        items = [taken(before[number], item, f"{where}[{number}]") for number, item in enumerate(told)]
        if isinstance(mine, list) and isinstance(told, list):
            mine[:] = items
            return mine
        return type(told)(items)
    return told
