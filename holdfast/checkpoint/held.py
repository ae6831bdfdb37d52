"""Parts of a logical tensor that this worker holds, derived from the tensor itself (plain, or a DTensor)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.pieces import Box, Shape, whole
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """A box of a logical tensor, and the memory on this worker that holds it."""

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Held:
    """Parts of a logical tensor that this worker holds: none, all, or some boxes of it.

    ``derived``: the tensor itself says which (a DTensor), so that no rule has to.
    """

    shape: Shape
    dtype: torch.dtype
    parts: tuple[HeldPart, ...]
    derived: bool = False


def held_of(tensor: torch.Tensor, name: str) -> Held:
    """The parts of a tensor on this worker: of a plain tensor the whole, of a DTensor what its placements say.

    ``name`` is for errors: ``UsageError`` if the tensor is sparse, quantized, on the meta device, or laid out so that
    its parts are not boxes.

    >>> held_of(torch.zeros(2, 3), "w").parts[0].box
    Box(offset=(0, 0), shape=(2, 3))
    """
    shape = tuple(tensor.shape)
    if tensor.is_meta:
        raise UsageError(f"{name} is on the meta device: it has no memory", hint="materialise it with to_empty()")
    if not isinstance(tensor, DTensor):
        if tensor.layout is not torch.strided or tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
            kind = tensor.layout if type(tensor) is torch.Tensor else type(tensor).__name__
            raise UsageError(f"{name} is a {kind} tensor", hint="dense tensors and DTensors can be saved")
        return Held(shape=shape, dtype=tensor.dtype, parts=(HeldPart(box=whole(shape), tensor=tensor.detach()),))
    box = _box(tensor, name)
    if box is None or not box.numel:
        return Held(shape=shape, dtype=tensor.dtype, parts=(), derived=True)
    local = tensor.to_local().detach()
    if tuple(local.shape) != box.shape:
        raise UsageError(
            f"this worker has {tuple(local.shape)} of {name} {shape}, but {box.shape} by its placements "
            f"{tensor.placements}",
            hint="give DTensor.from_local the shape of the whole tensor",
        )
    return Held(shape=shape, dtype=tensor.dtype, parts=(HeldPart(box=box, tensor=local),), derived=True)


def _box(tensor: DTensor, name: str) -> Box | None:
    """The box of a DTensor that is on this worker; None if the worker is outside of its mesh."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(f"{name} is a sum that is not complete (Partial)", hint="redistribute it first")
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return None
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for dim in range(tensor.ndim):
        for axis in _axes(tensor, dim, name):
            each = -(-shape[dim] // mesh.size(axis))  # as torch cuts: the first workers have the larger parts
            start = min(each * place[axis], shape[dim])
            offset[dim], shape[dim] = offset[dim] + start, min(each, shape[dim] - start)
    return Box(offset=tuple(offset), shape=tuple(shape))


def _axes(tensor: DTensor, dim: int, name: str) -> Sequence[int]:
    """The axes of the mesh that cut a dimension, in the order in which they do."""
    # Newer DTensors say the order themselves; in older ones, and with strided shards, the split factors tell it.
    known = tensor._spec.shard_order
    strided = any(isinstance(placement, _StridedShard) for placement in tensor.placements)
    if known is not None and not strided:
        return next((entry.mesh_dims for entry in known if entry.tensor_dim == dim), ())
    order = order_of_cuts(tensor.placements, tensor.device_mesh.shape, dim)
    if order is None:
        raise UsageError(
            f"{name} is laid out as {tensor.placements}, which is no order of cuts", hint="redistribute it first"
        )
    return order


def order_of_cuts(placements: Sequence[Any], sizes: Sequence[int], dim: int) -> list[int] | None:
    """The order in which a mesh's axes cut a dimension; None if no order gives these placements.

    FSDP over tensor parallelism cuts what the later axis has already cut. A ``_StridedShard`` says so by its
    split factor: the product of the sizes of the axes that came before it.

    >>> order_of_cuts([_StridedShard(0, split_factor=2), Shard(0)], (3, 2), dim=0)
    [1, 0]
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard | _StridedShard) or placement.dim != dim:
            continue
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        position, product = 0, 1
        while product != factor and position < len(order):
            product *= sizes[order[position]]
            position += 1
        if product != factor:
            return None
        order.insert(position, axis)
    return order
