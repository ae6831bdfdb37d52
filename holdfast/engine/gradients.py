"""Where gradients are kept: parameters in buckets, and for each bucket slabs that can be added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

BUCKET_BYTES = 4 * 2**20
SMALL_BYTES = 2**18  # below this, a message more costs as much as it hides
ALIGNMENT = 16  # elements: a cache line of float32


@dataclass(eq=False)
class Slab:
    """A gradient of each of a bucket's parameters, which may lie side by side, as they are sent."""

    views: list[torch.Tensor]
    memory: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        assert self.memory is not None, "only what is flat can be sent"
        return self.memory


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together, who sums them, and a pool of slabs for partial sums.

    ``number`` is the same on every worker, whichever buckets it has; ``ranks`` are in the order of their micro-batches.
    """

    number: int
    parameters: list[nn.Parameter]
    ranks: tuple[int, ...] = (0,)
    free: list[Slab] = field(default_factory=list)
    scratch: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.size = sum(_padded(p) for p in self.parameters)

    def take(self) -> Slab:
        if self.free:
            return self.free.pop()
        first = self.parameters[0]
        flat = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        views, start = [], 0
        for p in self.parameters:
            views.append(_like(flat[start : start + p.numel()], p))
            start += _padded(p)
        return Slab(views, flat)

    def gather(self) -> Slab:
        """Takes the parameters' gradients as they are; one that was not used has a gradient of zero."""
        return Slab([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])

    def flatten(self, slab: Slab) -> Slab:
        """Side by side, so that slices can be sent."""
        if slab.memory is not None:
            return slab
        flat = self.take()
        torch._foreach_copy_(flat.views, slab.views)
        return flat

    def attach(self, slab: Slab) -> None:
        """Makes the slab the parameters' gradients."""
        for p, view in zip(self.parameters, slab.views, strict=True):
            p.grad = view

    def forget(self) -> None:
        for p in self.parameters:
            p.grad = None

    def add(self, left: Slab, right: Slab) -> Slab:
        torch._foreach_add_(left.views, right.views)
        if right.memory is not None:
            self.free.append(right)
        return left

    def receiving(self, elements: int) -> torch.Tensor:
        """Room for what others send, kept from step to step."""
        if self.scratch is None or self.scratch.numel() < elements:
            first = self.parameters[0]
            self.scratch = torch.empty(elements, dtype=first.dtype, device=first.device)
        return self.scratch[:elements]


def _like(flat: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """The memory as a gradient that lies as its parameter: fused optimizers pair the two by memory, not by index."""
    dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return flat.as_strided(p.shape, p.stride()) if dense else flat.view_as(p)


def _padded(p: nn.Parameter) -> int:
    """Elements a parameter takes in a slab: vector instructions are slower on unaligned memory."""
    return -(-p.numel() // ALIGNMENT) * ALIGNMENT


def make_buckets(
    groups: Sequence[tuple[tuple[int, ...], Sequence[nn.Parameter]]], limit: int | None = None
) -> list[Bucket]:
    """Buckets in the order in which the backward pass completes them: last parameters first.

    A group is parameters in order, and the ranks that hold them. A small one is cut too, so that the first sums are
    under way while the rest is computed.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> [bucket.size for bucket in make_buckets([((0,), list(model.parameters()))], limit=80)]
    [32, 32]
    """
    buckets: list[Bucket] = []
    for ranks, parameters in reversed(groups):
        total = sum(p.nbytes for p in parameters)
        most = limit or min(BUCKET_BYTES, max(SMALL_BYTES, total // 4))
        grouped: list[list[nn.Parameter]] = []
        open_group: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in reversed(parameters):
            key = (p.dtype, p.device)
            group = open_group.get(key)
            if group is None or sum(q.nbytes for q in group) + p.nbytes > most:
                group = open_group[key] = []
                grouped.append(group)
            group.append(p)
        buckets += [Bucket(len(buckets) + number, group, ranks) for number, group in enumerate(grouped)]
    return buckets
