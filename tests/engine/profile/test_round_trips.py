"""Links: what is computed from trips, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import tags
from holdfast.engine.profile import round_trips
from holdfast.engine.profile.round_trips import quick_link
from holdfast.plan.profile import Link
from tests.engine.memory_group import on_workers


@given(latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e12))
@settings(deadline=None)
def test_a_link_that_keeps_to_the_formula_is_found(latency: float, bandwidth: float) -> None:
    link = round_trips.fit({size: latency + size / bandwidth for size in round_trips.SIZES})
    assert link.latency == pytest.approx(latency, rel=1e-3)
    assert link.seconds(32 << 20) == pytest.approx(latency + (32 << 20) / bandwidth, rel=1e-3)


@given(st.lists(st.floats(1e-6, 10.0), min_size=len(round_trips.SIZES), max_size=len(round_trips.SIZES)))
@settings(deadline=None)
def test_whatever_was_measured_gives_a_link_that_can_be_planned_with(times: list[float]) -> None:
    link = round_trips.fit(dict(zip(round_trips.SIZES, times, strict=True)))
    assert 0 < link.bandwidth < float("inf")
    assert 0 <= link.latency < float("inf")


class Pretended:
    """A group whose messages take as long as a formula says, on a clock that nobody waits for."""

    rank, size = 0, 2

    def __init__(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = link
        self.now = 0.0
        self.sizes: list[int] = []
        self.tags: set[int] = set()
        monkeypatch.setattr(round_trips.time, "perf_counter", lambda: self.now)

    def start(self, sends: Any, receives: Any) -> list[int]:
        self.sizes += [tensor.nbytes for _, tensor, tag in sends if tag == tags.ECHO]
        self.tags |= {tag for *_, tag in [*sends, *receives]}
        self.now += 0.0 if receives else self.link.latency
        return [tensor.nbytes for _, tensor, _ in receives]

    def finish(self, receives: list[int]) -> None:
        self.now += sum(2 * self.link.seconds(size) for size in receives)

    def vote(self, ballot: torch.Tensor) -> None: ...


def test_the_clock_measures_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = round_trips.clock(Pretended(Link(bandwidth=1e9, latency=1e-3), monkeypatch))  # type: ignore[arg-type]
    assert measured.link.latency == pytest.approx(1e-3)
    assert measured.link.bandwidth == pytest.approx(1e9)
    assert measured.error < 1e-6


def test_one_slow_trip_in_a_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed(Pretended):
        trips = 0

        def finish(self, receives: list[int]) -> None:
            super().finish(receives)
            self.trips += 1
            self.now += 4e-3 if self.trips % 2 else 0.0  # half of all trips wait for the scheduler

    measured = round_trips.clock(Disturbed(Link(bandwidth=1e9, latency=1e-4), monkeypatch))  # type: ignore[arg-type]
    assert measured.link.latency == pytest.approx(1e-4)


def test_over_a_slow_link_large_messages_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Pretended(Link(bandwidth=1.25e6, latency=0.02), monkeypatch)  # 10 Mbit/s
    measured = round_trips.clock(group)  # type: ignore[arg-type]
    assert max(group.sizes) == 1 << 20  # 0.86 s
    assert measured.link.bandwidth == pytest.approx(1.25e6)


# --- in a hurry ---------------------------------------------------------------------------------------


def test_only_two_workers_of_different_hosts_measure() -> None:
    asked: dict[int, int] = {}

    def work(group: Any) -> Link | None:
        start = group.start

        def counting(sends: Any, receives: Any) -> Any:
            asked[group.rank] = asked.get(group.rank, 0) + 1
            return start(sends, receives)

        group.start = counting
        link = quick_link(group, ["left", "left", "right", "right"])
        group.vote(torch.zeros(1))
        return link

    first, *others = on_workers(4, work)
    assert isinstance(first, Link)
    assert others == [None, None, None]
    assert set(asked) == {0, 2}


def test_on_one_host_the_second_worker_answers_and_alone_nobody_does() -> None:
    def work(group: Any, clock: int = 0) -> Link | None:
        link = quick_link(group, ["here"] * group.size, clock=clock)
        group.vote(torch.zeros(1))
        return link

    assert [link is not None for link in on_workers(3, work)] == [True, False, False]
    assert [link is not None for link in on_workers(3, lambda group: work(group, 2))] == [False, False, True]
    assert on_workers(1, work) == [None]


@pytest.mark.parametrize(
    ("bandwidth", "latency", "within"),
    [
        (1.25e6, 1e-4, 1.0),
        (1.25e6, 0.02, 1.0),
        (1.25e5, 0.05, 2.0),
        (1.25e8, 1e-4, 0.1),
        (5e9, 2e-5, 0.1),
        (1e9, 0.0, 0.1),
    ],
)
def test_a_link_is_found_in_time(
    bandwidth: float, latency: float, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Pretended(Link(bandwidth=bandwidth, latency=latency), monkeypatch)
    link = quick_link(group, ["a", "b"])  # type: ignore[arg-type]
    assert link is not None
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(latency, rel=1e-3, abs=1e-7)
    assert group.now < within
    assert group.tags == {tags.ECHO, tags.ECHO_ORDER}
