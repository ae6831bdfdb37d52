"""Decides which rank writes which part of a checkpoint.

A pure function of what all ranks hold: each rank computes it and comes to the same result, so nobody has to be told.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.checkpoint.pieces import Box, Shape, take_out, whole
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class HeldBoxes:
    """The boxes of a logical tensor that one worker holds.

    Copies must have the same ``digest`` where there is one. A ``leading`` tensor may differ between workers: the
    first worker's is saved, as DistributedDataParallel does with a module's buffers.
    """

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    leading: bool = False
    digest: str | None = None


Inventory = Mapping[str, HeldBoxes]
Job = tuple[str, Box]


def share(inventories: Sequence[Inventory]) -> list[list[Job]]:
    """The boxes that each worker writes: every element once, copies shared out evenly by bytes.

    Raises ``UsageError`` if workers disagree on a tensor, hold parts that overlap, or leave a gap.

    >>> w = HeldBoxes(shape=(4,), dtype=torch.float32, boxes=(whole((4,)),))
    >>> [[(name, box.offset, box.shape) for name, box in jobs] for jobs in share([{"w": w}, {"w": w}])]
    [[('w', (0,), (2,))], [('w', (2,), (2,))]]
    """
    holders = {name: _holders(name, inventories) for name in dict.fromkeys(n for inv in inventories for n in inv)}
    sizes = {name: next(inv[name].dtype.itemsize for inv in inventories if name in inv) for name in holders}
    total = sum(box.numel * sizes[name] for name, boxes in holders.items() for box in boxes)
    large = total / len(inventories) / 8  # bytes; smaller boxes are not cut, they cannot upset the balance by much
    jobs: list[list[Job]] = [[] for _ in inventories]
    loads = [0] * len(inventories)
    listed = [
        (box.numel * sizes[name], name, box, ranks) for name, boxes in holders.items() for box, ranks in boxes.items()
    ]
    # First the boxes that only one worker can write; copies then even out the loads, the largest first.
    for size, name, box, ranks in sorted(listed, key=lambda job: (len(job[3]) > 1, -job[0], job[1], job[2].offset)):
        parts = _cut(box, len(ranks)) if size > large else [box]
        for part in parts:
            rank = min(ranks, key=lambda r: (loads[r], r))
            jobs[rank].append((name, part))
            loads[rank] += part.numel * sizes[name]
    return jobs


def _cut(box: Box, count: int) -> list[Box]:
    """``count`` slices of a box along its first dimension longer than 1, as equal as possible; each is contiguous."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None or count < 2:
        return [box]
    start, rows = box.offset[dim], box.shape[dim]
    edges = [rows * i // count for i in range(count + 1)]
    return [
        Box(
            offset=(*box.offset[:dim], start + a, *box.offset[dim + 1 :]),
            shape=(*box.shape[:dim], b - a, *box.shape[dim + 1 :]),
        )
        for a, b in itertools.pairwise(edges)
        if a < b
    ]


def _holders(name: str, inventories: Sequence[Inventory]) -> dict[Box, list[int]]:
    """Boxes that together make up a tensor, each with the workers that hold it."""
    found: dict[Box, list[int]] = {}
    known = [(rank, inv[name]) for rank, inv in enumerate(inventories) if name in inv]
    leader, first = known[0]
    original = next((one for one in known if one[1].digest is not None), None)  # copies must be like this one
    for rank, holding in known:
        if (holding.shape, holding.dtype) != (first.shape, first.dtype):
            raise UsageError(
                f"workers disagree on {name}: {first.dtype} {first.shape} on worker {leader}, "
                f"{holding.dtype} {holding.shape} on worker {rank}",
                hint="a tensor that is different on each worker needs a name or a rule of its own",
            )
        if original and not first.leading and holding.digest not in (None, original[1].digest):
            raise UsageError(
                f"workers {original[0]} and {rank} have different values of {name}",
                hint="holdfast.checkpoint.per_rank(value) marks what each worker has for itself",
            )
        for box in holding.boxes:
            found.setdefault(box, []).append(rank)
    if math.prod(first.shape) == 0:
        return {whole(first.shape): [leader]}
    tiling = _tiling(name, first.shape, found)
    return {box: ranks[:1] for box, ranks in tiling.items()} if first.leading else tiling


def _tiling(name: str, shape: Shape, found: dict[Box, list[int]]) -> dict[Box, list[int]]:
    chosen: dict[Box, list[int]] = {}
    left = [whole(shape)]
    # Largest first: where some workers hold the whole and others parts of it, the whole is written.
    for box in sorted(found, key=lambda b: (-b.numel, b.offset)):
        inside, rest = take_out(left, box)
        covered = sum(common.numel for common in inside)
        if not covered:
            continue  # a larger box that is already taken holds it too
        if covered != box.numel:
            raise UsageError(f"workers hold parts of {name} that overlap", hint="describe the layout with rules")
        chosen[box], left = found[box], rest
    if left:
        what = f"{left[0]} of {name}" if chosen else name
        raise UsageError(f"no worker holds {what}", hint="every part must be saved by somebody")
    return chosen
