"""Running statistics: refused by name in exact mode, equal on all workers in fast mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.statistics import RunningStatistics, refuse_running_statistics
from holdfast.errors import UsageError
from tests.engine.memory_group import on_workers


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_a_layer_with_running_statistics_is_refused_by_its_name(norm: nn.Module) -> None:
    with pytest.raises(UsageError, match=rf"'1\.0' \({type(norm).__name__}\).*GroupNorm"):
        refuse_running_statistics(nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm)))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)]
)
def test_layers_without_running_statistics_are_welcome(norm: nn.Module) -> None:
    refuse_running_statistics(nn.Sequential(norm))


def test_a_redone_step_starts_from_the_old_statistics() -> None:
    norm = nn.BatchNorm1d(2)
    statistics = RunningStatistics(norm)
    statistics.begin()
    norm(torch.randn(4, 2) + 5)
    statistics.restore()  # the attempt broke
    assert norm.running_mean.tolist() == [0.0, 0.0]
    statistics.begin()
    norm(torch.randn(4, 2) + 5)
    statistics.keep()
    kept = norm.running_mean.clone()
    statistics.restore()
    assert torch.equal(norm.running_mean, kept)


def test_workers_agree_on_the_mean_of_their_statistics_and_on_the_count() -> None:
    def work(group: Any) -> tuple[list[float], int]:
        norm = nn.BatchNorm1d(2)
        statistics = RunningStatistics(norm)
        statistics.begin()
        for _ in range(group.rank + 1):
            norm(torch.full((4, 2), float(group.rank)))
        norm.running_mean.fill_(float(group.rank))
        statistics.agree(group)
        return norm.running_mean.tolist(), int(norm.num_batches_tracked)

    assert on_workers(3, work) == [([1.0, 1.0], 1)] * 3
