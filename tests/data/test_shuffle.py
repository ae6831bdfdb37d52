"""The cheap shuffle: every number once, from anywhere, well mixed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.shuffle import Numbers, permuted

keys = st.integers(0, 2**70)


def numbers(size: int) -> Numbers:
    return np.arange(size, dtype=np.uint64)


@given(st.integers(1, 3000), keys)
@settings(deadline=None)
def test_every_number_comes_once(size: int, key: int) -> None:
    assert sorted(permuted(numbers(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 500), keys, st.data())
@settings(deadline=None)
def test_any_positions_are_found_without_the_rest(size: int, key: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    whole = permuted(numbers(size), size, key)
    assert permuted(np.array(some, dtype=np.uint64), size, key).tolist() == [int(whole[place]) for place in some]


def test_positions_given_stay_as_they_are() -> None:
    given_numbers = numbers(10)
    permuted(given_numbers, 10, 1)
    assert given_numbers.tolist() == list(range(10))


def test_a_million_billion_samples_need_no_table() -> None:
    found = permuted(numbers(1000) + np.uint64(10**15), 2 * 10**15, 1)
    assert len(set(found.tolist())) == 1000
    assert found.max() < 2 * 10**15
    assert 0.4 < found.mean() / (2 * 10**15) < 0.6


def chi_squared(shuffle: Callable[[Numbers, int, int], Numbers], size: int, turns: int) -> float:
    """Per degree of freedom, of who lands where: 1 for a uniform shuffle."""
    counts = np.zeros((size, size))
    for key in range(turns):
        counts[np.arange(size), shuffle(numbers(size), size, key)] += 1
    expected = turns / size
    return float(((counts - expected) ** 2 / expected).sum() / max(1, size - 1) ** 2)


@pytest.mark.parametrize(
    ("size", "turns", "limit"), [(2, 2000, 12.0), (3, 2000, 5.0), (10, 2000, 2.0), (1000, 300, 1.05)]
)
def test_a_number_lands_anywhere_with_the_same_chance(size: int, turns: int, limit: float) -> None:
    assert chi_squared(permuted, size, turns) < limit


def test_neighbours_part() -> None:
    """Where two neighbours land, in tenths of the whole: all pairs of tenths are as likely."""
    counts = np.zeros((10, 10))
    for key in range(40):
        places = (permuted(numbers(1000), 1000, key) // np.uint64(100)).astype(int)
        np.add.at(counts, (places[:-1], places[1:]), 1)
    expected = counts.sum() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 6 * np.sqrt(2 * 99)


def test_the_measure_tells_a_poor_shuffle() -> None:
    def turned_a_little(values: Numbers, size: int, key: int) -> Numbers:
        return (values + np.uint64(key % 3)) % np.uint64(size)

    assert chi_squared(turned_a_little, 10, 2000) > 2
