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
    """One flat gradient of a bucket, and its parameters' views into it."""

    flat: torch.Tensor
    views: list[torch.Tensor]


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
            views.append(flat[start : start + p.numel()].view_as(p))
            start += _padded(p)
        return Slab(flat, views)

    def gather(self) -> Slab:
        """Copies the parameters' gradients into a slab; one that was not used has a gradient of zero."""
        slab = self.take()
        pairs = zip(slab.views, self.parameters, strict=True)
        used = [(view, p.grad) for view, p in pairs if p.grad is not None]
        if len(used) < len(self.parameters):
            slab.flat.zero_()
        if used:
            torch._foreach_copy_([view for view, _ in used], [grad for _, grad in used])
        return slab

    def attach(self, slab: Slab) -> None:
        """Makes the slab the parameters' gradients."""
        for p, view in zip(self.parameters, slab.views, strict=True):
            p.grad = view

    def forget(self) -> None:
        for p in self.parameters:
            p.grad = None

    def add(self, left: Slab, right: Slab) -> Slab:
        left.flat.add_(right.flat)
        self.free.append(right)
        return left

    def receiving(self, elements: int) -> torch.Tensor:
        """Room for what others send, kept from step to step."""
        if self.scratch is None or self.scratch.numel() < elements:
            first = self.parameters[0]
            self.scratch = torch.empty(elements, dtype=first.dtype, device=first.device)
        return self.scratch[:elements]


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
