"""The order of samples: each once per epoch, from anywhere, well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.order import Order
from holdfast.data.shuffle import shuffled

keys = st.integers(0, 2**70)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    micro_batch = draw(st.integers(1, 6))
    global_batch = micro_batch * draw(st.integers(1, 6))
    size = draw(st.integers(global_batch, 200))
    return Order(size=size, global_batch=global_batch, micro_batch=micro_batch, seed=draw(st.integers(0, 2**32)))


def samples_of_epoch(order: Order, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return [s for step in steps for index in range(order.micro_batches(step)) for s in order.samples(step, index)]


@given(st.integers(1, 3000), keys)
@settings(deadline=None)
def test_a_shuffle_has_every_number_once(size: int, key: int) -> None:
    assert sorted(shuffled(range(size), size, key)) == list(range(size))


@given(st.integers(1, 500), keys, st.data())
@settings(deadline=None)
def test_any_slice_of_a_shuffle_is_found_without_the_rest(size: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert shuffled(range(start, stop), size, key) == shuffled(range(size), size, key)[start:stop]


def test_a_trillion_samples_need_no_table() -> None:
    found = shuffled(range(10**12, 10**12 + 100), 2 * 10**12, key=1)
    assert len(set(found)) == 100
    assert all(0 <= sample < 2 * 10**12 for sample in found)


@given(orders(), st.integers(0, 5))
@settings(deadline=None)
def test_every_sample_is_used_once_per_epoch(order: Order, epoch: int) -> None:
    assert sorted(samples_of_epoch(order, epoch)) == list(range(order.size))


@given(orders())
@settings(deadline=None)
def test_only_the_last_batch_of_an_epoch_and_its_last_micro_batch_may_be_ragged(order: Order) -> None:
    last = order.steps_per_epoch - 1
    assert [order.batch_size(step) for step in range(last)] == [order.global_batch] * last
    assert order.batch_size(last) == order.size - last * order.global_batch
    for step in (0, last):
        sizes = [len(order.samples(step, index)) for index in range(order.micro_batches(step))]
        assert sum(sizes) == order.batch_size(step)
        assert all(size == order.micro_batch for size in sizes[:-1])
        assert 0 < sizes[-1] <= order.micro_batch


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int) -> Order:
        return Order(size=50, global_batch=10, micro_batch=5, seed=seed)

    seen = [samples_of_epoch(order(seed), epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(samples) for samples in seen}) == 25


def test_large_seeds_differ() -> None:
    small, large = (Order(size=50, global_batch=10, micro_batch=5, seed=seed) for seed in (0, 2**32))
    assert samples_of_epoch(small, 0) != samples_of_epoch(large, 0)


def test_without_shuffle_samples_come_in_order() -> None:
    order = Order(size=7, global_batch=4, micro_batch=2, seed=3, shuffle=False)
    assert samples_of_epoch(order, 1) == list(range(7))


@pytest.mark.parametrize(
    ("size", "epochs", "limit"),
    [(10, 2000, 2.0), (64, 1000, 1.15), (1000, 300, 1.05)],
)
def test_a_sample_lands_anywhere_in_the_epoch_with_the_same_chance(size: int, epochs: int, limit: float) -> None:
    """Chi-squared per degree of freedom: 1 for a uniform shuffle; the limits are six deviations or more away."""
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), shuffled(range(size), size, key=epoch)] += 1
    expected = epochs / size
    assert ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2 < limit
