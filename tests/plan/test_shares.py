"""Shares are consecutive, complete and equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.shares import shares

micro_batches, workers = st.integers(0, 100), st.integers(1, 20)


@given(micro_batches, workers)
def test_every_micro_batch_has_one_worker_and_the_shares_are_consecutive(micro_batches: int, workers: int) -> None:
    parts = shares(micro_batches, workers)
    assert len(parts) == workers
    assert [index for share in parts for index in share] == list(range(micro_batches))


@given(micro_batches, workers)
def test_no_worker_has_two_more_than_another(micro_batches: int, workers: int) -> None:
    sizes = [len(share) for share in shares(micro_batches, workers)]
    assert max(sizes) - min(sizes) <= 1
