"""Shards: the local parts of tensors that a team has split among its ranks (``DTensor``), and what they make together.

The engine sums, sends and updates what this process has. So it takes the local part of each tensor, which is the tensor
itself where nothing is split.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.errors import UsageError


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has: writing into it writes into the tensor.

    >>> x = torch.zeros(2)
    >>> local(x) is x
    True
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. All ranks of the team call it alike."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def split_as(part: Tensor, other: Tensor) -> Tensor:
    """Return the tensor whose local part is ``part``, split as ``other`` is."""
    if not isinstance(other, DTensor):
        return part
    return DTensor.from_local(
        part, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )


def gradient_of(p: Tensor) -> Tensor | None:
    """Return the local part of a parameter's gradient. Raises ``UsageError`` if it is not split as the parameter is."""
    grad = p.grad
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        raise UsageError(
            f"a parameter is laid out as {p.placements} in its team, and its gradient as {grad.placements}",
            hint="give the gradient the parameter's placements (a hook with grad.redistribute), or split it otherwise",
        )
    return None if grad is None else local(grad)


def tells(p: Tensor) -> bool:
    """Return whether this rank counts its part of a parameter in sums over the team: others may have the same part."""
    if not isinstance(p, DTensor):
        return False
    place = p.device_mesh.get_coordinate()
    assert place is not None, "this rank is in the mesh of its model"
    return all(at == 0 or placement.is_shard() for at, placement in zip(place, p.placements, strict=True))


def is_split(module: nn.Module) -> bool:
    """Return whether some tensor of a module is laid out over a mesh."""
    return any(isinstance(tensor, DTensor) for tensor in [*module.parameters(), *module.buffers()])


def put_back(module: nn.Module) -> None:
    """Give up the whole weights that FSDP2 keeps after a forward pass: the module then has its own parameters again."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported: the script has no such module
    for each in module.modules() if fsdp is not None else ():
        if isinstance(each, fsdp.FSDPModule):
            each.reshard()


def norms_of_team(parts: Sequence[Sequence[float]]) -> list[float]:
    """Return the norm of each gradient, from those of its parts on each rank.

    >>> norms_of_team([[3.0, 1.0], [4.0, 0.0]])
    [5.0, 1.0]
    """
    return [sum(part * part for part in each) ** 0.5 for each in zip(*parts, strict=True)]
