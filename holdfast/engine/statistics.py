"""Running statistics (BatchNorm): refused in exact mode, kept equal on all workers in fast mode."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.cluster.group import Group
from holdfast.engine.model import LayeredModel
from holdfast.errors import UsageError
from holdfast.plan.layout import Layout


def layer_with_running_statistics(module: nn.Module) -> str | None:
    """Return the name of the first submodule that keeps running statistics; None if there is none.

    >>> layer_with_running_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    '1'
    """
    for name, layer in module.named_modules():
        if getattr(layer, "running_mean", None) is not None:
            return name
    return None


def refuse_running_statistics(module: nn.Module) -> None:
    """Raise ``UsageError`` if a module keeps running statistics.

    They depend on which micro-batches a worker has seen, so in exact mode they would depend on the layout.
    """
    name = layer_with_running_statistics(module)
    if name is not None:
        layer = module.get_submodule(name)
        raise UsageError(
            f"layer '{name}' ({type(layer).__name__}) keeps running statistics, which depend on who "
            "computes which micro-batch",
            hint="use GroupNorm or LayerNorm, or track_running_stats=False, or numerics='fast'",
        )


class RunningStatistics:
    """The running statistics of a model in fast mode: equal on all workers after a step, restored if it is redone."""

    def __init__(self, model: LayeredModel) -> None:
        self._has_any = layer_with_running_statistics(model.module) is not None
        self._model = model
        self._before: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def begin(self) -> None:
        """Remember the statistics before an attempt."""
        if self._has_any:
            held = [unit for unit in self._model.units if self._model.is_held(unit)]
            self._before = [(buffer, buffer.clone()) for unit in held for buffer in unit.buffers]

    def restore(self) -> None:
        """Undo what the forward passes of a dropped attempt have changed."""
        if self._before is not None:
            for buffer, old in self._before:
                buffer.copy_(old)
            self._before = None

    def agree(self, group: Group, layout: Layout) -> None:
        """Average each layer's floating-point statistics over its holders; take counters from the first holder."""
        if not self._has_any:
            return
        for unit in self._model.units:
            ranks = sorted({rank for layer in unit.layers for rank in layout.holders(layer)})
            if group.rank not in ranks:
                continue
            for buffer in unit.buffers:
                if buffer.is_floating_point():
                    buffer.div_(len(ranks))
                elif group.rank != ranks[0]:
                    buffer.zero_()  # the sum is then the first holder's
                group.sum(buffer, ranks)

    def keep(self) -> None:
        """Keep the new statistics: the attempt was applied."""
        self._before = None
