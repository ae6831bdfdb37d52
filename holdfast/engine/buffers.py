"""Buffers that forward passes change, in fast mode: made equal on all workers after each step.

It is the rule for buffers of which nothing is known. Running statistics, and buffers whose module tells how they are
combined, do not come here: ``engine/statistics.py`` takes them aside, in both modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from holdfast.cluster.group import Group
from holdfast.engine.guard import Guard, Guarded
from holdfast.errors import UsageError
from holdfast.plan.layout import Layout


class ChangingBuffers:
    """The buffers of a model in fast mode: equal on all workers after a step, and as before if the step is dropped.

    Any layer may change its buffers in a forward pass. A copy of every buffer is kept for steps that
    are dropped. To buffers that changed on some worker the mean of the changes is added, over the workers that have
    computed; counters and other integers become the first one's.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._copies: dict[int, tuple[Guarded, torch.Tensor]] = {}  # by id
        self._changed: list[Guarded] = []  # in the current attempt
        self._is_open = False  # an attempt was begun, and neither kept nor undone

    def begin(self, renewed: Iterable[Guarded]) -> None:
        """Remember the buffers before an attempt. ``renewed``: what has got new values since the last one."""
        for each in renewed:
            if each.kind == "buffer":
                self._copies[id(each)] = (each, each.tensor.detach().clone())
        self._copies = {key: kept for key, kept in self._copies.items() if self._guard.is_held(kept[0])}
        self._changed, self._is_open = [], True

    @torch.no_grad()
    def note(self, changed: Iterable[Guarded]) -> None:
        """Note which buffers the attempt has changed. One that was replaced keeps its place, with the new values.

        Raises ``UsageError`` for a new buffer of another shape or dtype.
        """
        self._changed = list(changed)
        for each in self._changed:
            for place, key in each.places:
                new = place.get(key)
                if new is each.tensor:
                    continue
                if new is None or (new.shape, new.dtype) != (each.tensor.shape, each.tensor.dtype):
                    raise UsageError(
                        f"the forward pass replaces buffer '{each.name}' by one of another shape or type",
                        hint="keep a buffer's shape and type",
                    )
                each.tensor.copy_(new)
                place[key] = each.tensor

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what the forward passes of a dropped attempt have changed."""
        if self._is_open:
            for each, old in self._copies.values():
                if not self._guard.is_held(each):
                    continue
                for place, key in each.places:
                    place[key] = each.tensor
                each.tensor.copy_(old)
        self._changed, self._is_open = [], False

    def keep(self) -> None:
        """Keep the new values: the attempt was applied."""
        self._guard.accept(self._changed)
        self._changed, self._is_open = [], False

    @torch.no_grad()
    def agree(self, group: Group, layout: Layout, shares: Sequence[range]) -> None:
        """Make the buffers that changed on some worker equal on all that hold them.

        ``shares``: the micro-batches of each rank. May raise ``Broken``.
        """
        buffers = self._guard.buffers
        if not buffers or group.size == 1:
            return
        mine = {id(each) for each in self._changed}
        flags = torch.tensor([float(id(each) in mine) for each in buffers], device=buffers[0].tensor.device)
        group.sum(flags)
        together: dict[tuple[tuple[int, ...], bool, torch.dtype], list[Guarded]] = {}
        for each, flag in zip(buffers, flags.tolist(), strict=True):
            layers = range(layout.layers) if each.unit is None else each.unit.layers
            ranks = tuple(sorted({rank for layer in layers for rank in layout.holders(layer)}))
            if flag and group.rank in ranks:
                is_float = each.tensor.is_floating_point() or each.tensor.is_complex()
                together.setdefault((ranks, is_float, each.tensor.dtype), []).append(each)
        for (ranks, is_float, _), some in together.items():
            computing = [rank for rank in ranks if shares[rank]] or list(ranks)
            tensors = [each.tensor for each in some]
            if is_float:
                _add_mean_change(group, ranks, computing, tensors, [self._copies[id(each)][1] for each in some])
            else:
                _take_first(group, ranks, computing, tensors)


def _add_mean_change(
    group: Group,
    ranks: Sequence[int],
    computing: Sequence[int],
    tensors: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
) -> None:
    """Give all ranks the tensors of one dtype as they were before, plus the mean of the changes of those that computed.

    It is the mean of the tensors, but for rounding: what all have changed alike stays exactly that.
    """
    now, old = _flat(tensors), _flat(before)
    old = old.masked_fill(~old.isfinite(), 0.0)  # the mean of infinite numbers is infinite, not NaN
    change = now - old if group.rank in computing else torch.zeros_like(now)
    group.sum(change, ranks)
    mean = old + change / len(computing)
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    for tensor, part in zip(real, mean.split_with_sizes([tensor.numel() for tensor in real]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return floating-point tensors of one dtype as one, of at least 32 bits; complex numbers as pairs."""
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in real])
    return flat if flat.dtype == torch.float64 else flat.float()


def _take_first(group: Group, ranks: Sequence[int], computing: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors of one dtype on all ranks by those of the first rank that has computed."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    content = flat.view(torch.uint8)
    if group.rank != computing[0]:
        content.zero_()  # the sum is then the first one's
    group.sum(content, ranks)
    for tensor, part in zip(tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
