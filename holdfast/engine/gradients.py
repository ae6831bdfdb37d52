"""Where gradients are kept: parameters in buckets, and for each bucket slabs that can be added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

BUCKET_BYTES = 4 * 2**20


@dataclass(eq=False)
class Slab:
    """One flat gradient of a bucket, and its parameters' views into it."""

    flat: torch.Tensor
    views: list[torch.Tensor]


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together, with a pool of slabs for partial sums."""

    number: int
    parameters: list[nn.Parameter]
    free: list[Slab] = field(default_factory=list)
    scratch: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.size = sum(p.numel() for p in self.parameters)

    def take(self) -> Slab:
        if self.free:
            return self.free.pop()
        first = self.parameters[0]
        flat = torch.empty(self.size, dtype=first.dtype, device=first.device)
        views, start = [], 0
        for p in self.parameters:
            views.append(flat[start : start + p.numel()].view_as(p))
            start += p.numel()
        return Slab(flat, views)

    def give_back(self, slabs: Sequence[Slab]) -> None:
        self.free.extend(slabs)

    def attach(self, slab: Slab) -> None:
        """From now on the backward pass adds this bucket's gradients to ``slab``."""
        for p, view in zip(self.parameters, slab.views, strict=True):
            p.grad = view

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


def make_buckets(parameters: Sequence[nn.Parameter], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets in the order in which the backward pass completes them: last parameters first.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> [bucket.size for bucket in make_buckets(list(model.parameters()), limit=80)]
    [20, 20]
    """
    grouped: list[list[nn.Parameter]] = []
    open_group: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in reversed(parameters):
        key = (p.dtype, p.device)
        group = open_group.get(key)
        if group is None or sum(q.nbytes for q in group) + p.nbytes > limit:
            group = open_group[key] = []
            grouped.append(group)
        group.append(p)
    return [Bucket(number, group) for number, group in enumerate(grouped)]
