"""Keeps gradients: parameters are grouped in buckets, and a slab has one gradient of each parameter of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from holdfast.engine.shards import gradient_of, local, split_as

BUCKET_BYTES = 4 * 2**20  # most bytes of a bucket: large enough for full bandwidth, small enough to start early
SMALL_BYTES = 2**18  # no bucket is cut to less: one more message would cost as much time as it hides
ALIGNMENT = 16  # elements; for float32 that is a cache line, on which vector instructions are fastest


@dataclass(eq=False)
class Slab:
    """One gradient of each of a bucket's parameters. ``memory`` has them side by side, if they are to be sent."""

    views: list[torch.Tensor]
    memory: torch.Tensor | None = None
    _wrapped: list[torch.Tensor] | None = None

    def as_gradients_of(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return the views, split as the parameters are; made once, because that takes longer than a small sum."""
        if self._wrapped is None:
            self._wrapped = [split_as(view, p) for p, view in zip(parameters, self.views, strict=True)]
        return self._wrapped

    @property
    def flat(self) -> torch.Tensor:
        """All gradients as one tensor."""
        assert self.memory is not None, "only what is flat can be sent"
        return self.memory


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are sent together, the ranks that sum them, and a pool of slabs for partial sums.

    ``number`` is the same on every worker, whichever buckets it has. ``ranks`` are in the order of their micro-batches.
    """

    number: int
    parameters: list[nn.Parameter]
    ranks: tuple[int, ...] = (0,)
    free: list[Slab] = field(default_factory=list)  # the pool: slabs that nobody uses, kept from step to step
    scratch: torch.Tensor | None = None  # memory to receive others' partial sums into

    def __post_init__(self) -> None:
        self.size = sum(_padded(p) for p in self.parameters)

    def take(self) -> Slab:
        """Take a slab with memory from the pool, or make one. Its values are whatever was left there."""
        if self.free:
            return self.free.pop()
        first = self.parameters[0]
        flat = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        views, start = [], 0
        for p in self.parameters:
            part = local(p)
            views.append(_like(flat[start : start + part.numel()], part))
            start += _padded(p)
        return Slab(views, flat)

    def gather(self) -> Slab:
        """Take the parameters' gradients as they are. A parameter that was not used has a gradient of zero."""
        found = [(p, gradient_of(p)) for p in self.parameters]
        return Slab([torch.zeros_like(local(p)) if grad is None else grad for p, grad in found])

    def flatten(self, slab: Slab) -> Slab:
        """Return the slab's gradients side by side in memory, so that slices of it can be sent."""
        if slab.memory is not None:
            return slab
        flat = self.take()
        torch._foreach_copy_(flat.views, slab.views)
        return flat

    def attach(self, slab: Slab) -> None:
        """Make the slab's values the parameters' gradients."""
        for p, gradient in zip(self.parameters, slab.as_gradients_of(self.parameters), strict=True):
            p.grad = gradient

    def forget(self) -> None:
        """Leave the parameters without gradients."""
        for p in self.parameters:
            p.grad = None

    def add(self, left: Slab, right: Slab) -> Slab:
        """Add ``right`` to ``left`` in place and return that; ``right`` goes back to the pool."""
        torch._foreach_add_(left.views, right.views)
        if right.memory is not None:
            self.free.append(right)
        return left

    def receiving(self, elements: int) -> torch.Tensor:
        """Return memory for what others send. It is kept from step to step."""
        if self.scratch is None or self.scratch.numel() < elements:
            first = self.parameters[0]
            self.scratch = torch.empty(elements, dtype=first.dtype, device=first.device)
        return self.scratch[:elements]


def _like(flat: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the memory as a gradient with the parameter's strides: fused optimizers pair elements by memory."""
    dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return flat.as_strided(p.shape, p.stride()) if dense else flat.view_as(p)


def _padded(p: nn.Parameter) -> int:
    """Return the elements that a parameter takes in a slab, so that the next one is aligned."""
    return -(-local(p).numel() // ALIGNMENT) * ALIGNMENT


def make_buckets(
    groups: Sequence[tuple[tuple[int, ...], Sequence[nn.Parameter]]], limit: int | None = None
) -> list[Bucket]:
    """Group parameters in buckets, in the order in which the backward pass completes them: last parameters first.

    Each of the ``groups`` is ranks, and the parameters that these hold, in the order of the layers. ``limit`` is the
    most bytes of a bucket; by default a quarter of the group, within limits, so that the first sums are under way
    while the rest is computed. A bucket's parameters have one type and one device.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> [bucket.size for bucket in make_buckets([((0,), list(model.parameters()))], limit=80)]
    [32, 32]
    """
    buckets: list[Bucket] = []
    for ranks, parameters in reversed(groups):
        total = sum(local(p).nbytes for p in parameters)
        most = limit or min(BUCKET_BYTES, max(SMALL_BYTES, total // 4))
        grouped: list[list[nn.Parameter]] = []
        open_group: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in reversed(parameters):
            key = (p.dtype, p.device)
            group = open_group.get(key)
            if group is None or sum(local(q).nbytes for q in group) + local(p).nbytes > most:
                group = open_group[key] = []
                grouped.append(group)
            group.append(p)
        buckets += [Bucket(len(buckets) + number, group, ranks) for number, group in enumerate(grouped)]
    return buckets
