"""The tree of a catalogue: walks through it, flat names for what is in it, one tree out of several."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from holdfast.checkpoint.pieces import NUMPY, Box, Catalogue, Ref, name_of
from holdfast.errors import UsageError

Leaves = dict[str, Any]
_SETTINGS = 100  # of a group of an optimizer; they are repeated for each of its parameters, honest ones have about 20
# Texts that look like a key of another type, such as 1 or None, or like a text in quotes. Names quote them.
_NOT_TEXT = re.compile(r"""-?\d[\d_.e+-]*|-?inf|nan|None|True|False|torch\.\w+|\(.*\)|b?(['"]).*\1""", re.DOTALL)


def leaves(tree: Mapping[Any, Any]) -> Leaves:
    """Every tensor (as a ``Ref``) and every value by its name. Settings of a group are given to each parameter.

    A key that is a text but reads as something else is shown with quotes: 1 and "1" are two names.

    >>> group = {"params": ["w"], "lr": 0.1, "betas": (0.9, 0.99)}
    >>> leaves({"optimizer": {"state": {"w": {"step": 3}}, "param_groups": [group]}})
    {'optimizer/state/w/step': 3, 'optimizer/param_groups/w/lr': 0.1, 'optimizer/param_groups/w/betas': (0.9, 0.99)}
    """
    return {leaf_name(path): value for path, value in _walk(tree, ()) if path}


def leaf_name(path: Sequence[Any]) -> str:
    """A name for a path in the tree; different paths have different names.

    >>> leaf_name(("rng", 1)), leaf_name(("rng", "1"))
    ('rng/1', "rng/'1'")
    """
    return name_of([repr(key) if isinstance(key, str) and _NOT_TEXT.fullmatch(key) else key for key in path])


def _walk(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(node, dict) and node.keys() == {NUMPY}:
        yield from _walk(node[NUMPY], path)
    elif isinstance(node, dict) and node:
        groups = groups_of(node)
        for key, value in node.items():
            if key != "param_groups" or groups is None:
                yield from _walk(value, (*path, key))
        for number, group in enumerate(groups or ()):
            settings = {key: value for key, value in group.items() if key != "params"}
            if len([*islice(_walk(settings, ()), _SETTINGS + 1)]) > _SETTINGS:  # no optimizer's
                yield from _walk(group, (*path, "param_groups", number))
                continue
            for parameter in group["params"]:
                yield from _walk(settings, (*path, "param_groups", parameter)) if settings else ()
    elif isinstance(node, list | tuple) and any(isinstance(item, dict | list | tuple | Ref) for item in node):
        for number, item in enumerate(node):
            yield from _walk(item, (*path, number))
    else:
        yield path, node


def groups_of(node: Any) -> list[dict[str, Any]] | None:
    """The groups of an optimizer's state; None for anything else."""
    groups = node.get("param_groups") if isinstance(node, dict) else None
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        return None
    return groups


def refs(node: Any) -> Iterator[Ref]:
    """Every reference to a tensor in a part of a tree."""
    if isinstance(node, Ref):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from refs(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from refs(value)


def replace_refs(node: Any, change: Callable[[Ref], Any]) -> Any:
    """A part of a tree with ``change(ref)`` in the place of every reference to a tensor."""
    if isinstance(node, Ref):
        return change(node)
    if isinstance(node, dict):
        return {key: replace_refs(value, change) for key, value in node.items()}
    return type(node)(replace_refs(value, change) for value in node) if isinstance(node, list | tuple) else node


def dicts(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[Any, Any]]]:
    """Every dict in a part of a tree, with its path.

    >>> [path for path, _ in dicts({"a": [{}, 3]})]
    [(), ('a', 0)]
    """
    if isinstance(node, dict):
        yield path, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    for key, value in items:
        yield from dicts(value, (*path, key))


# --- one tree out of several ----------------------------------------------------------------------


def merge_trees(trees: Sequence[Any]) -> Any:
    """One tree out of those of several ranks: the union of dicts and of optimizers.

    Everything else must be the same on all ranks that have it; ``UsageError`` if it is not.

    >>> merge_trees([{"model": {"a": 1}, "step": 7}, {"model": {"b": 2}, "step": 7}])
    {'model': {'a': 1, 'b': 2}, 'step': 7}
    """
    merged = trees[0]
    for rank, tree in enumerate(trees[1:], start=1):
        merged = _both(merged, tree, (), rank)
    return merged


def is_optimizer(node: Any) -> bool:
    """Whether a node has the form of ``Optimizer.state_dict()``."""
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
            hint="holdfast.checkpoint.per_rank(value) marks what each worker has for itself",
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
    """Groups of two ranks together: those at the same place with the same settings become one.

    A parameter that both have must have the same settings on both.
    """
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


# --- what a catalogue says, for people -------------------------------------------------------------


def step_of(catalogue: Catalogue) -> int | None:
    """The step of a checkpoint, if it has one as a plain number."""
    step = catalogue.tree.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def bytes_of(catalogue: Catalogue) -> int:
    """The size of a checkpoint's files."""
    return sum(file.bytes for file in catalogue.files.values())


def marks_of(catalogue: Catalogue) -> dict[str, list[str]]:
    """Notes on tensors of the model, by their names: tied, frozen, buffer.

    >>> from pathlib import Path
    >>> marks_of(Catalogue(format="x", root=Path("x"), tied={"head": "embed"}, frozen=("embed",)))
    {'model/embed': ['frozen', 'tied: head']}
    """
    marks: dict[str, list[str]] = {}
    for mark, names in (("frozen", catalogue.frozen), ("buffer", catalogue.buffers)):
        for name in names:
            marks.setdefault(name_of(("model", name)), []).append(mark)
    for second, first in catalogue.tied.items():
        marks.setdefault(name_of(("model", first)), []).append(f"tied: {second}")
    return marks


def some(names: Sequence[Any], limit: int = 3) -> str:
    """A few names, and how many more there are.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + more


def box_text(box: Box) -> str:
    """A box as Python writes slices.

    >>> box_text(Box(offset=(2, 0), shape=(3, 4)))
    '[2:5, 0:4]'
    """
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(box.offset, box.shape, strict=True))}]"


def shape_text(shape: Sequence[int]) -> str:
    """A shape to read.

    >>> shape_text((4096, 1024)), shape_text(())
    ('4096 x 1024', 'scalar')
    """
    return " x ".join(map(str, shape)) or "scalar"
