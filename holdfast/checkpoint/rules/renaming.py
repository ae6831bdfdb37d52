"""Gives the tensors of a checkpoint new names, everywhere they occur."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.pieces import Catalogue, Ref, path_of
from holdfast.checkpoint.rules import Rules
from holdfast.checkpoint.trees import is_optimizer, refs

MODEL = "model/"


def renamed(catalogue: Catalogue, rules: Rules) -> Catalogue:
    """A catalogue under the names that rules give. ``UsageError`` if they do more than rename."""
    names = rules.renames(catalogue.tensors)
    new = {old.removeprefix(MODEL): name.removeprefix(MODEL) for old, name in names.items() if old.startswith(MODEL)}
    return replace(
        catalogue,
        tensors={names[name]: entry for name, entry in catalogue.tensors.items()},
        tree=rename_tree(catalogue.tree, names),
        tied={new.get(a, a): new.get(b, b) for a, b in catalogue.tied.items()},
        frozen=tuple(new.get(name, name) for name in catalogue.frozen),
        buffers=tuple(new.get(name, name) for name in catalogue.buffers),
        digests={names.get(name, name): one for name, one in catalogue.digests.items()},
    )


def rename_tree(tree: Any, names: Mapping[str, str]) -> Any:
    """A tree whose keys follow the new names of the tensors below them.

    >>> rename_tree({"model": {"old.w": Ref(name="model/old.w")}}, {"model/old.w": "model/new.w"})
    {'model': {'new.w': Ref(name='model/new.w')}}
    """
    return _walk(tree, names, 0)


def _walk(node: Any, names: Mapping[str, str], depth: int) -> Any:
    if isinstance(node, Ref):
        return Ref(name=names.get(node.name, node.name))
    if is_optimizer(node):
        groups = [{**group, "params": [_key(key, names) for key in group["params"]]} for group in node["param_groups"]]
        state = {_key(key, names): _walk(slots, names, depth + 2) for key, slots in node["state"].items()}
        return {"state": state, "param_groups": _walk(groups, names, depth + 1)}
    if isinstance(node, dict):
        return {_moved(key, item, names, depth): _walk(item, names, depth + 1) for key, item in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_walk(item, names, depth + 1) for item in node)
    return node


def _key(key: Any, names: Mapping[str, str]) -> Any:
    """A parameter's new name in an optimizer."""
    return names.get(f"{MODEL}{key}", f"{MODEL}{key}").removeprefix(MODEL) if isinstance(key, str) else key


def _moved(key: Any, item: Any, names: Mapping[str, str], depth: int) -> Any:
    """A key that is part of a tensor's name becomes what stands at its place in the new one."""
    for ref in refs(item):
        new = names.get(ref.name, ref.name)
        if new != ref.name:
            return path_of(new)[depth]
    return key
