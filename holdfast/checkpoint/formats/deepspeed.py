"""Reads DeepSpeed's checkpoints: ZeRO-1, 2 and 3, the bf16 optimizer, none; data, tensor and pipeline parallel.

Nothing of DeepSpeed is needed. A path is the checkpoint's folder, whose file ``latest`` names a tag, or the
folder of a tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats.deepspeed_extras import extras
from holdfast.checkpoint.formats.deepspeed_files import (
    INCOMPLETE,
    Place,
    TagFiles,
    check_grid,
    names_in,
    sort_files,
    tag_folder,
)
from holdfast.checkpoint.formats.deepspeed_states import Column, RankFiles, read_column, read_states
from holdfast.checkpoint.formats.deepspeed_tp import join_columns
from holdfast.checkpoint.formats.deepspeed_zero import DAMAGED
from holdfast.checkpoint.formats.files import files_of, pointer_of
from holdfast.checkpoint.pieces import Catalogue, Ref, TensorEntry, catalogue_tree, name_of
from holdfast.checkpoint.rules import Rules
from holdfast.errors import CheckpointError

EXPERTS = "checkpoints with expert parallelism are not read"


def recognise(path: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed's ``save_checkpoint``; looks at names only."""
    try:
        folder = tag_folder(path, "latest", anywhere=True)
        files = sort_files(names_in(folder))
        return bool(files.model or files.optim) and not (folder / "zero").is_dir()
    except (CheckpointError, OSError):
        return False


def open(path: Path, rules: Rules | None = None) -> Catalogue:
    """The catalogue of a checkpoint; reads pickles and no tensor.

    ``rules`` say how tensors are cut over tensor-parallel ranks where the checkpoint does not
    (DeepSpeed's AutoTP does, Megatron-DeepSpeed partly).
    """
    folder = tag_folder(path, "latest")
    ranks = read_ranks(folder)
    columns = [read_column(ranks, tp) for tp in range(ranks.tps)]
    told = (model.get("universal_checkpoint_info") for model in ranks.models.values())
    info: dict[str, Any] = next(filter(None, told), {})
    column = join_columns(columns, info, rules, where=ranks.folder)
    column.left_out = list(dict.fromkeys(reason for one in columns for reason in one.left_out))
    tree = tree_of(column, ranks.models, ranks.optims, numbered=not column.groups)
    read = [*pointer_of(folder, path, "latest"), *_names(ranks.files)]
    details = {"tensor_parallel": ranks.tps, "pipeline": ranks.pps, "data_parallel": ranks.dps}
    return catalogue_of("deepspeed", folder, column, tree, read, details)


def read_ranks(folder: Path) -> RankFiles:
    """Reads the pickles of all files; ``CheckpointError`` if they are not one whole checkpoint."""
    files = sort_files(names_in(folder), where=str(folder))
    if files.experts:
        raise CheckpointError(f"{folder / files.experts[0]} holds an expert", hint=EXPERTS)
    if not files.model:
        raise CheckpointError(f"{folder} has no model_states.pt files", hint="is it a DeepSpeed checkpoint?")
    models = {place: read_states(folder, name) for place, name in files.model.items()}
    optims = {place: _optimizer(folder / name) for place, name in files.optim.items()}
    pps, tps = _model_parallel(models, files, folder)
    dps = _data_parallel(models, optims, files, folder)
    rows = dps if files.per_worker else 1
    form = (
        "zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" if files.per_worker else "mp_rank_{mp:02d}_model_states.pt"
    )
    check_grid(files.model, columns=pps * tps, rows=rows, example=form, where=folder)
    if optims or any(model.get("param_shapes") for model in models.values()):
        prefix = next(iter(files.optim.values()), "").partition("zero")[0]
        form = f"{prefix}zero_pp_rank_{{dp}}_mp_rank_{{mp:02d}}_optim_states.pt"
        check_grid(files.optim, columns=pps * tps, rows=dps, example=form, where=folder)
    return RankFiles(folder=folder, files=files, models=models, optims=optims, tps=tps, pps=pps, dps=dps)


def _optimizer(path: Path) -> dict[str, Any]:
    state = read_states(path.parent, path.name).get("optimizer_state_dict")
    if not isinstance(state, dict) or not {"fp32_flat_groups", "single_partition_of_fp32_groups"} & set(state):
        raise CheckpointError(f"{path} has no ZeRO optimizer state", hint=DAMAGED)
    if state.get("ds_zero_partition_groups"):
        raise CheckpointError(f"{path} has experts that are cut over a group of their own", hint=EXPERTS)
    return state


def _model_parallel(models: Mapping[Place, Any], files: TagFiles, folder: Path) -> tuple[int, int]:
    """The numbers of pipeline stages and of tensor-parallel ranks."""
    first = models[min(models)]
    if dimensions := first.get("checkpoint_parallel_dimensions"):
        return dimensions["pp_degree"], dimensions["tp_degree"]
    mps = first.get("mp_world_size") or 1 + max(mp for mp, _ in models)
    tps = len({tp for _, tp in files.layers}) if files.layers else mps
    if mps % tps:
        reason = f"{folder} has {mps} model-parallel ranks, which are not stages of {tps} tensor-parallel ones"
        raise CheckpointError(reason, hint=INCOMPLETE)
    return mps // tps, tps


def _data_parallel(models: Mapping[Place, Any], optims: Mapping[Place, Any], files: TagFiles, folder: Path) -> int:
    """The number of data-parallel ranks over which the optimizer was cut."""
    counts: set[int] = set()
    for state in optims.values():
        count = state.get("partition_count")
        counts |= set(count if isinstance(count, list) else [count]) - {None}
    if len(counts) > 1:
        raise CheckpointError(f"{folder}: groups of parameters are cut over {sorted(counts)} ranks", hint=EXPERTS)
    saved = counts.pop() if counts else models[min(models)].get("dp_world_size")
    if saved is not None and (type(saved) is not int or saved < 0):
        raise CheckpointError(f"{folder} says it was written by {saved!r} data-parallel ranks", hint=DAMAGED)
    return saved or 1 + max(dp for _, dp in [*files.optim, *files.model])


def tree_of(
    column: Column, models: Mapping[Place, dict[str, Any]], optims: Mapping[Place, dict[str, Any]], *, numbered: bool
) -> dict[str, Any]:
    """The tree of a joined column and the values beside it; see :func:`extras` for ``numbered``."""
    rank = {name: number for number, name in enumerate(models[0, 0].get("module") or {})}
    model: dict[str, TensorEntry | Ref] = dict(column.weights)
    model.update({second: Ref(name=name_of(("model", first))) for second, first in column.tied.items()})
    # In the model's order, where it is known.
    tree: dict[str, Any] = {"model": dict(sorted(model.items(), key=lambda item: rank.get(item[0], len(rank))))}
    if column.groups:
        tree["optimizer"] = {"state": column.state, "param_groups": column.groups}
    return {**tree, **extras(models, optims, column.left_out, numbered=numbered)}


def catalogue_of(
    format: str, folder: Path, column: Column, tree: dict[str, Any], read: list[str], details: Mapping[str, Any]
) -> Catalogue:
    """The catalogue of a column and its tree; ``read`` are the files that were read."""
    tree, tensors = catalogue_tree(tree)
    return Catalogue(
        format=format,
        root=folder,
        tensors=tensors,
        tree=tree,
        files=files_of(folder, tensors, read),
        tied=column.tied,
        frozen=tuple(column.frozen),
        buffers=tuple(name for name in column.buffers if name in column.weights),
        details={"left_out": column.left_out, **details},
    )


def _names(files: TagFiles) -> list[str]:
    return [name for names in (files.model, files.optim, files.layers) for name in names.values()]
