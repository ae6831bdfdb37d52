"""Finds the names of parameters that a Megatron optimizer keeps by number.

Megatron puts parameters into groups in the model's order: those with weight decay, and those without (biases and
vectors). That is followed here, and what it gives is checked against the number and the shapes of what was saved;
where it does not fit, the optimizer is left out and the reason is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.formats.pickled import Foreign
from holdfast.checkpoint.pieces import Shape, Stored

_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_HALF = (torch.float16, torch.bfloat16)


class Nameless(Exception):
    """The reason why an optimizer's parameters cannot be named."""


def named_optimizer(
    states: Mapping[str, Any], model: Mapping[str, Stored], where: str, left_out: list[str]
) -> dict[str, Any]:
    """``state``, ``param_groups`` and ``masters`` (fp32 weights) of one rank by name; nothing if that cannot be."""
    if states.get("optimizer") is None:
        return {}
    try:
        inner, masters = _inner(states["optimizer"])
        names = _names(inner["param_groups"], model, states.get("args"))
        numbered = list(_numbered(inner["param_groups"], names))
        _refuse_misfits(numbered, inner["state"], model)
        return {
            "state": {name: inner["state"][number] for number, name in numbered if number in inner["state"]},
            "param_groups": [
                {**group, "params": list(called)} for group, called in zip(inner["param_groups"], names, strict=True)
            ],
            "masters": dict(_masters(masters, names, model)),
        }
    except Nameless as reason:
        left_out.append(f"optimizer: {where} {reason}")
        return {}


def _inner(optimizer: Any) -> tuple[dict[str, Any], list[Any]]:
    """The state of torch's own optimizer, and the fp32 weights beside it."""
    if not isinstance(optimizer, dict):
        raise Nameless("has a chain of optimizers")
    masters = optimizer.get("fp32_from_fp16_params") or []
    inner = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))
    inner = inner if isinstance(inner, dict) else {}
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group.get("params"), list) for group in groups):
        raise Nameless("has an optimizer that is distributed among data-parallel ranks")
    return {"param_groups": groups, "state": inner.get("state") or {}}, masters


def _names(groups: Sequence[Mapping[str, Any]], model: Mapping[str, Stored], args: Any) -> list[list[str]]:
    used = [group for group in groups if group["params"]]
    named = iter(grouped(used, {name: stored.shape for name, stored in model.items()}, args))
    return [next(named) if group["params"] else [] for group in groups]


def grouped(groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape], args: Any) -> list[list[str]]:
    """The names of each group's parameters, by Megatron's rule for groups.

    >>> shapes = {"a.weight": (2, 2), "a.bias": (2,), "b.weight": (2, 2)}
    >>> grouped([{"wd_mult": 0.0}, {"wd_mult": 1.0}], shapes, None)
    [['a.bias'], ['a.weight', 'b.weight']]
    """
    if len(groups) == 1:
        return [list(shapes)]
    kinds = [(_decays(group), bool(group.get("is_expert_parallel"))) for group in groups]
    if len(set(kinds)) < len(kinds):
        raise Nameless(f"has {len(kinds)} groups of parameters, which differ in more than weight decay")
    decays_qk = isinstance(args, Foreign) and bool(args.fields.get("apply_wd_to_qk_layernorm"))
    apart = any(expert for _, expert in kinds)
    of = {name: (_has_decay(name, shape, decays_qk), apart and ".experts." in name) for name, shape in shapes.items()}
    if not set(of.values()) <= set(kinds):
        raise Nameless("has no group for some of its parameters")
    return [[name for name in shapes if of[name] == kind] for kind in kinds]


def _decays(group: Mapping[str, Any]) -> bool:
    return bool(group["wd_mult"] if "wd_mult" in group else group.get("weight_decay"))


def _has_decay(name: str, shape: Shape, decays_qk: bool) -> bool:
    """Whether a parameter has weight decay: no bias or vector has, except norms of queries and keys on demand."""
    if decays_qk and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return len(shape) != 1 and not name.endswith(".bias")


def _numbered(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> Iterator[tuple[Any, str]]:
    for group, called in zip(groups, names, strict=True):
        if len(group["params"]) != len(called):
            raise Nameless(f"has {len(group['params'])} parameters in a group where the model has {len(called)}")
        yield from zip(group["params"], called, strict=True)


def _refuse_misfits(numbered: Sequence[tuple[Any, str]], state: Mapping[Any, Any], model: Mapping[str, Stored]) -> None:
    for number, name in numbered:
        for slot in _LIKE_PARAMETER:
            kept = state.get(number, {}).get(slot)
            if isinstance(kept, Stored) and kept.shape != model[name].shape:
                raise Nameless(f"has {slot} {kept.shape} at number {number}, where {name} is {model[name].shape}")


def _masters(
    groups: Sequence[Any], names: Sequence[Sequence[str]], model: Mapping[str, Stored]
) -> Iterator[tuple[str, Stored]]:
    """The fp32 weights, which only parameters of half precision have."""
    if not groups:
        return
    halves = [[name for name in called if model[name].dtype in _HALF] for called in names]
    if [len(group) for group in groups] != [len(called) for called in halves]:
        raise Nameless("has not one fp32 weight for each parameter of half precision")
    for group, called in zip(groups, halves, strict=True):
        for name, stored in zip(called, group, strict=True):
            if stored.shape != model[name].shape:
                raise Nameless(f"has an fp32 weight {stored.shape}, where {name} is {model[name].shape}")
            yield name, stored
