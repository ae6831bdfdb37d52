"""Joins what the tensor-parallel ranks of a DeepSpeed run had into one model.

DeepSpeed's AutoTP writes down where each rank's parts belong (``affine_map``), and those who prepare for
DeepSpeed's universal checkpoints write lists of patterns. Where neither says it, the user's rules do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats.deepspeed_states import Column
from holdfast.checkpoint.formats.linear_regex import compiled
from holdfast.checkpoint.pieces import Box, Piece, Shape, TensorEntry, name_of, path_of, row_major
from holdfast.checkpoint.rules import Fragment, Partial, Pattern, Replicate, Rule, Rules, Shard, merge
from holdfast.errors import CheckpointError, UsageError

_TRIED = 3_000_000  # patterns times tensors; some seconds
GIVE_RULES = "pass rules that say replicate or shard for it, see docs/checkpoint-rules.md"


def join_columns(columns: Sequence[Column], info: Mapping[str, Any], rules: Rules | None, *, where: Path) -> Column:
    """One column out of those of all tensor-parallel ranks; ``info`` is what DeepSpeed wrote about the cuts.

    Raises ``CheckpointError`` if neither ``info`` nor rules say how a tensor is cut.
    """
    first = columns[0]
    if len(columns) == 1:
        return renamed_by(first, rules)
    parts = [dict(_entries(column)) for column in columns]
    for part in parts:
        if strange := set(part) ^ set(parts[0]):
            raise CheckpointError(f"{where}: only some tensor-parallel ranks have {min(strange)}", hint=GIVE_RULES)
    _check_work(first, info, where)
    maps = {} if rules is not None else {name: found for name in first.weights if (found := _affine(info, name))}
    joined = {
        name: _placed([part[name] for part in parts], maps[key], key)
        for name in parts[0]
        if (key := _parameter(name)) in maps
    }
    new = {name: name for name in joined}
    derived = Rules(_derived(first, info, maps))
    chosen = derived if rules is None else rules.over(derived)
    fragments = [
        Fragment(name=name, shape=entry.shape, dtype=entry.dtype, place={"tp": tp}, holder=tp, stored=entry)
        for tp, part in enumerate(parts)
        for name, entry in part.items()
        if name not in joined
    ]
    try:
        new.update({name: target.name for name, target in chosen.targets(one.name for one in fragments).items()})
        joined.update(merge(fragments, chosen, axes={"tp": len(columns)}))
    except UsageError as error:
        if rules is not None:
            raise
        raise CheckpointError(f"{where} does not say how its tensors are cut: {error}", hint=GIVE_RULES) from error
    return renamed(_filled(first, {old: joined[name] for old, name in new.items()}), _by_key(new))


def _check_work(column: Column, info: Mapping[str, Any], where: Path) -> None:
    """Refuses lists of patterns that are so long that trying all of them would take long."""
    lists = [value for value in info.values() if isinstance(value, list | dict)]
    patterns = sum(map(len, lists)) + len((info.get("affine_map") or {}).get("params") or {})
    patterns += sum(len(fused["patterns"]) for fused in info.get("parameter_with_sub_params") or [])
    if patterns * len(column.weights) > _TRIED:
        reason = f"{where} has {patterns} patterns for {len(column.weights)} tensors, which take long to try"
        raise CheckpointError(reason, hint=GIVE_RULES)


def _filled(column: Column, entries: Mapping[str, TensorEntry]) -> Column:
    """A column with other entries in the place of its own."""
    state = {
        name: {
            slot: entries[name_of(("optimizer", "state", name, slot))] if isinstance(value, TensorEntry) else value
            for slot, value in slots.items()
        }
        for name, slots in column.state.items()
    }
    return replace(column, weights={name: entries[name_of(("model", name))] for name in column.weights}, state=state)


def _entries(column: Column) -> Iterator[tuple[str, TensorEntry]]:
    for name, entry in column.weights.items():
        yield name_of(("model", name)), entry
    for name, slots in column.state.items():
        for slot, value in slots.items():
            if isinstance(value, TensorEntry):
                yield name_of(("optimizer", "state", name, slot)), value


def _parameter(name: str) -> str:
    """The key of a parameter in the model, from the name of a tensor of it."""
    return path_of(name)[1 if name.startswith("model/") else 2]


# --- what DeepSpeed's lists of patterns say --------------------------------------------------------


def _derived(column: Column, info: Mapping[str, Any], maps: Mapping[str, Any]) -> Iterator[Rule]:
    """A rule for each tensor, from DeepSpeed's lists of patterns; none if there are no lists."""
    if not info:
        return
    for name in column.weights:
        if name in maps:
            continue
        if name in column.buffers and "affine_map" not in info:
            continue  # the lists are about parameters; AutoTP, which writes maps, cuts nothing else
        pattern = Replicate() if name in column.buffers else pattern_of(name, info)
        yield Rule(match=re.escape(name_of(("model", name))), pattern=pattern)


def pattern_of(name: str, info: Mapping[str, Any]) -> Pattern:
    """The pattern by which DeepSpeed's own converter would join a parameter: of the first list it is on, else dim 0.

    >>> pattern_of("a.weight", {"parameter_with_row_parallelism_patterns": [".*weight"]}).dim
    1
    """
    for pattern, reason in (info.get("autotp_unsupported_parameter_patterns") or {}).items():
        if compiled(pattern).match(name):
            raise CheckpointError(f"{name} cannot be joined, says DeepSpeed: {reason}", hint=GIVE_RULES)
    on: Callable[[str], bool] = lambda key: any(compiled(pattern).match(name) for pattern in info.get(key) or [])  # noqa: E731
    if on("tp_replicated_parameter_patterns"):
        return Replicate()
    if on("parameter_to_average_patterns"):
        return Partial()
    if on("parameter_with_2_sub_params_cat_dim_0"):
        return Shard(dim=0, parts=2)
    for fused in info.get("parameter_with_sub_params") or []:
        for pattern in fused["patterns"]:
            if compiled(pattern).match(name):
                sizes = fused["shape"][fused["partition_dim"]]
                _check_even(name, (info.get("sub_param_shard_widths") or {}).get(pattern) or [])
                return Shard(dim=fused["partition_dim"], parts=sizes if isinstance(sizes, int) else tuple(sizes))
    size = info.get("original_vocab_size") if on("vocabulary_parameter_patterns") else None
    return Shard(dim=1 if on("parameter_with_row_parallelism_patterns") else 0, size=size)


def _check_even(name: str, widths: Sequence[Sequence[int]]) -> None:
    if any(len(set(of_ranks)) > 1 for of_ranks in widths):
        raise CheckpointError(f"{name} is fused, and its parts are cut unevenly: {list(widths)}", hint=GIVE_RULES)


# --- what AutoTP's maps say -------------------------------------------------------------------------


def _affine(info: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    known = info.get("affine_map") or {}
    if known and known.get("version", 1) > 1:
        return None
    return next((found for pattern, found in known.get("params", {}).items() if compiled(pattern).match(name)), None)


def _placed(parts: Sequence[TensorEntry], found: Mapping[str, Any], name: str) -> TensorEntry:
    """A tensor, joined by its parameter's map; of copies, the first rank's is taken."""
    shape = tuple(found["logical_shape"])
    pieces: list[Piece] = []
    seen: set[Box] = set()
    for tp, part in sorted((int(rank), part) for rank, part in found["ranks"].items()):
        entry = parts[tp]
        if tuple(part["shard_shape"]) != entry.shape:
            reason = f"{name} is {entry.shape} on tensor-parallel rank {tp}, its map says {part['shard_shape']}"
            raise CheckpointError(reason, hint=GIVE_RULES)
        for one in part["pieces"]:
            if one.get("scale", 1.0) != 1.0:
                raise CheckpointError(f"{name} is scaled by {one['scale']} on each rank", hint=GIVE_RULES)
            target, source = _box(one, "source", shape, name), _box(one, "dest", entry.shape, name)
            if target not in seen:
                seen.add(target)
                pieces += _moved(entry, source, target)
    return TensorEntry(shape=shape, dtype=parts[0].dtype, pieces=tuple(pieces))


def _box(piece: Mapping[str, Any], side: str, shape: Shape, name: str) -> Box:
    """The box of a piece in a map, which has an offset and strides; refuses those that are not a box's."""
    at, strides = piece[side]
    if tuple(strides) != row_major(shape) and 0 not in piece["shape"]:
        raise CheckpointError(f"the map of {name} is not made of boxes: strides {strides} in {shape}", hint=GIVE_RULES)
    offset = []
    for stride in row_major(shape):
        offset.append(at // stride)
        at %= stride
    return Box(offset=tuple(offset), shape=tuple(piece["shape"]))


def _moved(entry: TensorEntry, source: Box, target: Box) -> Iterator[Piece]:
    for piece in entry.pieces:
        common = piece.box.intersect(source)
        if common is not None:
            offset = tuple(c - s + t for c, s, t in zip(common.offset, source.offset, target.offset, strict=True))
            stored = piece.stored.part(common.relative_to(piece.box))
            yield Piece(box=Box(offset=offset, shape=common.shape), stored=stored)


# --- new names ----------------------------------------------------------------------------------------


def renamed_by(column: Column, rules: Rules | None) -> Column:
    """A column whose layout is known, under the names that rules give."""
    return column if rules is None else renamed(column, _by_key(rules.renames(name for name, _ in _entries(column))))


def _by_key(new: Mapping[str, str]) -> dict[str, str]:
    """New keys of the model by old ones, from new names of tensors by old ones."""
    keys = {}
    for old, name in new.items():
        if old.startswith("model/"):
            if not name.startswith("model/"):
                raise UsageError(f"{old} would be renamed to {name}", hint="parameters stay in model/")
            keys[_parameter(old)] = _parameter(name)
    return keys


def renamed(column: Column, new: Mapping[str, str]) -> Column:
    """A column under other names.

    >>> renamed(Column(groups=[{"params": ["a"]}]), {"a": "b"}).groups
    [{'params': ['b']}]
    """
    return replace(
        column,
        weights={new[name]: entry for name, entry in column.weights.items()},
        state={new.get(name, name): slots for name, slots in column.state.items()},
        groups=[{**group, "params": [new.get(name, name) for name in group["params"]]} for group in column.groups],
        buffers=[new.get(name, name) for name in column.buffers],
        frozen=[new.get(name, name) for name in column.frozen],
        tied={new.get(second, second): new.get(first, first) for second, first in column.tied.items()},
    )
