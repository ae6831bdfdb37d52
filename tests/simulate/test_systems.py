"""Bamboo and ReCycle, where it matters who is lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.simulate.course import Moment, follow
from holdfast.simulate.systems.bamboo import Bamboo, without
from holdfast.simulate.systems.recycle import Grid, ReCycle
from holdfast.simulate.tables import Speeds
from holdfast.simulate.trace import Change, Trace

SPEEDS = Speeds({count: 2.0 * count for count in range(2, 13)})
BAMBOO = Bamboo(speeds=SPEEDS, boundary_samples=240.0, local=20.0, everybody=30.0, depth=4)  # steps of 10 s with 12
RECYCLE = ReCycle(speeds=SPEEDS, boundary_samples=240.0, on_loss=3.0, restart=60.0, stages=4, micro_batches=48)


def losses(*times: float, nodes: int = 12, end: float = 200.0) -> Trace:
    names = tuple(f"n{number}" for number in range(nodes))
    changes = tuple(Change(time=time, lost=(names[number],)) for number, time in enumerate(times))
    return Trace(name="t", start=0.0, end=end, nodes=names, changes=changes)


def test_bamboo_slows_down_and_meets_after_the_step() -> None:
    """Half a step is left when node 0 is lost, which takes half as long again; then the rendezvous."""
    found = follow(losses(25.0), BAMBOO, [0.0])
    parts = [(part.start, part.end, part.samples_per_s, part.used, part.why) for part in found[:4]]
    assert parts == [
        (0.0, 20.0, 24.0, 12, "training"),
        (20.0, 25.0, 24.0, 12, "training"),
        (25.0, 32.5, 16.0, 11, "training"),
        (32.5, 52.5, 0.0, 0, "rendezvous"),
    ]
    assert (found[4].samples_per_s, found[4].used, found[4].idle) == (22.0, 8, 3)


def test_bamboo_neighbours_are_fatal() -> None:
    """Of pipeline 0 the second stage, then the third, whose predecessor computes for two already."""
    found = follow(losses(25.0, 26.0), BAMBOO, [1.5 / 12, 1.5 / 11])
    assert [(part.start, part.end) for part in found if part.why == "rendezvous of all"] == [(26.0, 56.0)]
    assert [(part.start, part.end) for part in found if part.why == "done again"] == [(20.0, 25.0), (25.0, 26.0)]
    apart = follow(losses(25.0, 26.0), BAMBOO, [1.5 / 12, 9.5 / 11])  # another pipeline: nothing is lost
    assert not any(part.why in ("rendezvous of all", "done again") for part in apart)


def test_bamboo_a_loss_during_a_rendezvous_begins_it_anew() -> None:
    found = follow(losses(25.0, 42.0), BAMBOO, [0.0, 0.0])
    assert [(part.start, part.end) for part in found if part.why == "rendezvous"] == [(32.5, 42.0), (42.0, 62.0)]
    assert (found[-1].samples_per_s, found[-1].used, found[-1].idle) == (20.0, 8, 2)


def test_bamboo_a_waiting_node() -> None:
    """The last of eleven waits: the published simulation slows down for it, and is not set right again."""
    published = follow(losses(25.0, nodes=11), BAMBOO, [0.99])
    assert [part.samples_per_s for part in published][-1] == 22.0 / 1.5
    assert not any(part.why == "rendezvous" for part in published)
    expected = Bamboo(speeds=SPEEDS, boundary_samples=240.0, local=20.0, everybody=30.0, depth=4, waiting_slows=False)
    assert {part.samples_per_s for part in follow(losses(25.0, nodes=11), expected, [0.99])} == {22.0}


@given(st.lists(st.floats(0, 0.999), min_size=1, max_size=6))
def test_bamboo_every_stage_has_somebody_until_it_is_fatal(victims: list[float]) -> None:
    places = BAMBOO.begin(_moment(12)).memory.places
    for victim in victims:
        after = without(places, int(victim * len(places)), depth=4)
        if after is None:
            return
        assert len(after) == len(places) - 1
        assert {place for held in after for place in held} == {(p, s) for p in range(3) for s in range(4)}
        places = after


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 8), st.lists(st.floats(0, 0.999), max_size=20))
def test_recycle_counts_nodes(pipelines: int, stages: int, waiting: int, victims: list[float]) -> None:
    grid = Grid(pipelines=pipelines, lost=(0,) * stages, waiting=waiting)
    for victim in victims[: grid.nodes - 1]:
        before = grid.nodes
        grid = grid.without(victim)
        assert grid.nodes == before - 1
        if grid.is_broken:
            return
        levelled = grid.levelled()
        assert levelled.nodes == grid.nodes
        assert max(levelled.lost) - min(levelled.lost) <= 1
        assert levelled.slowdown(48) <= grid.slowdown(48)
        grid = levelled


def test_recycle_by_hand() -> None:
    """3 pipelines of 4: 16 micro-batches each and 3 around; without one node 24 and 3."""
    found = follow(losses(25.0), RECYCLE, [0.0])
    assert [(part.start, part.end, part.why) for part in found[1:3]] == [
        (20.0, 25.0, "done again"),
        (25.0, 28.0, "rerouting"),
    ]
    assert math.isclose(found[3].samples_per_s, 24.0 * 19 / 27)
    assert found[3].used == 11


def test_recycle_a_stage_lost_at_once_is_a_restart() -> None:
    names = tuple(f"n{number}" for number in range(12))
    trace = Trace(name="t", start=0.0, end=200.0, nodes=names, changes=(Change(time=25.0, lost=names[:3]),))
    whole = follow(trace, RECYCLE, [0.0, 0.0, 0.0])  # the whole first stage
    assert [(part.start, part.end) for part in whole if part.why == "restarting"] == [(25.0, 85.0)]
    spread = follow(trace, RECYCLE, [0.0, 0.4, 0.8])
    assert not any(part.why == "restarting" for part in spread)


def _moment(count: int) -> Moment:
    return Moment(live=tuple(f"n{number}" for number in range(count)))
