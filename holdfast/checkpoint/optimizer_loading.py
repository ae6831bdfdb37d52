"""Loads optimizers: the slots of each parameter, laid out as the parameter is, and the settings of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.objects import names_in
from holdfast.checkpoint.pieces import NUMPY, Ref, Shape, TensorEntry, name_of
from holdfast.checkpoint.tensor_reader import find
from holdfast.errors import CheckpointError

if TYPE_CHECKING:
    from holdfast.checkpoint.loading import Filler

Key = str | int
# Slots of Adam and SGD, which have the shape of their parameter; other slots may have any shape.
LIKE_PARAMETERS = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"))


def fill_optimizer(filler: Filler, optimizer: Optimizer, node: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Plans to fill an optimizer from a node of the tree, by the parameters' names, however they are grouped here.

    Raises ``CheckpointError`` if the checkpoint has other parameters, shapes, or settings that do not fit the groups.
    """
    keys = names_in(optimizer, filler.names)
    settings = {key: group for group in node["param_groups"] for key in group["params"]}
    aliases = {
        key: filler.names.get(id(p), [str(key)])
        for group, called in zip(optimizer.param_groups, keys, strict=True)
        for p, key in zip(group["params"], called, strict=True)
    }
    source = _matching(filler, keys, aliases, node["param_groups"], path)
    taken = {key for found in source.values() for key in found}
    filler.leave([key for key in settings if key not in taken], path)
    for group, called in zip(optimizer.param_groups, keys, strict=True):
        _set_group(filler, group, [(key, settings[found]) for key in called for found in source[key]], path)
        for p, key in zip(group["params"], called, strict=True):
            if id(p) in filler.absent:  # the worker that has the parameter keeps its slots
                filler.later.append(partial(optimizer.state.pop, p, None))
                continue
            first, *copies = (node["state"].get(found) for found in source[key])
            made = _set_slots(filler, optimizer, group, p, first, (*path, "state", key))
            for copy in copies:
                _compare(filler, made, copy, (*path, "state", key))


def _matching(
    filler: Filler,
    keys: list[list[Key]],
    aliases: Mapping[Key, Sequence[str]],
    groups: list[Any],
    path: tuple[Any, ...],
) -> dict[Key, list[Key]]:
    """For each parameter here, its keys in the checkpoint: matched by names, or both by number."""
    ours = [key for group in keys for key in group]
    theirs = [key for group in groups for key in group["params"]]
    if any(isinstance(key, int) for key in ours) and not any(isinstance(key, int) for key in theirs):
        raise CheckpointError(
            f"{filler.catalogue.root}: {name_of(path)} has names for its parameters, here they have none",
            hint="load the module beside the optimizer",
        )
    if any(isinstance(key, int) for key in [*ours, *theirs]):
        # As torch does it: the same optimizer over the same parameters in the same order.
        here, there = [len(group) for group in keys], [len(group["params"]) for group in groups]
        if here != there:
            raise CheckpointError(
                f"{filler.catalogue.root}: {name_of(path)} has {there} parameters without names, here are {here}",
                hint="save and load the module beside the optimizer: then its parameters have names",
            )
        return {mine: [found] for mine, found in zip(ours, theirs, strict=True)}
    found = {key: _known_as(aliases[key], theirs, filler.tied) for key in ours}
    filler.refuse_missing([key for key in ours if not found[key]], path)
    return found


def _known_as(names: Sequence[str], theirs: Sequence[Key], tied: Mapping[str, str]) -> list[Key]:
    """The keys under which the checkpoint has a parameter, which may be tied here or in the checkpoint.

    A pipeline has a copy of a tied parameter in each stage, each with slots of its own.

    >>> _known_as(["embed", "head"], ["embed", "head", "norm"], {}), _known_as(["head"], ["embed"], {"head": "embed"})
    (['embed', 'head'], ['embed'])
    """
    known = set(theirs)
    return [name for name in dict.fromkeys([*names, *(tied.get(name, name) for name in names)]) if name in known]


def _set_group(filler: Filler, group: dict[str, Any], found: list[tuple[Key, Any]], path: tuple[Any, ...]) -> None:
    values = [{k: v for k, v in hyper.items() if k not in ("params", "param_names")} for _, hyper in found]
    for (key, _), value in zip(found, values, strict=True):
        if value != values[0]:
            raise CheckpointError(
                f"{filler.catalogue.root}: {name_of(path)} has {value} for {key} and {values[0]} for {found[0][0]}, "
                "which are in one group here",
                hint="group the parameters as they were when they were saved",
            )
    if values:
        loaded = filler.value(values[0])
        filler.later.append(lambda: group.update(loaded))


def _set_slots(
    filler: Filler, optimizer: Optimizer, group: dict[str, Any], p: torch.Tensor, slots: Any, path: tuple[Any, ...]
) -> Any:
    if slots is None:
        filler.later.append(lambda: optimizer.state.pop(p, None))
        return None
    present = optimizer.state.get(p, {})
    made = _make(filler, group, p, slots, present, path)
    filler.later.append(lambda: optimizer.state.__setitem__(p, made))
    return made


def _compare(filler: Filler, made: Any, node: Any, path: tuple[Any, ...]) -> None:
    """Refuses (or plans to refuse) slots of a tied parameter's second copy that differ from the first's."""
    if isinstance(made, dict) and isinstance(node, dict) and made.keys() == node.keys():
        for key, item in node.items():
            _compare(filler, made[key], item, (*path, key))
    elif isinstance(made, torch.Tensor) and isinstance(node, Ref):
        filler.copy(made, node, path)
    elif made != node:
        raise CheckpointError(
            f"{filler.catalogue.root}: {name_of(path)} is {made!r} in one and {node!r} in another copy of a parameter "
            "that is tied here"
        )


def _make(
    filler: Filler, group: dict[str, Any], p: torch.Tensor, node: Any, present: Any, path: tuple[Any, ...]
) -> Any:
    """A slot as it will be: a tensor like the parameter, another tensor, a number, or a dict or list of them."""
    if isinstance(node, dict) and node.keys() != {NUMPY}:
        inside = present if isinstance(present, dict) else {}
        return {key: _make(filler, group, p, item, inside.get(key), (*path, key)) for key, item in node.items()}
    if isinstance(node, list | tuple):
        inside = dict(enumerate(present)) if isinstance(present, list | tuple) else {}
        made = (_make(filler, group, p, item, inside.get(i), (*path, i)) for i, item in enumerate(node))
        return type(node)(made)
    if not isinstance(node, Ref):
        return filler.value(node)
    entry = find(filler.catalogue, node.name)
    local = filler.local(path)
    shape = tuple(p.shape) if local is None else local.shape
    if path[-1] in LIKE_PARAMETERS and entry.shape != shape:
        raise CheckpointError(
            f"{filler.catalogue.root}: {name_of(path)} has shape {entry.shape}, its parameter {shape}",
            hint="are the parameters in the order in which they were saved?",
        )
    if isinstance(present, torch.Tensor) and not filler.take(present):
        present = None
    target = _room(group, p, entry, present, path[-1], shape)
    filler.tensor(target, node, path)
    return target


def _room(
    group: dict[str, Any], p: torch.Tensor, entry: TensorEntry, present: Any, key: Key, shape: Shape
) -> torch.Tensor:
    """Memory for a slot: the present one if it fits, or new. ``shape`` is the whole parameter's, over all workers."""
    like = tuple(p.shape) if entry.shape == shape else entry.shape
    if isinstance(present, torch.Tensor) and tuple(present.shape) == like and present.dtype == entry.dtype:
        return present
    if not entry.shape and (p.shape or key == "step"):
        # A plain scalar even where the parameter is sharded; torch keeps counters on the CPU (untested on a GPU).
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=entry.dtype, device=p.device if on_device else "cpu")
    if entry.shape == shape:
        return torch.empty_like(p, dtype=entry.dtype, requires_grad=False)
    # Neither a scalar nor like the parameter: as in torch's own optimizers, every worker has a whole copy.
    return p.detach().new_empty(entry.shape, dtype=entry.dtype)
