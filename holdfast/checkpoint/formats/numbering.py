"""Optimizers as torch's ``load_state_dict`` takes them: parameters by their positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.checkpoint.formats.canonical import groups_in
from holdfast.checkpoint.pieces import Catalogue

Tree = dict[str, Any]


def in_model_order(catalogue: Catalogue) -> Tree:
    """The optimizer with the parameters of each group in the model's order, if several ranks have saved it.

    torch loads optimizers by position. What pipeline stages saved was put together rank by rank, and stages that
    take turns do not hold the layers in their order. Of one rank the order is the script's own, and stays.
    """
    optimizer: Tree = catalogue.tree["optimizer"]
    model = catalogue.tree.get("model")
    groups = groups_in(optimizer) or []
    names = [name for group in groups for name in group["params"]]
    if catalogue.details.get("ranks", 1) == 1 or not all(isinstance(name, str) for name in names):
        return optimizer
    if isinstance(model, dict) and model.keys() >= set(names):
        names = list(model)
    place = {name: number for number, name in enumerate(_counted(names))}
    return {**optimizer, "param_groups": [{**g, "params": sorted(g["params"], key=place.__getitem__)} for g in groups]}


def _counted(names: list[str]) -> list[str]:
    """Names as a module has them: what lies in one module together, and numbered modules in their order.

    >>> _counted(["embed", "layers.0.w", "layers.2.w", "layers.1.w", "norm", "layers.10.w"])
    ['embed', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.10.w', 'norm']
    """
    root: Tree = {}
    for name in names:
        node = root
        for part in name.split("."):
            node = node.setdefault(part, {})
        node[""] = name  # no part of a name is empty where a module's are meant

    def walk(node: Tree) -> Iterator[str]:
        keys = list(node)
        numbers = iter(sorted((key for key in keys if key.isdecimal()), key=int))
        for key in (next(numbers) if key.isdecimal() else key for key in keys):
            if isinstance(node[key], str):
                yield node[key]
            else:
                yield from walk(node[key])

    return list(walk(root))


def numbered(optimizer: Tree) -> Tree:
    """The form that a plain ``Optimizer.load_state_dict`` takes: numbers, with the names beside them.

    >>> numbered({"state": {"b": {}}, "param_groups": [{"params": ["a", "b"], "lr": 0.1}]})
    {'state': {1: {}}, 'param_groups': [{'params': [0, 1], 'lr': 0.1, 'param_names': ['a', 'b']}]}
    """
    groups = groups_in(optimizer) or []
    names = [name for group in groups for name in group["params"]]
    if not names or not all(isinstance(name, str) for name in names):
        return optimizer
    numbers = {name: number for number, name in enumerate(names)}
    made = [{**g, "params": [numbers[name] for name in g["params"]], "param_names": list(g["params"])} for g in groups]
    state = {numbers.get(name, name): value for name, value in (optimizer.get("state") or {}).items()}
    return {**optimizer, "state": state, "param_groups": made}
