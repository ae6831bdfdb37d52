"""Buffers of which nothing is known, in fast mode: equal on all workers after a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.engine.buffers import ChangingBuffers
from holdfast.engine.guard import Guard
from holdfast.engine.model import LayeredModel
from holdfast.plan.layout import Layout, PlacedPipeline, side_by_side
from tests.engine.memory_group import on_workers


def model_of(*layers: nn.Module) -> LayeredModel:
    return LayeredModel([nn.Linear(2, 2), *layers], seed=0, device=torch.device("cpu"))


class Buffers:
    """Buffers of a model, guarded as an engine does it."""

    def __init__(self, model: LayeredModel) -> None:
        self.guard = Guard(model, trained=True)
        self.changing = ChangingBuffers(self.guard)

    def begin(self) -> None:
        self.changing.begin(self.guard.begin())

    def agree(self, group: Any, layout: Layout, shares: list[range] | None = None) -> None:
        self.changing.note(self.guard.changed())
        self.changing.agree(group, layout, shares or [range(1)] * group.size)


def test_a_redone_step_starts_from_the_old_statistics() -> None:
    norm = nn.BatchNorm1d(2)
    statistics = Buffers(model_of(norm))
    statistics.begin()
    norm(torch.randn(4, 2) + 5)
    statistics.changing.restore()  # the attempt broke
    assert norm.running_mean.tolist() == [0.0, 0.0]
    statistics.begin()
    norm(torch.randn(4, 2) + 5)
    statistics.changing.keep()
    kept = norm.running_mean.clone()
    statistics.changing.restore()
    assert torch.equal(norm.running_mean, kept)


def test_workers_agree_on_the_mean_of_their_statistics_and_on_the_count() -> None:
    def work(group: Any) -> tuple[list[float], int]:
        norm = nn.BatchNorm1d(2)
        statistics = Buffers(model_of(norm))
        statistics.begin()
        for _ in range(group.rank + 1):
            norm(torch.full((4, 2), float(group.rank)))
        norm.running_mean.fill_(float(group.rank))
        statistics.agree(group, side_by_side(2, 3))
        return norm.running_mean.tolist(), int(norm.num_batches_tracked)

    assert on_workers(3, work) == [([1.0, 1.0], 1)] * 3


def test_in_pipelines_a_layers_holders_agree_among_themselves() -> None:
    """Layer 1 is held by ranks 0 and 2, layer 2 by ranks 1 and 2; rank 3 has nothing to do."""
    lines = (
        PlacedPipeline(ranks=(0, 1), layers=(range(2), range(2, 3))),
        PlacedPipeline(ranks=(2,), layers=(range(3),)),
    )
    layout = Layout(pipelines=lines, size=4, layers=3, tolerate=1, minimum=1, reason="")

    def work(group: Any) -> list[list[float]]:
        norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
        model = model_of(*norms)
        role = layout.role(group.rank)
        model.release(set(range(3)) - set(role.layers if role else ()))
        statistics = Buffers(model)
        statistics.begin()
        for norm, layer in zip(norms, (1, 2), strict=True):
            if role and layer in role.layers:
                norm.running_mean.fill_(float(group.rank))
        statistics.agree(group, layout)
        return [norm.running_mean.tolist() for norm, n in zip(norms, (1, 2), strict=True) if role and n in role.layers]

    assert on_workers(4, work) == [[[1.0, 1.0]], [[1.5, 1.5]], [[1.0, 1.0], [1.5, 1.5]], []]
