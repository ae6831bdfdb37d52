"""What this worker holds of a logical tensor: derived from the tensor itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.checkpoint.pieces import Box, Shape, whole
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a logical tensor, and the memory on this worker that holds it."""

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this worker holds of a logical tensor: nothing, all, or some boxes of it."""

    shape: Shape
    dtype: torch.dtype
    parts: tuple[Part, ...]


def held_of(tensor: torch.Tensor, name: str) -> Held:
    """A plain tensor is held whole; of a DTensor each worker holds what its placements say.

    >>> held_of(torch.zeros(2, 3), "w").parts[0].box
    Box(offset=(0, 0), shape=(2, 3))
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UsageError(f"{name} is a {tensor.layout} tensor", hint="only dense tensors can be saved")
        return Held(shape=shape, dtype=tensor.dtype, parts=(Part(box=whole(shape), tensor=tensor.detach()),))
    local = tensor.to_local().detach()
    parts = [Part(box=box, tensor=local[inner.slices()]) for box, inner in _boxes(tensor, name) if box.numel]
    return Held(shape=shape, dtype=tensor.dtype, parts=tuple(parts))


def _boxes(tensor: DTensor, name: str) -> Iterator[tuple[Box, Box]]:
    """Pairs of a box in the logical tensor and the same box in the local one."""
    if tensor.device_mesh.get_coordinate() is None:
        return
    runs = [_runs(tensor, dim, name) for dim in range(tensor.ndim)]
    for chosen in product(*runs):
        shape = tuple(length for _, _, length in chosen)
        yield (
            Box(offset=tuple(start for start, _, _ in chosen), shape=shape),
            Box(offset=tuple(inner for _, inner, _ in chosen), shape=shape),
        )


def _runs(tensor: DTensor, dim: int, name: str) -> list[tuple[int, int, int]]:
    """Consecutive indices of a dimension on this worker, as (first, first in the local tensor, how many).

    Splitting the indices as torch splits the tensor is right for any nesting of shards; where tensor
    parallelism comes before FSDP, a worker may hold several runs.
    """
    indices = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UsageError(f"{name} is a sum that is not complete (Partial)", hint="redistribute it first")
        if not isinstance(placement, Shard | _StridedShard) or placement.dim % tensor.ndim != dim:
            continue
        one = (
            _StridedShard(0, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(0)
        )
        split, _ = one._split_tensor(indices, tensor.device_mesh.size(axis), with_padding=False, contiguous=False)
        indices = split[tensor.device_mesh.get_local_rank(axis)]
    if not len(indices):
        return [(0, 0, 0)]
    breaks = (torch.nonzero(indices[1:] != indices[:-1] + 1).flatten() + 1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, len(indices)]
    return [(int(indices[a]), a, b - a) for a, b in zip(starts, ends, strict=True)]
