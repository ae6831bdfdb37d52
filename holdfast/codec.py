"""Encoding of state as JSON plus tensors, without pickle: for the network, hashes and a checkpoint's index."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.words import a_kind

# JSON has no tuple, no bytes and no infinity, and its keys are strings. Such a value is written as a dict with one of
# these keys. A user's dict that has one of these keys is written as a list of items, so that it is not taken for one.
TENSOR, TUPLE, ITEMS, FLOAT, BYTES, DTYPE = "$tensor", "$tuple", "$items", "$float", "$bytes", "$dtype"
_MARKS = frozenset((TENSOR, TUPLE, ITEMS, FLOAT, BYTES, DTYPE))
_HINT = "numbers, strings, tensors, lists and dicts can be kept"


def encode(value: Any, tensor: Callable[[Any], Any], where: str = "state") -> Any:
    """Return a value of dicts, lists, tuples, numbers, strings, bytes, dtypes and tensors as JSON values.

    ``tensor`` is called with each value of another type: it returns what is written for it, or None to refuse it.
    ``where`` names the value in errors. Raises ``UsageError`` for a refused value.

    >>> encode({"betas": (0.9, math.inf), 3: None}, lambda value: None)
    {'$items': [['betas', {'$tuple': [0.9, {'$float': 'inf'}]}], [3, None]]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not _MARKS & value.keys():
            return {key: encode(item, tensor, f"{where}.{key}") for key, item in value.items()}
        items = [[encode(k, tensor, where), encode(v, tensor, f"{where}.{k}")] for k, v in value.items()]
        return {ITEMS: items}
    if isinstance(value, list | tuple):
        items = [encode(item, tensor, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {DTYPE: dtype_name(value)}
    if isinstance(value, bool | int | float | str):  # a subclass, such as numpy's numbers, and enums
        return encode(_plain_number(value), tensor, where)
    found = tensor(value)
    if found is None:
        raise UsageError(f"{where} is {a_kind(value)}, which cannot be kept", hint=_HINT)
    return {TENSOR: found}


def _plain_number(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return next(
        kind.__str__(value) if kind is str else kind(value) for kind in (int, float, str) if isinstance(value, kind)
    )


def decode(node: Any, tensor: Callable[[Any], Any]) -> Any:
    """Return the value that was encoded. ``tensor`` returns the tensor for what was written in its place.

    >>> decode({'$tuple': [1, {'$float': '-inf'}]}, lambda found: None)
    (1, -inf)
    """
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    mark = next(iter(node), None) if len(node) == 1 else None
    if mark not in _MARKS:
        return {key: decode(item, tensor) for key, item in node.items()}
    content = node[mark]
    if mark == TENSOR:
        return tensor(content)
    if mark == TUPLE:
        return tuple(decode(item, tensor) for item in content)
    if mark == ITEMS:
        return {decode(key, tensor): decode(item, tensor) for key, item in content}
    if mark == FLOAT:
        return float(content)
    return base64.b64decode(content) if mark == BYTES else dtype_of(content)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as text.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name. Raises ``UsageError`` for any other name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{name!r} is no dtype")
    return found


def flatten(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a value as a JSON text and its tensors. Raises ``UsageError`` for a value that cannot be encoded.

    >>> text, tensors = flatten({"step": 3, "w": torch.zeros(2)})
    >>> unflatten(text, tensors)
    {'step': 3, 'w': tensor([0., 0.])}
    """
    tensors: list[torch.Tensor] = []

    def collect(found: Any) -> list[Any] | None:
        if not isinstance(found, torch.Tensor):
            return None
        tensors.append(found.detach())
        return [len(tensors) - 1, dtype_name(found.dtype), list(found.shape)]

    return json.dumps(encode(value, collect)).encode(), tensors


def empty_tensors(text: bytes) -> list[torch.Tensor]:
    """Return uninitialised tensors for a flattened value whose tensors are about to arrive."""
    found: dict[int, torch.Tensor] = {}

    def make(description: list[Any]) -> None:
        number, dtype, shape = description
        found[number] = torch.empty(shape, dtype=dtype_of(dtype))

    decode(json.loads(text), make)
    return [found[number] for number in range(len(found))]


def unflatten(text: bytes, tensors: list[torch.Tensor]) -> Any:
    """Return the value of a text and its tensors, as ``flatten`` gave them."""
    return decode(json.loads(text), lambda description: tensors[description[0]])
