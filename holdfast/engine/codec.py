"""State as JSON plus tensors: what crosses a wire or enters a hash, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch

from holdfast.errors import UsageError

_PLAIN = (type(None), bool, int, float, str)


def flatten(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value of dicts, lists, tuples, numbers, strings and tensors, as a JSON text and its tensors.

    >>> text, tensors = flatten({"step": 3, "w": torch.zeros(2)})
    >>> unflatten(text, tensors)
    {'step': 3, 'w': tensor([0., 0.])}
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_encode(value, tensors, "state")).encode(), tensors


def _encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": len(tensors) - 1, "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        items = [[_encode(k, tensors, where), _encode(v, tensors, f"{where}.{k}")] for k, v in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]}
    raise UsageError(
        f"{where} is a {type(value).__name__}, which cannot be sent to another worker",
        hint="optimizers and schedulers may keep numbers, strings, tensors, lists and dicts",
    )


def empty_tensors(text: bytes) -> list[torch.Tensor]:
    """Room for the tensors of a flattened value, before they arrive."""
    found: dict[int, torch.Tensor] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict) and "tensor" in node:
            found[node["tensor"]] = torch.empty(node["shape"], dtype=getattr(torch, node["dtype"]))
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(child)

    walk(json.loads(text))
    return [found[number] for number in range(len(found))]


def unflatten(text: bytes, tensors: list[torch.Tensor]) -> Any:
    def decode(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return tensors[node["tensor"]]
        if "dict" in node:
            return {decode(key): decode(item) for key, item in node["dict"]}
        if "list" in node:
            return [decode(item) for item in node["list"]]
        return tuple(decode(item) for item in node["tuple"])

    return decode(json.loads(text))
