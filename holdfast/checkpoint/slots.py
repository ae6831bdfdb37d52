"""What an optimizer keeps for each parameter, laid out as the parameter is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.checkpoint.objects import names_in
from holdfast.checkpoint.pieces import Entry, Ref, name_of
from holdfast.checkpoint.read import find
from holdfast.errors import CheckpointError

if TYPE_CHECKING:
    from holdfast.checkpoint.load import Filler

Key = str | int


def fill_optimizer(filler: Filler, optimizer: Optimizer, node: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Slots and hyper-parameters by the parameters' names, however they are grouped here."""
    keys = names_in(optimizer, filler.names)
    settings = {key: group for group in node["param_groups"] for key in group["params"]}
    source = _matching(keys, settings, filler, path)
    filler.refuse_unexpected([key for key in settings if key not in source.values()], path)
    for group, called in zip(optimizer.param_groups, keys, strict=True):
        _set_group(filler, group, [(key, settings[source[key]]) for key in called], path)
        for p, key in zip(group["params"], called, strict=True):
            slots = node["state"].get(source[key])
            _set_slots(filler, optimizer, group, p, slots, (*path, "state", key))


def _matching(keys: list[list[Key]], settings: dict[Key, Any], filler: Filler, path: tuple[Any, ...]) -> dict[Key, Key]:
    """Which of the checkpoint's parameters each of ours is: by name, or both by number."""
    ours = [key for group in keys for key in group]
    theirs = list(settings)
    if all(isinstance(key, int) for key in theirs) or all(isinstance(key, int) for key in ours):
        # torch's own way: the same optimizer over the same parameters in the same order.
        if len(ours) != len(theirs):
            raise CheckpointError(
                f"{filler.catalogue.root}: {name_of(path)} has {len(theirs)} parameters by number, here are {len(ours)}"
            )
        return dict(zip(ours, theirs, strict=True))
    filler.refuse_missing([key for key in ours if key not in settings], path)
    return {key: key for key in ours}


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
) -> None:
    if slots is None:
        filler.later.append(lambda: optimizer.state.pop(p, None) and None)
        return
    present = optimizer.state.get(p, {})
    made = _make(filler, group, p, slots, present, path)
    filler.later.append(lambda: optimizer.state.__setitem__(p, made))


def _make(
    filler: Filler, group: dict[str, Any], p: torch.Tensor, node: Any, present: Any, path: tuple[Any, ...]
) -> Any:
    """A slot of any shape: a tensor like the parameter, another tensor, a number, or a dict of them."""
    if isinstance(node, dict):
        inside = present if isinstance(present, dict) else {}
        return {key: _make(filler, group, p, item, inside.get(key), (*path, key)) for key, item in node.items()}
    if not isinstance(node, Ref):
        return filler.value(node)
    entry = find(filler.catalogue, node.name)
    target = _room(group, p, entry, present, name_of(path))
    filler.tensor(target, node, path)
    return target


def _room(group: dict[str, Any], p: torch.Tensor, entry: Entry, present: Any, name: str) -> torch.Tensor:
    if isinstance(present, torch.Tensor) and tuple(present.shape) == entry.shape and present.dtype == entry.dtype:
        return present
    if tuple(p.shape) == entry.shape:
        return torch.empty_like(p, dtype=entry.dtype, requires_grad=False)
    if isinstance(p, DTensor) and entry.shape:
        # Nothing tells how an optimizer would lay out a slot of another shape than its parameter.
        raise CheckpointError(
            f"{name} has shape {entry.shape}, its sharded parameter {tuple(p.shape)}",
            hint="let the optimizer make one step before loading, so that the slot exists",
        )
    on_device = group.get("capturable") or group.get("fused")  # untested on a GPU: torch keeps counters on the CPU
    return torch.empty(entry.shape, dtype=entry.dtype, device=p.device if entry.shape or on_device else "cpu")
