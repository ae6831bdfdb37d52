"""Who reads what: all data, never the same at the same time, or only one's own."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.data.partition import DefDP, LabelSplit, Partition, SelDP, batches
from holdfast.errors import UsageError

PARTITIONS = [SelDP(size=20), DefDP(size=20), LabelSplit(labels=[n % 4 for n in range(20)])]


class Cut(NamedTuple):
    size: int
    workers: int
    batch: int
    seed: int

    @property
    def steps_per_chunk(self) -> int:
        return math.ceil(math.ceil(self.size / self.workers) / self.batch)

    def read(self, data: Partition, step: int) -> list[list[int]]:
        return [data.samples(step, worker, workers=self.workers, batch=self.batch) for worker in range(self.workers)]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    workers = draw(st.integers(1, 7))
    size = draw(st.integers(workers, 90))
    return Cut(size, workers, draw(st.integers(1, 12)), draw(st.integers(0, 2**40)))


def disjoint(parts: list[list[int]]) -> bool:
    return all(not set(one) & set(other) for one, other in itertools.combinations(parts, 2))


@given(cuts(), st.integers(0, 10**6))
@settings(deadline=None)
def test_selective_workers_never_read_the_same_at_the_same_time(cut: Cut, step: int) -> None:
    read = cut.read(SelDP(size=cut.size, seed=cut.seed), step)
    assert all(len(samples) == cut.batch for samples in read)
    assert all(0 <= sample < cut.size for samples in read for sample in samples)
    assert disjoint(read)


@given(cuts(), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_after_a_round_every_selective_worker_has_read_everything(cut: Cut, turn: int) -> None:
    data = SelDP(size=cut.size, seed=cut.seed)
    start = turn * cut.steps_per_chunk  # from any turn on
    steps = range(start, start + cut.workers * cut.steps_per_chunk)
    for worker in range(cut.workers):
        seen = Counter(s for t in steps for s in data.samples(t, worker, workers=cut.workers, batch=cut.batch))
        assert set(seen) == set(range(cut.size))
        if cut.size % (cut.workers * cut.batch) == 0:
            assert set(seen.values()) == {1}


@given(cuts())
@settings(deadline=None, max_examples=50)
def test_at_each_turn_all_workers_together_read_everything(cut: Cut) -> None:
    data = SelDP(size=cut.size, seed=cut.seed)
    seen = [set[int]() for _ in range(cut.workers)]
    for step in range(cut.steps_per_chunk):
        for mine, samples in zip(seen, cut.read(data, step), strict=True):
            mine |= set(samples)
    assert set().union(*seen) == set(range(cut.size))
    assert sum(map(len, seen)) == cut.size
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@pytest.mark.parametrize("kind", [SelDP, DefDP])
@given(cut=cuts(), step=st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_a_batch_has_a_sample_twice_only_if_it_must(kind: type[SelDP], cut: Cut, step: int) -> None:
    for samples in cut.read(kind(size=cut.size, seed=cut.seed), step):
        assert len(set(samples)) >= min(cut.batch, cut.size // cut.workers)


@given(cuts())
@settings(deadline=None, max_examples=50)
def test_a_plain_worker_reads_its_own_chunk_and_nothing_else(cut: Cut) -> None:
    data = DefDP(size=cut.size, seed=cut.seed)
    early, late = ([set[int]() for _ in range(cut.workers)] for _ in range(2))
    for step in range(cut.steps_per_chunk):
        for worker, samples in enumerate(cut.read(data, step)):
            early[worker] |= set(samples)
    for step in range(7, 7 + 2 * cut.steps_per_chunk):  # two passes, so that one of them is whole
        for worker, samples in enumerate(cut.read(data, step)):
            late[worker] |= set(samples)
    assert early == late
    assert disjoint([list(part) for part in early])
    assert set().union(*early) == set(range(cut.size))


def test_each_visit_to_a_chunk_has_an_order_of_its_own() -> None:
    for data in (SelDP(size=400), DefDP(size=400)):
        visits = [data.samples(step, 0, workers=4, batch=100) for step in (0, 4, 8)]
        assert len({frozenset(visit) for visit in visits}) == 1
        assert len({tuple(visit) for visit in visits}) == 3


def test_seeds_deal_differently() -> None:
    parts = {frozenset(DefDP(size=100, seed=seed).samples(0, 0, workers=4, batch=25)) for seed in (0, 1, 2**32, 2**64)}
    assert len(parts) == 4


def test_a_new_release_must_not_deal_anew() -> None:
    """What was read before, written down."""
    split = LabelSplit(labels=[n % 3 for n in range(1000)], concentration=0.5, seed=3)
    assert SelDP(size=1000, seed=3).samples(17, 2, workers=5, batch=8) == [403, 490, 79, 955, 863, 133, 886, 256]
    assert split.samples(17, 2, workers=5, batch=8) == [75, 99, 380, 348, 612, 366, 129, 641]


@dataclass(frozen=True, kw_only=True)
class EachAtItsOwnPace:
    """Changes chunks when the chunk at hand is through: what comes first to mind, and fails."""

    size: int

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        chunks = [list(range(n * self.size // workers, (n + 1) * self.size // workers)) for n in range(workers)]
        steps = [-(-len(chunk) // batch) for chunk in chunks]
        step %= sum(steps)
        at = worker
        while step >= steps[at]:
            step, at = step - steps[at], (at + 1) % workers
        return [chunks[at][(step * batch + i) % len(chunks[at])] for i in range(batch)]


def test_workers_at_their_own_pace_would_meet() -> None:
    cut = Cut(size=9, workers=2, batch=4, seed=0)
    assert not all(disjoint(cut.read(EachAtItsOwnPace(size=9), step)) for step in range(12))
    assert all(disjoint(cut.read(SelDP(size=9), step)) for step in range(12))


def test_a_plain_worker_never_reads_everything() -> None:
    seen = {sample for step in range(100) for sample in DefDP(size=20).samples(step, 0, workers=4, batch=2)}
    assert len(seen) == 5


@pytest.mark.parametrize("data", PARTITIONS, ids=lambda data: type(data).__name__)
def test_batches_feed_a_loader_from_any_step(data: Partition) -> None:
    sampler = batches(data, worker=1, workers=2, batch=3, start=4)
    loader = DataLoader(list(range(20)), batch_sampler=sampler)  # type: ignore[arg-type, var-annotated]
    for step, batch in zip(range(4, 30), loader, strict=False):
        assert torch.equal(batch, torch.tensor(data.samples(step, 1, workers=2, batch=3)))


@pytest.mark.parametrize("data", PARTITIONS, ids=lambda data: type(data).__name__)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"step": -1}, "step=-1"),
        ({"worker": 4}, "worker=4"),
        ({"worker": -1}, "worker=-1"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 21}, "21 workers"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 2.0}, r"batch=2\.0"),
    ],
)
def test_what_cannot_be_answered_is_refused(data: Partition, place: dict[str, int], said: str) -> None:
    asked = {"step": 0, "worker": 0, "workers": 4, "batch": 2} | place
    with pytest.raises(UsageError, match=said):
        data.samples(asked["step"], asked["worker"], workers=asked["workers"], batch=asked["batch"])
    with pytest.raises(UsageError, match=said):
        batches(data, start=asked.pop("step"), **asked)  # before the first batch is drawn


@pytest.mark.parametrize("kind", [SelDP, DefDP])
def test_no_samples_are_refused(kind: type[SelDP]) -> None:
    with pytest.raises(UsageError, match="size=0"):
        kind(size=0)
    with pytest.raises(UsageError, match="seed=-1"):
        kind(size=1, seed=-1)
