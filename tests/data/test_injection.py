"""Injection: batches keep their size, and what some share is in everybody's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.injection import Injection
from holdfast.data.partition import DefDP, LabelSplit, SelDP
from holdfast.errors import UsageError

LABELS = np.arange(400) % 4

fractions = st.floats(0.01, 1)


@given(fractions, fractions, st.integers(2, 9), st.integers(2, 40), st.integers(0, 10**4))
@settings(deadline=None)
def test_every_batch_is_whole_and_has_its_own_and_what_is_shared(
    alpha: float, beta: float, workers: int, batch: int, step: int
) -> None:
    base = DefDP(size=200, seed=1)
    data = Injection(base=base, alpha=alpha, beta=beta)
    own, sharers, each = data.amounts(workers=workers, batch=batch)
    assert own + sharers * each == batch
    assert 1 <= each <= own
    shared = data.shared(step, workers=workers, batch=batch)
    assert len(shared) == sharers
    for worker in range(workers):
        samples = data.samples(step, worker, workers=workers, batch=batch)
        assert len(samples) == batch
        mine = base.samples(step, worker, workers=workers, batch=own)
        assert samples[:own] == mine
        for one, some in shared.items():
            assert set(some) <= set(samples)
            assert some == base.samples(step, one, workers=workers, batch=own)[:each]


@given(fractions, fractions, st.integers(2, 64), st.integers(2, 512))
@settings(deadline=None)
def test_amounts_are_the_papers_but_for_whole_numbers(alpha: float, beta: float, workers: int, batch: int) -> None:
    own, sharers, each = Injection(base=SelDP(size=9), alpha=alpha, beta=beta).amounts(workers=workers, batch=batch)
    if alpha * workers >= 1 and sharers < batch - 1:
        assert abs(sharers - alpha * workers) <= 0.5
    fair = beta * batch / (1 + beta * sharers)
    if fair >= 1 and each < batch // (sharers + 1):
        assert abs(each - fair) <= 0.5
        assert abs(own - batch / (1 + beta * sharers)) <= sharers / 2 + 1e-6


def test_the_papers_rule_worked_out() -> None:
    """16 workers, (α, β) = (0.5, 0.5), b = 32: b' = 32 / (1 + 4) = 6.4, of which 3.2 go to all from 8 workers."""
    assert Injection(base=SelDP(size=99), alpha=0.5, beta=0.5).amounts(workers=16, batch=32) == (8, 8, 3)


def test_no_sample_comes_twice_in_a_batch_while_there_are_others() -> None:
    data = Injection(base=DefDP(size=400), alpha=0.5, beta=0.5)
    for step in range(60):  # several passes: their ends are where samples could meet again
        for worker in range(4):
            assert len(set(data.samples(step, worker, workers=4, batch=16))) == 16


def test_a_worker_still_reads_all_of_its_own() -> None:
    split = LabelSplit(labels=LABELS)
    data = Injection(base=split, alpha=0.25, beta=0.5)
    steps = -(-100 // data.amounts(workers=4, batch=12).own)
    seen = {sample for step in range(steps) for sample in data.samples(step, 2, workers=4, batch=12)}
    assert set(split.part(2, workers=4)) <= seen


def kinds_seen(data: Any) -> int:
    """How many labels a worker meets in 40 steps."""
    return len({int(LABELS[s]) for step in range(40) for s in data.samples(step, 0, workers=4, batch=12)})


def test_workers_meet_labels_that_they_do_not_have() -> None:
    split = LabelSplit(labels=LABELS)
    assert kinds_seen(split) == 1  # without injection: its own
    assert kinds_seen(Injection(base=split, alpha=0.25, beta=0.5)) == 4


def test_all_workers_share_equally_often_and_draws_differ_by_seed() -> None:
    def drawn(seed: int, steps: int) -> list[int]:
        data = Injection(base=DefDP(size=50), alpha=0.4, beta=0.5, seed=seed)
        return [worker for step in range(steps) for worker in data.shared(step, workers=5, batch=4)]

    counts = Counter(drawn(0, steps=500))
    assert sum(counts.values()) == 1000
    assert all(abs(counts[worker] - 200) < 6 * np.sqrt(500 * 0.4 * 0.6) for worker in range(5))
    assert drawn(0, steps=20) != drawn(1, steps=20)


def test_alone_a_worker_reads_its_own() -> None:
    base = SelDP(size=30)
    data = Injection(base=base, alpha=1.0, beta=1.0)
    assert data.samples(3, 0, workers=1, batch=7) == base.samples(3, 0, workers=1, batch=7)
    assert data.shared(3, workers=1, batch=7) == {}


def test_a_part_smaller_than_a_batch_is_read_again() -> None:
    data = Injection(base=DefDP(size=3), alpha=1.0, beta=1.0)
    assert all(len(data.samples(step, worker, workers=3, batch=8)) == 8 for step in range(5) for worker in range(3))


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), True, "half", None])
def test_fractions_outside_are_refused_in_words(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name}={value!r}"):
        Injection(**{"base": SelDP(size=9), "alpha": 0.5, "beta": 0.5, name: value})


def test_a_batch_of_one_is_refused_in_words() -> None:
    data = Injection(base=SelDP(size=9), alpha=0.5, beta=0.5)
    with pytest.raises(UsageError, match="batch"):
        data.samples(0, 0, workers=2, batch=1)
    with pytest.raises(UsageError, match="worker=2"):
        data.samples(0, 2, workers=2, batch=4)
