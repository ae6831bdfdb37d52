"""What must hold along any trace, whatever the system."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.simulate.course import Segment, follow
from holdfast.simulate.measured_tables import ModelFacts, Speeds
from holdfast.simulate.outcome import PLACED, SYSTEMS, Setting, SystemOutcome, judge, make_rules
from holdfast.simulate.placements import draws
from holdfast.simulate.systems.rearranging import saving
from holdfast.simulate.trace import NodeChange, Trace
from tests.simulate.given import traces

FACTS = ModelFacts(
    model="small",
    samples_per_step=100,
    speeds={
        "oobleck": Speeds({count: 1.7 * count - 0.3 * (count % 3) for count in range(3, 11)}),
        "varuna": Speeds({count: 1.8 * (count - count % 2) for count in range(3, 11)}),
        "recycle": Speeds({count: 1.7 * count for count in range(3, 11)}),
        "bamboo": Speeds({count: 0.6 * (count - count % 3) for count in range(3, 11)}),
    },
    reconfigure=4.0,
    local_rendezvous=40.0,
    global_rendezvous=30.0,
    effective_fraction=0.2,
    checkpoint_every=10,
    checkpoint=7.0,
    restart=80.0,
    creation=45.0,
    state_bytes=6e9,
    depth=3,
    stages=3,
    micro_batches=24,
)


def setting(trace: Trace, facts: ModelFacts = FACTS) -> Setting:
    return Setting(trace=trace, facts=facts, recovery=0.04, bandwidth=1.25e9)


def segments(system: str, trace: Trace, seed: int = 0) -> list[Segment]:
    """Of one placement, if the system has several."""
    placed = draws(trace.losses, placements=4, seed=seed)[0] if system in PLACED else ()
    return follow(trace, make_rules(system, setting(trace)), placed)


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=60, deadline=None)
@given(trace=traces(), seed=st.integers(0, 9))
def test_every_node_is_accounted_for_at_every_moment(system: str, trace: Trace, seed: int) -> None:
    found = segments(system, trace, seed)
    assert found[0].start == trace.start
    assert found[-1].end == trace.end
    assert all(before.end == after.start for before, after in pairwise(found))
    for segment in found:
        assert min(segment.samples_per_s, segment.used, segment.idle, segment.lost) >= 0
        assert bool(segment.samples_per_s) == bool(segment.used)
    for start, end, count in trace.spans():
        for segment in found:
            if segment.start < end and segment.end > start:
                assert start <= segment.start < segment.end <= end
                assert math.isclose(segment.used + segment.idle + segment.lost, count)
    outcome = SystemOutcome(system=system, segments=found)
    assert math.isclose(outcome.used + outcome.idle + outcome.lost, trace.node_hours, abs_tol=1e-9)


@settings(max_examples=25, deadline=None)
@given(trace=traces())
def test_the_mean_over_placements_keeps_the_hours_and_nobody_beats_the_ideal(trace: Trace) -> None:
    best = judge("ideal", setting(trace)).samples_per_s
    for system in SYSTEMS:
        outcome = judge(system, setting(trace))
        assert math.isclose(outcome.used + outcome.idle + outcome.lost, trace.node_hours, abs_tol=1e-9)
        assert outcome.samples_per_s <= best * (1 + 1e-9), system


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=10, deadline=None)
@given(trace=traces())
def test_the_same_twice(system: str, trace: Trace) -> None:
    assert judge(system, setting(trace)) == judge(system, setting(trace))


def shrinking(every: float) -> Trace:
    names = [f"n{number}" for number in range(10)]
    changes = tuple(NodeChange(time=(n + 1) * every, lost=(names[n],)) for n in range(6))
    return Trace(name="shrinking", start=0.0, end=7 * every, nodes=tuple(names), changes=changes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_more_frequent_losses_never_help(system: str) -> None:
    """The same losses, each time within a third of the time: the nodes there are on average are the same."""
    averages = [judge(system, setting(shrinking(every))).samples_per_s for every in (30_000, 10_000, 3_000, 1_000, 300)]
    if system == "ideal":
        assert max(averages) - min(averages) < 1e-9
    else:
        assert all(more > less for more, less in pairwise(averages)), averages


def test_a_loss_costs_the_step_and_the_pause() -> None:
    """By hand: steps of 6.25 s, a node lost at 32 s; five steps are kept."""
    names = tuple(f"n{number}" for number in range(10))
    trace = Trace(name="t", start=0.0, end=100.0, nodes=names, changes=(NodeChange(time=32.0, lost=("n3",)),))
    facts = replace(FACTS, speeds={**FACTS.speeds, "oobleck": Speeds({10: 16.0, 9: 10.0})})
    found = follow(trace, make_rules("oobleck", setting(trace, facts)))
    parts = [(part.start, part.end, part.samples_per_s, part.used, part.lost, part.why) for part in found]
    assert parts == [
        (0.0, 31.25, 16.0, 10, 0, "training"),
        (31.25, 32.0, 0.0, 0, 10, "done again"),
        (32.0, 36.0, 0.0, 0, 9, "reconfiguring"),
        (36.0, 96.0, 10.0, 9, 0, "training"),
        (96.0, 100.0, 10.0, 9, 0, "training"),
    ]


def test_a_join_waits_until_it_is_up_and_for_the_end_of_the_step() -> None:
    names = tuple(f"n{number}" for number in range(9))
    trace = Trace(name="t", start=0.0, end=100.0, nodes=names, changes=(NodeChange(time=1.0, added=("new",)),))
    facts = replace(FACTS, speeds={**FACTS.speeds, "oobleck": Speeds({10: 16.0, 9: 10.0})})
    found = follow(trace, make_rules("oobleck", setting(trace, facts)))
    pause = next(part for part in found if part.why == "reconfiguring")
    assert (pause.start, pause.end) == (50.0, 54.0)  # up at 46 s, in a step that ends at 50 s
    assert not any(part.why == "done again" for part in found)
    assert {part.idle for part in found if part.start >= 1.0 and part.end <= 50.0} == {1}


def test_a_join_is_sent_layers() -> None:
    """A node of the tables' models is sent one of 3 stages of 6 GB at 10 Gbit/s: 1.6 s, beside the recovery."""
    names = tuple(f"n{number}" for number in range(9))
    trace = Trace(name="t", start=0.0, end=100.0, nodes=names, changes=(NodeChange(time=1.0, added=("new",)),))
    found = follow(trace, make_rules("holdfast", setting(trace)))
    assert sum(part.seconds for part in found if part.why == "recovering") == pytest.approx(1.6 + 0.04)


def test_restart_has_the_whole_restart_and_varuna_less_a_checkpoint() -> None:
    names = tuple(f"n{number}" for number in range(10))
    trace = Trace(name="t", start=0.0, end=900.0, nodes=names, changes=(NodeChange(time=32.0, lost=("n3",)),))
    for system, seconds in (("restart", 80.0), ("varuna", 73.0)):
        found = follow(trace, make_rules(system, setting(trace)))
        assert sum(part.seconds for part in found if part.why == "restarting") == pytest.approx(seconds)


@pytest.mark.parametrize(("between", "steps"), [(1.0, 1), (14.2, 2), (20.5, 2), (21.5, 3), (1e6, 535)])
def test_restart_saves_as_often_as_is_best(between: float, steps: int) -> None:
    """Steps of 7 s and saves of 7 s; what Young advises becomes 2 if it is 2.01 or 2.42, and 3 if it is 2.48."""
    facts = replace(FACTS, speeds={**FACTS.speeds, "varuna": Speeds({10: 100 / 7})})
    change = NodeChange(time=between / 2, lost=("n0",))
    trace = Trace(name="t", start=0.0, end=between, nodes=("n0",), changes=(change,))
    assert trace.between_losses == between
    found = saving(facts, trace)
    assert found.steps == steps
    assert f"{steps} step" in found.reason


def test_restart_where_nothing_is_lost() -> None:
    trace = Trace(name="t", start=0.0, end=1000.0, nodes=("n0",), changes=())
    found = saving(FACTS, trace)
    assert f"{found.steps} steps" in found.reason
    assert "3.5%" in found.reason
    nothing = replace(FACTS, speeds={**FACTS.speeds, "varuna": Speeds({10: 0.0})})
    assert saving(nothing, trace).steps == 1


def test_who_is_up_during_a_pause_is_taken_along() -> None:
    """Lost at 60 s, a restart until 133 s; a new node is up at 105 s: no second restart."""
    names = tuple(f"n{number}" for number in range(10))
    changes = (NodeChange(time=60.0, lost=("n0",), added=("new",)),)
    trace = Trace(name="t", start=0.0, end=1000.0, nodes=names, changes=changes)
    found = follow(trace, make_rules("varuna", setting(trace)))
    paused = [(part.start, part.end, part.lost) for part in found if part.why == "restarting"]
    assert paused == [(60.0, 105.0, 9), (105.0, 133.0, 10)]
    assert found[-1].samples_per_s == pytest.approx(18.0)


def test_a_node_lost_before_it_is_up_is_no_loss() -> None:
    names = tuple(f"n{number}" for number in range(9))
    changes = (NodeChange(time=1.0, added=("new",)), NodeChange(time=30.0, lost=("new",)))
    trace = Trace(name="t", start=0.0, end=100.0, nodes=names, changes=changes)
    found = follow(trace, make_rules("oobleck", setting(trace)))
    assert {part.why for part in found} == {"training"}


def test_a_checkpoint_that_is_not_finished_is_none() -> None:
    """Ten steps of 6.25 s and 7 s of saving: lost at 69 s, everything is; lost at 70 s, little is."""
    names = tuple(f"n{number}" for number in range(10))
    facts = replace(FACTS, speeds={**FACTS.speeds, "varuna": Speeds({10: 16.0, 9: 10.0})})
    kept = []
    for time in (69.0, 70.0):
        trace = Trace(name="t", start=0.0, end=time + 1, nodes=names, changes=(NodeChange(time=time, lost=("n0",)),))
        kept.append(
            sum(s.samples_per_s * s.seconds for s in follow(trace, make_rules("varuna", setting(trace, facts))))
        )
    assert kept == [0.0, pytest.approx(1000.0)]


def test_who_only_waits_is_lost_for_nothing() -> None:
    names = tuple(f"n{number}" for number in range(12))  # the tables end at ten
    trace = Trace(name="t", start=0.0, end=100.0, nodes=names, changes=(NodeChange(time=33.0, lost=("n11",)),))
    assert judge("oobleck", setting(trace)).lost == 0
    hit = replace(trace, changes=(NodeChange(time=33.0, lost=("n3",)),))
    assert judge("oobleck", setting(hit)).lost > 0


def test_below_the_fewest_nodes_nothing_is_trained_and_going_on_takes_a_restart() -> None:
    names = tuple(f"n{number}" for number in range(3))
    changes = (NodeChange(time=1000.0, lost=("n0",)), NodeChange(time=2000.0, added=("n3",)))
    trace = Trace(name="t", start=0.0, end=4000.0, nodes=names, changes=changes)
    found = follow(trace, make_rules("holdfast", setting(trace)))
    assert [(part.start, part.end) for part in found if part.why == "too few nodes"] == [
        (1000.0, 2000.0),
        (2000.0, 2045.0),
    ]
    assert [(part.start, part.end) for part in found if part.why == "recovering"] == [(2045.0, 2125.0)]
