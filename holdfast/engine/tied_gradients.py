"""Sums the gradients of tied weights: weights that several layers share, maybe on several workers.

Each layer that uses such a weight has a leaf of its own for it (``tied_weights.alias_shared``), with a gradient that
has been summed over the micro-batches like any other. Here these gradients are added up, in the order of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.cluster.talk import Transfer
from holdfast.engine.boundary import like
from holdfast.engine.model import LayeredModel
from holdfast.engine.pipe import describe
from holdfast.log.record import Recorder
from holdfast.plan.layout import Layout
from holdfast.plan.log_choice import Tie


@dataclass(frozen=True, kw_only=True)
class Use:
    """A layer that uses a tied weight, and its own leaf of it."""

    layer: int
    leaf: nn.Parameter


class Ties:
    """The tied weights of a model that are trained: each with its uses, in the order of the layers."""

    def __init__(self, model: LayeredModel) -> None:
        aliases = {id(alias): primary for alias, primary in model.aliases}
        found: dict[int, tuple[nn.Parameter, list[Use]]] = {}
        tied = {id(primary) for primary in aliases.values()}
        for number, layer in enumerate(model.layers):
            for leaf in layer.parameters():
                weight = aliases.get(id(leaf), leaf)
                if id(weight) in tied and weight.requires_grad:
                    found.setdefault(id(weight), (weight, []))[1].append(Use(layer=number, leaf=leaf))
        self.weights = list(found.values())
        self.described = [
            Tie(layers=tuple(use.layer for use in uses), bytes=weight.nbytes) for weight, uses in self.weights
        ]

    def add_up(self, group: Group, layout: Layout, recorder: Recorder | None = None) -> None:
        """Give each weight the sum of its uses' gradients, on every worker that holds one of the uses.

        All workers call this, after the reduction. ``recorder`` logs gradients for the replay of a lost worker. Raises
        ``Broken`` if the generation ends.
        """
        for number, (weight, uses) in enumerate(self.weights):
            if recorder is not None:
                self._record(group, layout, recorder, number)
            users = sorted({rank for use in uses for rank in layout.holders(use.layer)})
            if group.rank in users:
                weight.grad = like(self._total(group, layout, weight, uses, users), weight.stride())
                for use in uses:
                    if use.leaf is not weight:
                        use.leaf.grad = None

    def forget(self) -> None:
        """Leave tied weights without gradients.

        Buckets cannot do that: on a worker that holds a later use, the weight itself is in none of its buckets.
        """
        for weight, _ in self.weights:
            weight.grad = None

    def _record(self, group: Group, layout: Layout, recorder: Recorder, number: int) -> None:
        """Log the uses' gradients, where a lost worker could be replayed without the workers of the other uses."""
        if self.described[number].is_cut(recorder.logged):
            for use in self.weights[number][1]:
                if group.rank == layout.holders(use.layer)[0]:
                    recorder.tie(use.layer, number, describe(use.leaf.grad))

    def _total(
        self, group: Group, layout: Layout, weight: nn.Parameter, uses: list[Use], users: list[int]
    ) -> torch.Tensor:
        """Exchange the uses' gradients among ``users``, the ranks that hold one; return their sum."""
        sums: list[torch.Tensor] = []
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        for use in uses:
            holders = layout.holders(use.layer)
            for rank in users:
                if rank in holders:
                    continue
                source = holders[rank % len(holders)]  # all holders have the same sum: take turns at sending it
                if source == group.rank:
                    assert use.leaf.grad is not None
                    sends.append((rank, use.leaf.grad.contiguous(), tags.TIE))
                elif rank == group.rank:
                    receives.append((source, torch.empty_like(weight, memory_format=torch.contiguous_format), tags.TIE))
            if group.rank in holders:
                assert use.leaf.grad is not None
                sums.append(use.leaf.grad)
            else:
                sums.append(receives[-1][1])
        if sends or receives:
            group.finish(group.start(sends, receives))
        total = sums[0]
        for more in sums[1:]:
            total = total + more  # not in place: the first is being sent
        return total
