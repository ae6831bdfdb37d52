"""The values that a DeepSpeed checkpoint has beside tensors: step, schedulers, the script's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.checkpoint.formats.deepspeed_files import Place
from holdfast.checkpoint.formats.pickled import Foreign
from holdfast.checkpoint.pieces import Stored, name_of

# Keys of DeepSpeed's own: KEPT are kept under "deepspeed". All other keys are the script's client_state.
KEPT = ("skipped_steps", "global_samples", "ds_version", "ds_config", "data_sampler", "random_ltd")
OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "global_steps", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "sparse_tensor_module_names",
    "csr_tensor_module_names", "num_experts", "ds_autoep_layers", "autoep_layers", "folding", *KEPT,
}  # fmt: skip
_GONE = object()  # marks a value that is dropped


def extras(
    models: Mapping[Place, dict[str, Any]],
    optims: Mapping[Place, dict[str, Any]],
    left_out: list[str],
    *,
    numbered: bool,
) -> dict[str, Any]:
    """The sections of the tree beside model and optimizer.

    ``left_out`` collects in words what is dropped; ``numbered``: the optimizer goes by numbers, and is taken here.
    """
    first = models[min(models)]
    tree: dict[str, Any] = {}
    kept = {key: first[key] for key in KEPT if first.get(key) is not None}
    if numbered and isinstance(optimizer := first.get("optimizer"), dict):
        tree["optimizer"] = _numbered(optimizer, kept, len(models), left_out)
    tree["step"] = first.get("global_steps")
    tree["lr_scheduler"] = first.get("lr_scheduler")
    tree["client_state"] = client_state(first)
    tree["deepspeed"] = kept
    if optims and isinstance(scaler := optims[min(optims)].get("loss_scaler"), Foreign):
        kept["loss_scaler"] = {"class": scaler.name, **scaler.fields}
    for place, model in models.items():
        if place != min(models) and _differs(client_state(model), client_state(first)):
            left_out.append(f"client_state of model-parallel rank {place[0]}, data-parallel rank {place[1]}")
    return {key: value for key, value in plain(tree, left_out).items() if value not in (None, {})}


def client_state(model: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the script gave to ``save_checkpoint``."""
    return {key: value for key, value in model.items() if key not in OWN}


def _numbered(optimizer: dict[str, Any], kept: dict[str, Any], ranks: int, left_out: list[str]) -> Any:
    """An optimizer without ZeRO, by numbers. They mean other parameters on each rank: None if there are several."""
    if ranks > 1:
        left_out.append(f"optimizer: without ZeRO it has no names of parameters, which {ranks} ranks have parts of")
        return None
    if "optimizer_state_dict" in optimizer:  # DeepSpeed's wrapper, which has the fp32 weights, also without names
        kept["optimizer"] = {key: value for key, value in optimizer.items() if key != "optimizer_state_dict"}
        return optimizer["optimizer_state_dict"]
    return optimizer


def _differs(one: Any, other: Any) -> bool:
    """Whether values differ, as far as can be told without reading tensors."""
    if isinstance(one, Stored) and isinstance(other, Stored):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) != set(other) or any(_differs(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) != len(other) or any(map(_differs, one, other))
    return type(one) is not type(other) or bool(one != other)


def plain(value: Any, left_out: list[str], path: tuple[Any, ...] = ()) -> Any:
    """The tensors and plain values of a tree. Other objects are dropped (None in a list) and named in ``left_out``.

    >>> gone: list[str] = []
    >>> plain({"a": [1, {2}]}, gone), gone
    ({'a': [1, None]}, ['a/1: a set'])
    """
    kept = _plain(value, left_out, path)
    return None if kept is _GONE else kept


def _plain(value: Any, left_out: list[str], path: tuple[Any, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | Stored):
        return value
    if isinstance(value, Foreign) and value.name == "Namespace":
        value = value.fields
    if isinstance(value, dict):
        items = {key: _plain(item, left_out, (*path, key)) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _GONE}
    if isinstance(value, list | tuple):
        made = (_plain(one, left_out, (*path, number)) for number, one in enumerate(value))
        return type(value)(None if item is _GONE else item for item in made)
    what = value.name if isinstance(value, Foreign) else type(value).__name__
    left_out.append(f"{name_of(path)}: a {what}")
    return _GONE
