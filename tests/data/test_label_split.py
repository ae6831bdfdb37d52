"""Label-skewed parts: each sample has one owner, and owners have the labels they should."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.partition import LabelSplit
from holdfast.errors import UsageError

TEN = np.arange(1000) % 10


def parts(split: LabelSplit, workers: int) -> list[list[int]]:
    return [split.part(worker, workers=workers) for worker in range(workers)]


def labels_of(split: LabelSplit, labels: Any, workers: int) -> list[set[int]]:
    return [{int(labels[sample]) for sample in part} for part in parts(split, workers)]


@given(
    st.lists(st.integers(0, 5), min_size=8, max_size=60), st.integers(1, 8), st.floats(1e-4, 100), st.integers(0, 99)
)
@settings(deadline=None)
def test_dirichlet_gives_each_sample_to_one_worker_and_none_goes_without(
    labels: list[int], workers: int, concentration: float, seed: int
) -> None:
    dealt = parts(LabelSplit(labels=labels, concentration=concentration, seed=seed), workers)
    assert sorted(sample for part in dealt for sample in part) == list(range(len(labels)))
    assert all(dealt)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
@settings(deadline=None)
def test_round_robin_gives_each_sample_to_one_worker(kinds: int, workers: int, data: st.DataObject) -> None:
    per_worker = data.draw(st.integers(1, kinds))
    labels = data.draw(st.permutations([n % kinds for n in range(kinds * 15)]))
    split = LabelSplit(labels=labels, per_worker=per_worker)
    assert sorted(sample for part in parts(split, workers) for sample in part) == list(range(len(labels)))
    held = [len(kinds_held) for kinds_held in labels_of(split, labels, workers)]
    if kinds <= workers * per_worker:
        assert held == [per_worker] * workers
    else:  # what would be left over is dealt on
        assert sum(held) == kinds
        assert max(held) - min(held) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 10, 16])
def test_the_number_of_workers_may_change(workers: int) -> None:
    held = labels_of(LabelSplit(labels=TEN), TEN, workers)
    assert set().union(*held) == set(range(10))
    assert all(len(mine) <= -(-10 // workers) for mine in held)


def test_those_who_have_the_same_label_share_it_evenly() -> None:
    sizes = [len(part) for part in parts(LabelSplit(labels=[0] * 10, per_worker=1), 4)]
    assert sorted(sizes) in ([2, 2, 3, 3], [2, 2, 2, 4])
    assert sum(sizes) == 10


@pytest.mark.parametrize("split", [LabelSplit(labels=TEN, per_worker=2), LabelSplit(labels=TEN, concentration=0.3)])
def test_a_worker_reads_all_of_its_part_and_nothing_else(split: LabelSplit) -> None:
    for worker in range(3):
        part = split.part(worker, workers=3)
        steps = -(-len(part) // 7)
        for first in (0, 5 * steps):
            read = Counter(s for t in range(first, first + steps) for s in split.samples(t, worker, workers=3, batch=7))
            assert set(read) == set(part)
            assert sum(read.values()) == steps * 7
            assert max(read.values()) <= 2


def test_each_pass_has_an_order_of_its_own() -> None:
    split = LabelSplit(labels=TEN)
    passes = [split.samples(step, 3, workers=10, batch=100) for step in range(3)]
    assert len({frozenset(samples) for samples in passes}) == 1
    assert len({tuple(samples) for samples in passes}) == 3


def skew(split: LabelSplit, workers: int = 5) -> float:
    """The mean share of a worker's most frequent label: 0.1 if labels are spread evenly."""
    shares = []
    for part in parts(split, workers):
        counts = Counter(TEN[part].tolist())
        shares.append(max(counts.values()) / len(part))
    return float(np.mean(shares))


def test_the_smaller_the_concentration_the_more_skewed() -> None:
    mild, strong, extreme = (skew(LabelSplit(labels=TEN, concentration=c)) for c in (1000.0, 0.3, 1e-3))
    assert mild < 0.13 < 0.2 < strong < extreme


def test_shares_have_the_spread_of_a_dirichlet_distribution() -> None:
    """One label's share of a worker: mean 1/N, variance (1/N)(1 − 1/N)/(Nc + 1)."""
    shares = [
        len(LabelSplit(labels=[0] * 500, concentration=0.5, seed=seed).part(0, workers=4)) / 500 for seed in range(400)
    ]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.05)
    assert np.var(shares) == pytest.approx(0.25 * 0.75 / 3, rel=0.25)


def test_a_vanishing_concentration_leaves_a_label_to_one_worker() -> None:
    """NumPy gives nan then."""
    split = LabelSplit(labels=TEN, concentration=1e-300)
    held = labels_of(split, TEN, 3)
    assert sum(map(len, held)) == 10
    assert all(len(mine) > 1 for mine in held)  # owners are drawn: it is not always the same one


@pytest.mark.parametrize(
    "labels", [[2, 5, 2, 5], ("a", "b", "a", "b"), torch.tensor([0, 1, 0, 1]), [torch.tensor(n % 2) for n in range(4)]]
)
def test_labels_may_be_anything_that_has_an_order(labels: Any) -> None:
    split = LabelSplit(labels=labels)
    assert parts(split, 2) == [[0, 2], [1, 3]]
    assert split == LabelSplit(labels=[0, 1, 0, 1], per_worker=1)
    assert hash(split) == hash(LabelSplit(labels=[0, 1, 0, 1]))


def test_other_labels_are_another_split_and_the_text_tells_without_listing_them() -> None:
    one, other = LabelSplit(labels=TEN), LabelSplit(labels=TEN[::-1])
    assert one != other
    assert repr(one) != repr(other)
    assert len(repr(one)) < 120
    assert parts(one, 10) != parts(other, 10)


def test_what_becomes_of_the_list_later_changes_nothing() -> None:
    labels = np.arange(8) % 2
    split = LabelSplit(labels=labels)
    labels[:] = 0
    assert parts(split, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_seeds_deal_differently() -> None:
    assert parts(LabelSplit(labels=TEN, concentration=1.0), 4) != parts(
        LabelSplit(labels=TEN, concentration=1.0, seed=1), 4
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"labels": []}, "labels"),
        ({"labels": [[1, 2], [3, 4]]}, "labels"),
        ({"labels": [0, 1], "per_worker": 3}, "per_worker=3"),
        ({"labels": [0, 1], "per_worker": 0}, "per_worker=0"),
        ({"labels": [0, 1], "concentration": 0.0}, "concentration=0"),
        ({"labels": [0, 1], "concentration": float("nan")}, "concentration=nan"),
        ({"labels": [0, 1], "concentration": float("inf")}, "concentration=inf"),
        ({"labels": [0, 1], "concentration": "much"}, "concentration='much'"),
        ({"labels": [0, 1], "concentration": 1.0, "per_worker": 1}, "per_worker and concentration"),
        ({"labels": [0, 1], "seed": 0.5}, r"seed=0\.5"),
    ],
)
def test_bad_settings_are_refused_in_words(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LabelSplit(**settings)


def test_a_worker_without_samples_is_refused_in_words() -> None:
    split = LabelSplit(labels=[0, 1, 1, 1, 1], per_worker=1)  # of label 0 there is but one, for workers 0 and 2
    assert len(split.samples(0, 0, workers=2, batch=1)) == 1
    with pytest.raises(UsageError, match="per_worker"):
        split.samples(0, 0, workers=4, batch=1)
