"""Reads the weights, buffers and optimizer of one tensor-parallel rank of a DeepSpeed run, from all its files.

The fp32 weights of the optimizer are taken where there are any, since the model's own are rounded; what the
optimizer does not have (buffers, frozen parameters) comes from the model states in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats import pickled
from holdfast.checkpoint.formats.deepspeed_files import INCOMPLETE, Place, TagFiles
from holdfast.checkpoint.formats.deepspeed_zero import (
    DAMAGED,
    flat_groups,
    gathered,
    is_line,
    mapped_shapes,
    masters,
    side_by_side,
    slots,
)
from holdfast.checkpoint.pieces import Shape, Stored, TensorEntry, entry_of
from holdfast.errors import CheckpointError
from holdfast.words import a_kind

TIED = "tied_modules."  # DeepSpeed's pipelines keep what several stages share under such names


@dataclass(kw_only=True)
class Column:
    """The model and optimizer of one tensor-parallel rank."""

    weights: dict[str, TensorEntry] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_states(folder: Path, name: str) -> dict[str, Any]:
    """The dict in a file of DeepSpeed's; ``CheckpointError`` if it is something else."""
    states = pickled.load(folder / name, root=folder)
    if not isinstance(states, dict):
        raise CheckpointError(f"{folder / name} holds {a_kind(states)}, not a dict", hint=DAMAGED)
    return states


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """The files of a checkpoint, read: by (model-parallel, data-parallel) rank, and how many there are of each.

    A model-parallel rank is its pipeline stage's number times ``tps``, plus its tensor-parallel rank.
    """

    folder: Path
    files: TagFiles
    models: Mapping[Place, dict[str, Any]]
    optims: Mapping[Place, dict[str, Any]]
    tps: int
    pps: int
    dps: int


def read_column(ranks: RankFiles, tp: int) -> Column:
    """Everything of one tensor-parallel rank."""
    column = Column()
    layers = _layers(ranks, tp)
    shared = ranks.models[0, 0].get("shared_params") or {}  # only the first rank notes them
    for pp in range(ranks.pps):
        mp = pp * ranks.tps + tp
        workers = [ranks.models[mp, dp] for dp in range(ranks.dps if ranks.files.per_worker else 1)]
        module = dict(workers[0].get("module") or {})
        _add_trained(column, ranks, mp, {**module, **layers})
        add_frozen(column, workers)
        column.buffers += [name for name in workers[0].get("buffer_names") or [] if name not in column.buffers]
        add_tied(column, shared, module, ranks.files.per_worker)
        add_module(column, module, ranks.files.per_worker)
    _check_layers(column, ranks, tp)
    add_module(column, _untied(column, layers), False)
    for name in column.buffers:
        if name not in column.weights and name not in column.tied:
            raise CheckpointError(f"{ranks.folder}: no file has the buffer {name}", hint=INCOMPLETE)
    return column


def add_tied(column: Column, shared: Mapping[str, str], module: Mapping[str, Any], partitioned: bool) -> None:
    """Adds second names of parameters. Empty tensors are skipped: DeepSpeed takes all of them for one parameter."""
    for second, first in shared.items():
        value = module.get(second)
        empty = not partitioned and isinstance(value, Stored) and not math.prod(value.shape)
        if first in column.weights and second not in column.weights and not empty:
            column.tied[second] = first


def _check_layers(column: Column, ranks: RankFiles, tp: int) -> None:
    """Refuses a pipeline of which a layer with trained parameters has no file."""
    files = ranks.files.layers
    for number in sorted({int(name.partition(".")[0]) for name in column.weights if name.partition(".")[0].isdigit()}):
        if files and (number, tp) not in files:
            form = f"layer_{number:02d}{f'-model_{tp:02d}' if ranks.tps > 1 else ''}-model_states.pt"
            raise CheckpointError(f"{ranks.folder / form} is missing", hint=INCOMPLETE)


def _layers(ranks: RankFiles, tp: int) -> dict[str, Stored]:
    """The tensors of a pipeline's files, one file for each layer, by their names in the model."""
    found: dict[str, Stored] = {}
    for layer in sorted({layer for layer, _ in ranks.files.layers}):
        if (layer, tp) not in ranks.files.layers:
            name = f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
            raise CheckpointError(f"{ranks.folder / name} is missing", hint=INCOMPLETE)
        for key, value in read_states(ranks.folder, ranks.files.layers[layer, tp]).items():
            if isinstance(value, Stored):
                found[f"{layer}.{key}"] = value
    return found


def _add_trained(column: Column, ranks: RankFiles, mp: int, known: Mapping[str, Any]) -> None:
    """Adds the trained parameters: their fp32 weights and the optimizer's state."""
    states = [ranks.optims[mp, dp] for dp in range(ranks.dps) if (mp, dp) in ranks.optims]
    if not states:
        return
    names = [ranks.files.optim[mp, dp] for dp in range(ranks.dps)]
    shapes = ranks.models[mp, 0].get("param_shapes")
    if shapes is None:
        shapes = mapped_shapes(states, _shapes(known, ranks.optims.values()))
    groups = flat_groups(states, names, [{n: tuple(s) for n, s in group.items()} for group in shapes])
    state = slots(groups, column.left_out)
    for name, entry in masters(groups).items():
        if name not in column.weights:
            column.weights[name], column.state[name] = entry, state[name]
        elif not name.startswith(TIED):
            raise CheckpointError(f"{name} is in more than one pipeline stage of {ranks.folder}")
    _add_groups(column, states[0], [list(group.shapes) for group in groups])


def _shapes(known: Mapping[str, Any], states: Collection[Mapping[str, Any]]) -> dict[str, Shape]:
    """Shapes of the model's tensors. One that stages share is found by its key among layers without an owner."""
    shapes = {name: value.shape for name, value in known.items() if isinstance(value, Stored)}
    mapped = {name for state in states for group in state.get("param_slice_mappings", []) for name in group}
    for name in mapped - set(shapes):
        key = name.removeprefix(TIED).partition(".")[2]
        candidates = {
            shape for other, shape in shapes.items() if other.partition(".")[2] == key and other not in mapped
        }
        if name.startswith(TIED) and len(candidates) == 1:
            shapes[name] = candidates.pop()
    return shapes


def _add_groups(column: Column, state: Mapping[str, Any], names: list[list[str]]) -> None:
    """Adds the groups of hyper-parameters. Equal groups of several pipeline stages become one."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict")) or {}
    saved = base.get("param_groups", []) if isinstance(base, dict) else []
    if not saved:
        column.left_out.append("hyper-parameters of the optimizer's groups: elastic checkpoints do not have them")
        step = state.get("base_optimizer_state_step")
        saved = [{"params": [i], **({} if step is None else {"step": step})} for i in range(len(names))]
    taken: list[dict[str, Any]] = []
    for group in saved:
        mine = [name for number in group["params"] for name in names[number]]
        hyper = {key: value for key, value in group.items() if key != "params"}
        for merged in column.groups:
            if not any(merged is one for one in taken) and hyper == {k: v for k, v in merged.items() if k != "params"}:
                break
        else:
            merged = {"params": [], **hyper}
            column.groups.append(merged)
        taken.append(merged)
        merged["params"] += [name for name in mine if name not in merged["params"]]


def add_frozen(column: Column, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Adds frozen parameters: ZeRO-3 has a part of each in every rank's file, ZeRO-2 has them whole."""
    shapes = ranks[0].get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        parts: list[Any] = [(rank.get("frozen_param_fragments") or {}).get(name) for rank in ranks]
        if len(parts) == 1 and isinstance(parts[0], Stored) and parts[0].shape == tuple(shape):
            column.weights[name] = entry_of(parts[0])
        elif all(map(is_line, parts)):
            extents = side_by_side({name: tuple(shape)}, ranks=len(parts))[name]
            column.weights[name] = gathered(tuple(shape), extents, parts, name)
        else:
            raise CheckpointError(f"the frozen {name} is not in the model states of every rank", hint=DAMAGED)
        column.frozen.append(name)


def add_module(column: Column, module: Mapping[str, Any], partitioned: bool) -> None:
    """Adds buffers, and parameters that only the model states have; with ZeRO-3 the latter are empty."""
    places = {_place(value): name for name, value in module.items() if name in column.weights and _place(value)}
    trained = bool(column.groups)
    for name, value in module.items():
        if name in column.weights or name in column.tied or not isinstance(value, Stored):
            continue
        first = places.setdefault(place, name) if (place := _place(value)) else name
        if first != name:
            column.tied[name] = first
        elif partitioned and name not in column.buffers:
            column.left_out.append(f"{name}: DeepSpeed kept no value of it")
        else:
            column.weights[name] = entry_of(value)
            if trained and name not in column.buffers:
                column.frozen.append(name)


def _place(value: Any) -> tuple[Any, ...]:
    """A key that is equal for tensors in the same memory, as tied ones are saved; empty for an empty tensor."""
    if not isinstance(value, Stored) or not math.prod(value.shape):
        return ()
    return value.file, value.offset, value.shape, value.strides


def _untied(column: Column, layers: Mapping[str, Stored]) -> dict[str, Stored]:
    """A pipeline's layers without those that its stages share: these are trained under another name."""
    kept = dict(layers)
    shared: dict[str, dict[str, Shape]] = {}
    for name, entry in column.weights.items():
        if name.startswith(TIED):
            module, _, key = name.removeprefix(TIED).partition(".")
            shared.setdefault(module, {})[key] = entry.shape
    for layer in sorted({name.partition(".")[0] for name in layers}, key=int):
        keys = {name.partition(".")[2]: name for name in layers if name.partition(".")[0] == layer}
        for module, shapes in shared.items():
            if any(name in column.weights for name in keys.values()) or not set(shapes) <= set(keys):
                continue
            if all(layers[keys[key]].shape == shape for key, shape in shapes.items()):
                _take_shared(column, kept, keys, module, layer)
                break
    return kept


def _take_shared(column: Column, kept: dict[str, Stored], keys: Mapping[str, str], module: str, layer: str) -> None:
    for key, name in keys.items():
        value, shared = kept.pop(name), f"{TIED}{module}.{key}"
        if shared in column.buffers:
            column.weights.setdefault(shared, entry_of(value))
        elif shared in column.weights:
            column.left_out.append(f"{name} of layer {layer}: the model's rounded copy of {shared}")
        else:
            kept[shared] = value
