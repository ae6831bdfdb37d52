"""One tree out of what each worker has: pipeline stages add up, copies must agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint.pieces import name_of
from holdfast.errors import UsageError


def merge(trees: Sequence[Any]) -> Any:
    """The union of dicts, and of optimizers; everything else must be the same wherever it is.

    >>> merge([{"model": {"a": 1}, "step": 7}, {"model": {"b": 2}, "step": 7}])
    {'model': {'a': 1, 'b': 2}, 'step': 7}
    """
    merged = trees[0]
    for rank, tree in enumerate(trees[1:], start=1):
        merged = _both(merged, tree, (), rank)
    return merged


def is_optimizer(node: Any) -> bool:
    """Whether this is what ``Optimizer.state_dict`` gives."""
    return (
        isinstance(node, dict) and node.keys() == {"state", "param_groups"} and isinstance(node["param_groups"], list)
    )


def _both(a: Any, b: Any, path: tuple[Any, ...], rank: int) -> Any:
    if is_optimizer(a) and is_optimizer(b):
        state = _both(a["state"], b["state"], (*path, "state"), rank)
        groups = _groups(a["param_groups"], b["param_groups"], path, rank)
        order = dict.fromkeys([*(key for group in groups for key in group["params"]), *state])
        return {"state": {key: state[key] for key in order if key in state}, "param_groups": groups}
    if isinstance(a, dict) and isinstance(b, dict):
        return {
            key: _both(a[key], b[key], (*path, key), rank) if key in a and key in b else a.get(key, b.get(key))
            for key in dict.fromkeys([*a, *b])
        }
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return type(a)(_both(x, y, (*path, i), rank) for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if not _same(a, b):
        raise UsageError(
            f"workers disagree on {name_of(path)}: {a!r} on worker 0, {b!r} on worker {rank}",
            hint="give what is different on each worker a key of its own, such as its rank",
        )
    return a


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def _groups(a: list[Any], b: list[Any], path: tuple[Any, ...], rank: int) -> list[Any]:
    """Groups at the same place with the same settings are one; a parameter has the same settings everywhere."""
    settings = {key: _settings(group) for group in a for key in group["params"]}
    merged = [{**group, "params": list(group["params"])} for group in a]
    for place, group in enumerate(b):
        for key in group["params"]:
            if key in settings and not _same(settings[key], _settings(group)):
                raise UsageError(
                    f"workers disagree on the settings of {name_of((*path, key))}: "
                    f"{settings[key]} on worker 0, {_settings(group)} on worker {rank}"
                )
        new = [key for key in group["params"] if key not in settings]
        fits = place < len(merged) and _same(_settings(merged[place]), _settings(group))
        if fits:
            merged[place]["params"] += new
        elif new:
            merged.append({**group, "params": new})
    return merged


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
