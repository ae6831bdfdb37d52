"""Bamboo and ReCycle, where it matters who is lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.simulate.course import Moment, follow
from holdfast.simulate.measured_tables import Speeds, example
from holdfast.simulate.outcome import Setting, make_rules
from holdfast.simulate.systems.bamboo import Bamboo, BambooPlaces
from holdfast.simulate.systems.recycle import ReCycle, RecycleGrid
from holdfast.simulate.trace import NodeChange, Trace

SPEEDS = Speeds({count: 2.0 * count for count in range(2, 13)})
BAMBOO = Bamboo(speeds=SPEEDS, boundary_samples=240.0, local=20.0, everybody=30.0, depth=4)  # steps of 10 s with 12
RECYCLE = ReCycle(speeds=SPEEDS, boundary_samples=240.0, on_loss=3.0, restart=60.0, stages=4, micro_batches=48)


def losses(*times: float, nodes: int = 12, end: float = 200.0) -> Trace:
    names = tuple(f"n{number}" for number in range(nodes))
    changes = tuple(NodeChange(time=time, lost=(names[number],)) for number, time in enumerate(times))
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


@pytest.mark.parametrize("slows", [True, False])
def test_bamboo_is_told_whether_a_waiting_node_slows(slows: bool) -> None:
    facts = replace(example(), speeds={**example().speeds, "bamboo": SPEEDS}, depth=4, waiting_slows=slows)
    rules = make_rules("bamboo", Setting(trace=losses(25.0, nodes=11), facts=facts))
    slowest = min(part.samples_per_s for part in follow(losses(25.0, nodes=11), rules, [0.99]))
    assert slowest == (22.0 / 1.5 if slows else 22.0)


@given(st.lists(st.floats(0, 0.999), min_size=1, max_size=6))
def test_bamboo_every_stage_has_somebody_until_it_is_fatal(victims: list[float]) -> None:
    standing: BambooPlaces = BAMBOO.begin(_moment(13)).memory
    for victim in victims:
        place = standing.place(victim)
        after = standing.without(place)
        if after is None:
            return
        assert after.nodes == standing.nodes - 1
        assert (place is None) == (after.waiting < standing.waiting)
        before = {gone - gone % 4 + (gone - 1) % 4 for gone in after.gone}  # who stands in is there, and for one only
        assert len(before) == len(after.gone)
        assert before.isdisjoint(after.gone)
        standing = after


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
def test_bamboo_every_node_can_be_drawn(pipelines: int, waiting: int, gone: int) -> None:
    holes = tuple(4 * number for number in range(min(gone, pipelines)))
    standing = BambooPlaces(pipelines=pipelines, depth=4, waiting=waiting, gone=holes)
    drawn = [standing.place((number + 0.5) / standing.nodes) for number in range(standing.nodes)]
    assert [place for place in drawn if place is not None] == [p for p in range(4 * pipelines) if p not in holes]
    assert drawn.count(None) == waiting


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 8), st.lists(st.floats(0, 0.999), max_size=20))
def test_recycle_counts_nodes(pipelines: int, stages: int, waiting: int, victims: list[float]) -> None:
    grid = RecycleGrid(pipelines=pipelines, lost=(0,) * stages, waiting=waiting)
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


def test_bamboo_waits_with_a_rendezvous_while_the_risk_is_small() -> None:
    """One of 60 computes for two, and nobody waits: the next loss is fatal in 2 of 59 cases. With two it is 4 of 58."""
    many = replace(BAMBOO, speeds=Speeds({60: 120.0, 59: 118.0, 58: 116.0}))
    once = follow(losses(25.0, nodes=60), many, [0.0])
    assert not any(part.why == "rendezvous" for part in once)
    assert once[-1].samples_per_s == 120.0 / 1.5
    twice = follow(losses(25.0, 50.0, nodes=60), many, [0.0, 0.5])
    assert any(part.why == "rendezvous" and part.start > 50.0 for part in twice)
    spare = follow(losses(25.0, nodes=61), many, [0.0])  # somebody waits to take the place
    assert any(part.why == "rendezvous" for part in spare)


def test_bamboo_goes_on_after_too_few_nodes_with_a_rendezvous_of_all() -> None:
    names = tuple(f"n{number}" for number in range(4))
    changes = (NodeChange(time=25.0, lost=("n0",)), NodeChange(time=100.0, added=("new",)))
    trace = Trace(name="t", start=0.0, end=200.0, nodes=names, changes=changes)
    few = replace(BAMBOO, speeds=Speeds({4: 8.0}))
    found = follow(trace, few, [0.0])
    assert [(part.start, part.end, part.why) for part in found if part.start >= 25.0][:2] == [
        (25.0, 100.0, "too few nodes"),
        (100.0, 130.0, "rendezvous"),
    ]
    late = replace(trace, nodes=names[1:], changes=(NodeChange(time=100.0, added=("new",)),))
    assert not any(part.why == "rendezvous" for part in follow(late, few))  # nothing had begun


def test_recycle_who_only_waits_is_lost_for_nothing() -> None:
    more = follow(losses(25.0, nodes=13), RECYCLE, [0.99])
    assert {(part.samples_per_s, part.why) for part in more} == {(24.0, "training")}
    assert {part.idle for part in more if part.start >= 25.0} == {0}
    hit = follow(losses(25.0, nodes=13), RECYCLE, [0.0])  # the waiting one takes the place
    assert [part.why for part in hit[1:3]] == ["done again", "rerouting"]
    assert hit[-1].samples_per_s == 24.0


def test_recycle_who_joins_fills_a_hole() -> None:
    names = tuple(f"n{number}" for number in range(12))
    changes = (NodeChange(time=25.0, lost=("n0",)), NodeChange(time=60.0, added=("new",)))
    found = follow(Trace(name="t", start=0.0, end=300.0, nodes=names, changes=changes), RECYCLE, [0.0])
    assert next(part.start for part in found if part.why == "rerouting") == 25.0
    assert sum(part.seconds for part in found if part.why == "rerouting") == 6.0
    assert sum(part.seconds for part in found if part.why == "done again") == 5.0  # only the loss takes a step
    assert (found[-1].samples_per_s, found[-1].used) == (24.0, 12)


def test_recycle_grows_though_a_node_is_lost_before_the_step_ends() -> None:
    """Five are added to eight at 21 s, in a step that ends at 30 s; at 25 s one of those that train is lost."""
    names = tuple(f"n{number}" for number in range(8))
    added = tuple(f"a{number}" for number in range(5))
    changes = (NodeChange(time=21.0, added=added), NodeChange(time=25.0, lost=("n0",)))
    found = follow(Trace(name="t", start=0.0, end=300.0, nodes=names, changes=changes), RECYCLE, [0.0])
    assert [(part.start, part.end) for part in found if part.why == "restarting"] == [(25.0, 85.0)]
    assert (found[-1].samples_per_s, found[-1].used) == (24.0, 12)


@pytest.mark.parametrize("lost", [30.0, 80.0])
def test_recycle_a_loss_makes_no_restart_shorter(lost: float) -> None:
    """A stage is lost at 25 s: a restart until 85 s. Another loss takes 3 s, but not instead of it."""
    names = tuple(f"n{number}" for number in range(12))
    changes = (NodeChange(time=25.0, lost=names[:3]), NodeChange(time=lost, lost=(names[5],)))
    found = follow(Trace(name="t", start=0.0, end=200.0, nodes=names, changes=changes), RECYCLE, [0.0] * 4)
    assert next(part.start for part in found if part.start > 25.0 and part.samples_per_s) == 85.0


def test_recycle_growing_during_a_pause_takes_a_restart() -> None:
    """Eight lose one at 25 s, and five come at 26 s while it reroutes: the restart that takes has begun with it."""
    names = tuple(f"n{number}" for number in range(8))
    changes = (
        NodeChange(time=25.0, lost=("n0",)),
        NodeChange(time=26.0, added=tuple(f"a{number}" for number in range(5))),
    )
    found = follow(Trace(name="t", start=0.0, end=300.0, nodes=names, changes=changes), RECYCLE, [0.0])
    assert next(part.start for part in found if part.start > 25.0 and part.samples_per_s) == 85.0
    assert found[-1].used == 12


def test_recycle_a_stage_lost_at_once_is_a_restart() -> None:
    names = tuple(f"n{number}" for number in range(12))
    trace = Trace(name="t", start=0.0, end=200.0, nodes=names, changes=(NodeChange(time=25.0, lost=names[:3]),))
    whole = follow(trace, RECYCLE, [0.0, 0.0, 0.0])  # the whole first stage
    assert [(part.start, part.end) for part in whole if part.why == "restarting"] == [(25.0, 85.0)]
    spread = follow(trace, RECYCLE, [0.0, 0.4, 0.8])
    assert not any(part.why == "restarting" for part in spread)


def _moment(count: int) -> Moment:
    return Moment(live=tuple(f"n{number}" for number in range(count)))
