"""ZeRO's flat shards: which elements of which parameter lie where in the arrays of the data-parallel ranks.

ZeRO-1 and 2 (and the bf16 optimizer) lay the parameters of a group one behind the other, pad the whole and
cut it into equal shards. ZeRO-3 cuts each parameter by itself, padded by itself. Everything an optimizer
keeps for each element is an array of the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.formats.pickled import Foreign
from holdfast.checkpoint.formats.rebuild import is_possible
from holdfast.checkpoint.pieces import Piece, Shape, Stored, TensorEntry, dense, flat_boxes
from holdfast.errors import CheckpointError

DAMAGED = "the files are not of one checkpoint, or one is damaged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Elements [at, at + count) of a flattened parameter lie from ``start`` on in the array of a rank."""

    rank: int
    start: int
    at: int
    count: int


@dataclass(kw_only=True)
class FlatShard:
    """A data-parallel rank's shard of a flat group: its weights, and the optimizer's slots for them."""

    file: str
    master: Stored
    size: int  # elements, with padding
    slots: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class FlatGroup:
    """Parameters that are laid out together, and the shards of all data-parallel ranks."""

    shapes: dict[str, Shape]
    shards: list[FlatShard]
    extents: dict[str, list[Extent]]


def in_turn(shapes: Mapping[str, Shape], *, size: int, gaps: Sequence[int] = ()) -> dict[str, list[Extent]]:
    """The layout of ZeRO-1 and 2: parameters one behind the other, cut into shards of ``size`` elements.

    ``gaps`` are the numbers of unused elements after each parameter.

    >>> in_turn({"a": (2, 2), "b": (3,)}, size=6)["b"]
    [Extent(rank=0, start=4, at=0, count=2), Extent(rank=1, start=0, at=2, count=1)]
    """
    extents: dict[str, list[Extent]] = {}
    begin = 0
    for number, (name, shape) in enumerate(shapes.items()):
        end = begin + math.prod(shape)
        extents[name] = []
        at = begin
        while at < end:
            rank = at // size
            count = min(end, (rank + 1) * size) - at
            extents[name].append(Extent(rank=rank, start=at - rank * size, at=at - begin, count=count))
            at += count
        begin = end + (gaps[number] if gaps else 0)
    return extents


def side_by_side(shapes: Mapping[str, Shape], *, ranks: int) -> dict[str, list[Extent]]:
    """The layout of ZeRO-3: every parameter is cut into ``ranks`` equal parts, the last one padded.

    >>> side_by_side({"a": (4,), "b": (3,)}, ranks=2)["b"]
    [Extent(rank=0, start=2, at=0, count=2), Extent(rank=1, start=2, at=2, count=1)]
    """
    extents: dict[str, list[Extent]] = {}
    start = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // ranks)
        whole = [Extent(rank=r, start=start, at=r * part, count=min(part, numel - r * part)) for r in range(ranks)]
        extents[name] = [extent for extent in whole if extent.count > 0]
        start += part
    return extents


def is_line(value: Any) -> bool:
    """Whether a value is a stored array of one dimension without gaps."""
    return isinstance(value, Stored) and len(value.shape) == 1 and value.is_contiguous


def gathered(shape: Shape, extents: Sequence[Extent], arrays: Sequence[Stored], name: str) -> TensorEntry:
    """A parameter, or a slot of it, as pieces of the ranks' flat arrays; ``CheckpointError`` if one is too short."""
    pieces: list[Piece] = []
    for extent in extents:
        if extent.rank >= len(arrays) or extent.start + extent.count > arrays[extent.rank].shape[0]:
            where = arrays[extent.rank].file if extent.rank < len(arrays) else f"a rank {extent.rank} that is not there"
            raise CheckpointError(f"{name} reaches beyond the data of {where}", hint=DAMAGED)
        array = arrays[extent.rank]
        at = array.offset + extent.start * array.dtype.itemsize
        for box in flat_boxes(shape, extent.at, extent.at + extent.count):
            # Not array.flat(...): of a large model there are hundreds of thousands of these.
            stored = dense(file=array.file, offset=at, dtype=array.dtype, shape=box.shape)
            pieces.append(Piece(box=box, stored=stored))
            at += stored.nbytes
    return TensorEntry(shape=shape, dtype=arrays[0].dtype, pieces=tuple(pieces))


def masters(groups: Sequence[FlatGroup]) -> dict[str, TensorEntry]:
    """The fp32 weights of all parameters."""
    return {
        name: gathered(shape, group.extents[name], [shard.master for shard in group.shards], name)
        for group in groups
        for name, shape in group.shapes.items()
    }


def slots(groups: Sequence[FlatGroup], left_out: list[str]) -> dict[str, dict[str, Any]]:
    """The optimizer's slots of each parameter: entries for flat arrays, and values that are the same on all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        state: dict[str, Any] = {}
        for slot in dict.fromkeys(slot for shard in group.shards for slot in shard.slots):
            lacking = [shard.file for shard in group.shards if slot not in shard.slots]
            if lacking:
                reason = f"{lacking[0]} has no {slot} for {next(iter(group.shapes))}, which other ranks have"
                raise CheckpointError(reason, hint=DAMAGED)
            values = [shard.slots[slot] for shard in group.shards]
            if _is_flat(values, group.shards):
                state[slot] = values
            elif _is_value(values):
                state[slot] = values[0]
            else:
                what = f"optimizer slot {slot} of {', '.join(list(group.shapes)[:2])} …"
                left_out.append(f"{what}: it is neither one value nor one for each element ({group.shards[0].file})")
        for name, shape in group.shapes.items():
            found[name] = {
                slot: gathered(shape, group.extents[name], value, f"{name} ({slot})")
                if isinstance(value, list)
                else value
                for slot, value in state.items()
            }
    return found


def _is_flat(values: Sequence[Any], shards: Sequence[FlatShard]) -> bool:
    """Whether a slot has an element for each of the shards'. Weights have no padding, slots do unless *elastic*."""
    return all(
        is_line(value) and value.shape[0] in (shard.size, shard.master.shape[0])
        for value, shard in zip(values, shards, strict=True)
    )


def _is_value(values: Sequence[Any]) -> bool:
    if all(isinstance(value, Stored) and value.shape == () for value in values):
        return True
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return plain and all(value == values[0] for value in values)


def flat_groups(
    states: Sequence[Mapping[str, Any]], files: Sequence[str], shapes: list[dict[str, Shape]]
) -> list[FlatGroup]:
    """The flat groups in all data-parallel ranks' optimizer states, of any ZeRO stage."""
    stage3 = "fp32_flat_groups" in states[0]
    key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
    per_rank = [list(_shards(state, key, file)) for state, file in zip(states, files, strict=True)]
    for shards, file in zip(per_rank, files, strict=True):
        if len(shards) != len(shapes):
            reason = f"{file} has {len(shards)} groups of parameters, the model states have {len(shapes)}"
            raise CheckpointError(reason, hint=DAMAGED)
    groups = []
    for number, group in enumerate(shapes):
        shards = [shards[number] for shards in per_rank]
        if stage3:
            extents = side_by_side(group, ranks=len(shards))
        else:
            gaps = states[0].get("param_alignment_paddings")
            size = max(shard.size for shard in shards)
            _check_room(group, size * len(shards), files[0])
            extents = in_turn(group, size=size, gaps=gaps[number] if gaps else ()) if size else {n: [] for n in group}
        groups.append(FlatGroup(shapes=group, shards=shards, extents=extents))
        _check_sizes(groups[-1], stage3)
    return groups


def _check_room(group: Mapping[str, Shape], room: int, file: str) -> None:
    """Refuses parameters that are larger than the shards of all ranks, before they are cut along those."""
    for name, shape in group.items():
        if not all(type(n) is int and n >= 0 for n in shape) or not is_possible(shape):
            raise CheckpointError(f"{name} has the shape {str(shape)[:100]}, which no tensor can have", hint=DAMAGED)
    wanted = sum(map(math.prod, group.values()))
    if wanted > room:
        reason = f"{file} and the others have room for {room} elements of a group of parameters that has {wanted}"
        raise CheckpointError(reason, hint=DAMAGED)


def _shards(state: Mapping[str, Any], key: str, file: str) -> Iterator[FlatShard]:
    """A rank's shard of each group."""
    # The bf16 optimizer, which names no stage, says how much padding there is but does not strip it.
    paddings = state.get("group_paddings") if "zero_stage" in state and key != "fp32_flat_groups" else None
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict")) or {}
    # Elastic checkpoints have a list of states; others what torch's state_dict is, one flat parameter for each group.
    kept = base if isinstance(base, list) else base.get("state", {})
    for number, master in enumerate(state[key]):
        if not is_line(master):
            raise CheckpointError(f"{file}: the weights of group {number} are not a flat array", hint=DAMAGED)
        mine = kept[number] if isinstance(kept, list) else kept.get(number, {})
        size = master.shape[0] + (paddings[number] if paddings else 0)
        yield FlatShard(file=file, master=master, size=size, slots=dict(mine))


def _check_sizes(group: FlatGroup, stage3: bool) -> None:
    """Refuses shards that are longer or shorter than their parameters: they are of another run."""
    ranks = len(group.shards)
    first, lengths = group.shards[0], [shard.master.shape[0] for shard in group.shards]
    which = ", ".join(list(group.shapes)[:3])
    if stage3:
        wanted = sum(-(-math.prod(shape) // ranks) for shape in group.shapes.values())
        for shard, length in zip(group.shards, lengths, strict=True):
            if length != wanted:
                reason = (
                    f"{shard.file} has {length} elements of the group of {which}, which needs {wanted} on each rank"
                )
                raise CheckpointError(reason, hint=DAMAGED)
        return
    for shard in group.shards:
        if shard.size != first.size:
            reason = f"{shard.file} has {shard.size} elements of the group of {which}, {first.file} {first.size}"
            raise CheckpointError(reason, hint=DAMAGED)
    end = max((e.rank * first.size + e.start + e.count for es in group.extents.values() for e in es), default=0)
    if not 0 <= sum(lengths) - end < 2 * ranks:  # the whole is padded to a multiple of this
        reason = f"{first.file} and the others have {sum(lengths)} elements of the group of {which}, which needs {end}"
        raise CheckpointError(reason, hint=DAMAGED)


def mapped_shapes(states: Sequence[Mapping[str, Any]], known: Mapping[str, Shape]) -> list[dict[str, Shape]]:
    """Names and order of the parameters from ``param_slice_mappings``, where the model states do not say them.

    Only then: with round-robin gradients DeepSpeed's mappings are not those of the data (0.19.8).
    """
    groups: list[dict[str, Shape]] = []
    for number in range(len(states[0].get("param_slice_mappings", []))):
        names: dict[str, Shape] = {}
        for state in states:
            mapping = state["param_slice_mappings"][number]
            for name, _ in sorted(mapping.items(), key=lambda item: _field(item[1], "start")):
                if name not in known:
                    raise CheckpointError(f"nothing says which shape {name} has", hint="save with a newer DeepSpeed")
                names[name] = known[name]
        groups.append(names)
    return groups


def _field(address: Any, name: str) -> int:
    value = address.fields.get(name) if isinstance(address, Foreign) else None
    if not isinstance(value, int):
        raise CheckpointError("param_slice_mappings of the optimizer states cannot be understood", hint=DAMAGED)
    return value
