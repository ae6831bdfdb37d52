"""A run's order over a partition: micro-batches belong to workers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.injection import Injection
from holdfast.data.order import BatchedOrder, Batches, Order
from holdfast.data.partition import DefDP, LabelSplit, Partition, SelDP
from holdfast.errors import UsageError


def ordered(partition: Partition, global_batch: int = 16, micro_batch: int = 2) -> BatchedOrder:
    return BatchedOrder(partition=partition, global_batch=global_batch, micro_batch=micro_batch, seed=0)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None)
def test_micro_batches_belong_to_workers_in_turn(workers: int, micro_batch: int, count: int, step: int) -> None:
    data = SelDP(size=97, seed=5)
    order = ordered(data, micro_batch * count, micro_batch).for_workers(workers)
    batch = order.per_worker * micro_batch
    assert order.batch_size(step) == workers * batch == order.micro_batches(step) * micro_batch
    assert order.batch_size(step) <= max(micro_batch * count, workers * micro_batch)
    assert order.micro_batches(step) > count - workers
    for worker in range(workers):
        mine = range(worker * order.per_worker, (worker + 1) * order.per_worker)
        read = [sample for index in mine for sample in order.samples(step, index)]
        assert read == data.samples(step, worker, workers=workers, batch=batch)


def test_it_is_what_an_engine_takes() -> None:
    order: Batches = ordered(SelDP(size=100)).for_workers(4)
    plain: Batches = Order(size=100, global_batch=16, micro_batch=2, seed=0)
    assert (order.size, order.micro_batch, order.seed, order.steps_per_epoch) == (100, 2, 0, plain.steps_per_epoch)
    assert [order.number(0, index) for index in range(order.micro_batches(0))] == list(range(8))


def test_a_label_is_short_and_does_not_tell_the_number_of_workers() -> None:
    order = ordered(Injection(base=LabelSplit(labels=np.arange(10_000) % 10), alpha=0.5, beta=0.5))
    shown = asdict(order.for_workers(4))
    assert shown == asdict(order.for_workers(2))
    assert all(isinstance(value, int | str) for value in shown.values())
    assert len(str(shown)) < 400
    assert {"size", "global_batch", "micro_batch", "seed", "shuffle"} <= set(shown)


def test_labels_tell_partitions_apart() -> None:
    zeros, ones = [0] * 50 + [1] * 50, [0] * 49 + [1] * 51
    partitions: list[Partition] = [SelDP(size=100), SelDP(size=100, seed=1), DefDP(size=100), LabelSplit(labels=zeros)]
    partitions += [LabelSplit(labels=ones), LabelSplit(labels=ones, concentration=1.0)]
    partitions += [Injection(base=part, alpha=0.5, beta=0.5) for part in partitions]
    assert len({str(asdict(ordered(part))) for part in partitions}) == 12


@dataclass(frozen=True)
class Counting:
    asked: list[int]
    size: int = 100
    short: int = 0

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        self.asked.append(worker)
        return [worker] * (batch - self.short)


def test_a_workers_batch_is_worked_out_once() -> None:
    order = ordered(Counting([])).for_workers(2)
    asked = order.partition.asked  # type: ignore[attr-defined]
    asked.clear()
    for _ in range(3):
        for index in range(4, 8):
            assert order.samples(7, index) == [1, 1]
    assert asked == [1]


def test_partitions_that_give_too_little_are_refused() -> None:
    with pytest.raises(UsageError, match=r"15 samples.*16"):
        ordered(Counting([], short=1))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: ordered(SelDP(size=5), 4, 8), "micro_batch="),
        (lambda: ordered(SelDP(size=5), 4, 0), "micro_batch="),
        (lambda: ordered(SelDP(size=5)).for_workers(6), "6 workers"),
        (lambda: ordered(SelDP(size=5)).for_workers(0), "workers=0"),
        (lambda: ordered(LabelSplit(labels=[0, 1, 1, 1, 1])).for_workers(4), "per_worker"),
        (lambda: ordered(Injection(base=SelDP(size=5), alpha=1, beta=1), 2, 1).for_workers(2), "batch"),
    ],
)
def test_what_cannot_be_is_refused_at_once(made: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made()


def test_it_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ordered(SelDP(size=5)).global_batch = 3  # type: ignore[misc]
