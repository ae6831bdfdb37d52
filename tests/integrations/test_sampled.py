"""The order of a loader's own sampler, as a pure function of the epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from holdfast.integrations.sampled import SampledData, order_of


class Told(RandomSampler):
    """A sampler that draws from its seed and the epoch that it is told, and counts on by itself, as accelerate's."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        drawn = torch.randperm(len(self.data_source), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        return iter(drawn)


def loader_of(sampler: Any) -> DataLoader[Any]:
    return DataLoader(range(10), batch_sampler=BatchSampler(sampler, 3, drop_last=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Told, RandomSampler])
def test_an_epoch_has_one_order_however_often_it_is_asked_for(kind: Any) -> None:
    epochs = (0, 1, 5, 0, 2, 1, 0)
    state = torch.random.get_rng_state()
    of_epoch = order_of(loader_of(kind(range(10))), micro_batch=3, seed=0)
    asked = [list(of_epoch(epoch)) for epoch in epochs]
    again = [list(order_of(loader_of(kind(range(10))), micro_batch=3, seed=0)(epoch)) for epoch in epochs]
    assert asked == again
    assert len({tuple(order) for order in asked}) == len(set(epochs))
    assert all(sorted(order) == list(range(10)) for order in asked)
    assert torch.equal(torch.random.get_rng_state(), state), "it draws from numbers of its own"


def test_steps_and_micro_batches_are_those_of_the_loader() -> None:
    data = SampledData.of_loader(loader_of(Told(range(10))), micro_batch=3, seed=0)
    order = data.order(global_batch=6, micro_batch=3, seed=0)
    assert order.steps_per_epoch == 2
    for epoch in range(3):
        batches = [order.samples(2 * epoch + step, i) for step in range(2) for i in range(order.micro_batches(step))]
        Told.epoch = epoch
        assert batches == [*BatchSampler(Told(range(10)), 3, drop_last=False)]
