"""Reads Megatron's torch_dist: a folder of DCP, and beside it ``common.pt`` with what all ranks have in common.

Its tensors are whole already. This module tells weights from the optimizer's state, and takes apart what Megatron has
put together (all layers in one tensor, or a rank's part flattened).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats import dcp, pickled
from holdfast.checkpoint.formats.megatron_legacy import EXTRA
from holdfast.checkpoint.formats.megatron_optimizer import Nameless, grouped
from holdfast.checkpoint.inside import read_regular
from holdfast.checkpoint.pieces import Box, Piece, Shape, Stored, TensorEntry, entry_of, flat_boxes
from holdfast.errors import CheckpointError
from holdfast.words import a_kind

COMMON = "common.pt"
_CONFIG = "metadata.json"
_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_STACKED = re.compile(r"((?:.*?\.)?layers)\.(?!\d)(.+)")
_MASTER = "fp32_param"


@dataclass(kw_only=True)
class Whole:
    """The content of a checkpoint, by names of parameters."""

    model: dict[str, TensorEntry] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def is_dist(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint of Megatron, of any backend."""
    return (path / COMMON).is_file() and (path / _CONFIG).is_file()


def read_dist(path: Path, left_out: list[str]) -> Whole:
    """Reads a torch_dist checkpoint, with fp32 weights in the place of rounded ones; ``left_out`` collects the rest."""
    _refuse_others(path)
    common = pickled.load(path / COMMON, root=path)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path / COMMON} holds {a_kind(common)}, not a dict")
    items, table = dcp.read_items(path)
    whole = Whole(common=common, files=[COMMON, _CONFIG, *table.files])
    for name, value in items.items():
        if not isinstance(value, TensorEntry):
            if value != [None]:
                left_out.append(_object(name))
        elif match := _SLOT.fullmatch(name):
            for called, entry in unstacked(match[2], value):
                whole.state.setdefault(called, {})[match[1]] = entry
        elif re.match(r"(chained_\d+\.)?optimizer\.", name):
            left_out.append("optimizer: its state lies in buckets of data-parallel ranks, which only they can read")
        else:
            whole.model.update(unstacked(name, value))
    _settle_state(whole, path, left_out)
    return whole


def _object(name: str) -> str:
    """A description of an object that is not a tensor, of which each rank has saved one."""
    name = name.partition("/shard_")[0]
    return EXTRA if name.endswith("_extra_state") else f"{name}: what each rank has of it"


def _refuse_others(path: Path) -> None:
    try:
        backend = json.loads(read_regular(path / _CONFIG, path))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / _CONFIG} does not say what the checkpoint is: {error!r:.300}") from error
    if backend != "torch_dist":
        hint = "load it with Megatron and save it with --ckpt-format torch_dist"
        raise CheckpointError(f"{path} is stored as {backend}, which cannot be read", hint=hint)


def _settle_state(whole: Whole, path: Path, left_out: list[str]) -> None:
    """Completes the optimizer: slots in their parameters' shapes, a step for each, fp32 weights, groups with names.

    Which parameters a group has is not saved; it follows from Megatron's rule for groups.
    """
    inner = _inner(whole.common.get("optimizer"))
    for name, slots in whole.state.items():
        if name not in whole.model:
            raise CheckpointError(f"{path} has a state of the optimizer for {name}, but not {name} itself")
        for slot, entry in slots.items():
            slots[slot] = unflattened(entry, whole.model[name].shape, f"{path}: {slot} of {name}")
        if _MASTER in slots:
            whole.model[name] = slots.pop(_MASTER)
        step = inner.get("state", {}).get("common_step")
        if step is not None:
            slots["step"] = entry_of(step) if isinstance(step, Stored) else step
    groups = inner.get("param_groups") or []
    if not whole.state or not groups:
        whole.state = {}
        return
    shapes = {name: entry.shape for name, entry in whole.model.items() if name in whole.state}
    try:
        names = grouped(groups, shapes, whole.common.get("args"))
    except Nameless as reason:
        left_out.append(f"optimizer: {COMMON} {reason}")
        whole.state = {}
        return
    whole.groups = [{**group, "params": called} for group, called in zip(groups, names, strict=True)]


def _inner(optimizer: Any) -> dict[str, Any]:
    """The part of torch's optimizer that all ranks have in common; of a chain of optimizers, all groups together."""
    if not isinstance(optimizer, dict):
        return {}
    if optimizer and all(isinstance(key, int) for key in optimizer):
        chain = [_inner(one) for one in optimizer.values()]
        return {**chain[0], "param_groups": [group for one in chain for group in one.get("param_groups", [])]}
    return optimizer.get("optimizer", optimizer)


def unstacked(name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """A tensor, or the layers that are stacked in it, each under the name it would have alone.

    >>> import torch
    >>> stored = Stored(file="a", offset=0, dtype=torch.float32, shape=(2, 3), strides=(3, 1))
    >>> [called for called, _ in unstacked("decoder.layers.norm.weight", entry_of(stored))]
    ['decoder.layers.0.norm.weight', 'decoder.layers.1.norm.weight']
    """
    match = _STACKED.fullmatch(name)
    if match is None or not entry.shape:
        yield name, entry
        return
    shape = entry.shape[1:]
    layers: list[list[Piece]] = [[] for _ in range(entry.shape[0])]
    for piece in entry.pieces:
        inner = Box(offset=piece.box.offset[1:], shape=piece.box.shape[1:])
        for i in range(piece.box.shape[0]):
            one = piece.stored.part(Box(offset=(i, *(0,) * len(shape)), shape=(1, *inner.shape)))
            stored = Stored(
                file=one.file, offset=one.offset, dtype=one.dtype, shape=inner.shape, strides=one.strides[1:]
            )
            layers[piece.box.offset[0] + i].append(Piece(box=inner, stored=stored))
    for number, pieces in enumerate(layers):
        yield f"{match[1]}.{number}.{match[2]}", TensorEntry(shape=shape, dtype=entry.dtype, pieces=tuple(pieces))


def unflattened(entry: TensorEntry, shape: Shape, what: str) -> TensorEntry:
    """A tensor in its parameter's shape.

    Megatron before 0.14 kept each rank's part of a slot flat, under a shape that counts the parts along each
    dimension and, last, the elements of a part.
    """
    if entry.shape == shape:
        return entry
    grid = entry.shape[:-1]
    fits = len(grid) == len(shape) and all(g and n % g == 0 for g, n in zip(grid, shape, strict=True))
    part = tuple(n // g for g, n in zip(grid, shape, strict=True)) if fits else ()
    if not fits or math.prod(part) != entry.shape[-1]:
        raise CheckpointError(f"{what} has the shape {entry.shape}, its parameter {shape}")
    pieces = []
    for piece in entry.pieces:
        if math.prod(piece.box.shape[:-1]) != 1 or not piece.stored.is_contiguous:
            raise CheckpointError(f"{what} is cut in a way that cannot be undone: {piece.box}")
        corner = [at * n for at, n in zip(piece.box.offset[:-1], part, strict=True)]
        start, done = piece.box.offset[-1], 0
        for box in flat_boxes(part, start, start + piece.box.shape[-1]):
            offset = tuple(a + b for a, b in zip(corner, box.offset, strict=True))
            stored = piece.stored.flat(done, done + box.numel, box.shape)
            pieces.append(Piece(box=Box(offset=offset, shape=box.shape), stored=stored))
            done += box.numel
    return TensorEntry(shape=shape, dtype=entry.dtype, pieces=tuple(pieces))
