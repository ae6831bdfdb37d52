"""Models that nobody measured: throughput by our planner, moved bytes as it plans them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from holdfast.plan.planner import PipelinePlan, make_plan
from holdfast.plan.profile import uniform
from holdfast.simulate.measured_tables import Speeds
from holdfast.simulate.outcome import SYSTEMS, Setting, judge
from holdfast.simulate.planned import live_counts, make_facts, make_model, planning, usual_nodes
from holdfast.simulate.trace import NodeChange, Trace
from tests.simulate.given import traces

PROFILE = uniform(12, memory=3_000_000_000)
NAMES = tuple(f"n{number}" for number in range(9))


def trace(*changes: NodeChange, end: float = 5000.0) -> Trace:
    return Trace(name="t", start=0.0, end=end, nodes=NAMES, changes=changes)


def setting(made: Trace, **asked: int) -> Setting:
    model = make_model(PROFILE, made, **asked)
    facts = make_facts(model, made)
    return Setting(trace=made, facts=facts, recovery=0.04, arrange=planning(model, restart=facts.restart))


def test_throughput_is_the_plans() -> None:
    made = trace()
    model = make_model(PROFILE, made)
    plan = make_plan(model.templates, NAMES, micro_batches=36)
    assert isinstance(plan, PipelinePlan)
    assert math.isclose(judge("holdfast", setting(made)).samples_per_s, 36 / plan.seconds)
    assert judge("holdfast", setting(made)).lost == 0


def test_every_system_runs_and_none_loses_an_hour() -> None:
    made = trace(NodeChange(time=1000.0, lost=("n0",)), NodeChange(time=2000.0, lost=("n4", "n5"), added=("new",)))
    for system in SYSTEMS:
        outcome = judge(system, setting(made))
        assert math.isclose(outcome.used + outcome.idle + outcome.lost, made.node_hours), system
        assert outcome.samples_per_s > 0


def test_hours_are_of_devices() -> None:
    made = trace(NodeChange(time=1000.0, lost=("n0",)))
    model = make_model(PROFILE, made, devices=2)
    outcome = judge("varuna", Setting(trace=made, facts=make_facts(model, made), devices=2))
    assert math.isclose(outcome.used + outcome.idle + outcome.lost, 2 * made.node_hours)


def test_moving_takes_what_the_node_that_lacks_most_is_sent() -> None:
    made = trace(NodeChange(time=1000.0, lost=("n0",)))
    model = make_model(PROFILE, made)
    before = planning(model, restart=99.0)(NAMES, None)
    after = planning(model, restart=99.0)(NAMES[1:], before)
    state = PROFILE.layers[0].state_bytes
    lacking = [len(set(layers) - set(before.memory[node])) for node, layers in after.memory.items()]
    assert max(lacking) > 0
    assert math.isclose(after.moving, PROFILE.between.seconds(max(lacking) * state))
    assert before.moving == 0


def test_layers_that_nobody_holds_take_a_restart() -> None:
    made = trace()
    model = make_model(PROFILE, made)
    arrange = planning(model, restart=99.0)
    before = arrange(NAMES, None)
    gone = {node for node, layers in before.memory.items() if 0 in layers}
    left = tuple(node for node in NAMES if node not in gone)
    assert arrange(left, before).moving == 99.0


def test_too_few_nodes_stand_still_and_remember_what_they_hold() -> None:
    model = make_model(PROFILE, trace(), tolerate=2)
    arrange = planning(model, restart=99.0)
    before = arrange(NAMES, None)
    stopped = arrange(NAMES[:2], before)
    assert stopped.samples_per_s == 0
    assert stopped.memory == {node: before.memory[node] for node in NAMES[:2]}


def test_bamboo_needs_twice_the_memory() -> None:
    """With it, a longer pipeline than is fastest; if none has it, Bamboo cannot run."""
    made = trace()
    roomy = make_model(uniform(12), made)
    needs = {size: max(stage.bytes for stage in shape.stages) for size, shape in roomy.templates.by_nodes.items()}
    assert make_facts(roomy, made).depth == 3
    tight = make_facts(make_model(uniform(12, memory=2 * needs[3] - 1), made), made)
    assert (tight.depth, tight.speeds["bamboo"] is None) == (4, False)
    least = make_model(uniform(12, memory=2 * min(needs.values()) - 1), made)
    assert make_facts(least, made).speeds["bamboo"] is None


def test_bamboo_computes_every_forward_twice() -> None:
    made = trace()
    model = make_model(uniform(12, forward=0.01, backward=0.03), made)
    facts = make_facts(model, made)
    speeds = facts.speeds["bamboo"]
    assert speeds is not None
    plain = model.grid_speed(9 // facts.depth, model.templates.by_nodes[facts.depth])
    assert math.isclose(speeds.at(9)[0], plain * 4 / 5)
    assert not facts.waiting_slows


def test_bamboo_has_a_predecessor() -> None:
    """Where single nodes are fastest, Bamboo still takes pipelines: of nine, those of three are fastest."""
    made = trace()
    facts = make_facts(make_model(uniform(12), made), made)
    assert (facts.stages, facts.depth) == (1, 3)


def test_a_single_pipeline_sums_its_gradients_with_nobody() -> None:
    made = trace()
    model = make_model(uniform(12, bandwidth=1e9), made, tolerate=0)
    shape = model.templates.by_nodes[9]
    assert model.grid_speed(1, shape) == model.samples / shape.seconds(model.micro_batches, alone=True)
    assert model.grid_speed(1, shape) > model.samples / shape.seconds(model.micro_batches)
    half = model.templates.by_nodes[4]
    assert model.grid_speed(2, half) == model.samples / half.seconds(model.micro_batches // 2)


def test_pipelines_are_chosen_for_the_nodes_there_usually_are() -> None:
    """A trace that begins with one node is not one of pipelines of one."""
    model = make_model(PROFILE, trace(), tolerate=0)
    alone = Trace(
        name="t", start=0.0, end=5000.0, nodes=("n0",), changes=(NodeChange(time=10.0, added=tuple(NAMES[1:])),)
    )
    assert usual_nodes(alone) == 9
    assert make_facts(model, alone).stages == make_facts(model, trace()).stages


@pytest.mark.parametrize("system", ["varuna", "restart", "bamboo", "recycle"])
def test_who_has_no_place_is_idle(system: str) -> None:
    """Pipelines of three: of eleven nodes, two are in none."""
    names = tuple(f"n{number}" for number in range(11))
    made = Trace(name="t", start=0.0, end=3600.0, nodes=names, changes=())
    model = make_model(uniform(4, memory=2_000_000_000), made)
    only = replace(model, templates=replace(model.templates, by_nodes={3: model.templates.by_nodes[3]}))
    outcome = judge(system, Setting(trace=made, facts=make_facts(only, made)))
    assert math.isclose(outcome.used + outcome.lost, 9.0)
    assert math.isclose(outcome.idle, 2.0)


def test_the_ideal_uses_who_trains_in_the_fastest() -> None:
    facts = make_facts(make_model(PROFILE, trace()), trace())
    few = replace(facts, speeds={name: Speeds({9: 5.0}, {9: 6}) for name in facts.speeds})
    found = judge("ideal", Setting(trace=trace(), facts=few))
    assert math.isclose(found.used, 6 * 5000 / 3600)
    assert math.isclose(found.idle, 3 * 5000 / 3600)


@given(traces(most=6, seconds=400))
def test_every_number_of_nodes_that_is_ever_up_is_known(made: Trace) -> None:
    """Counted moment by moment; some leave before they are up."""
    up = dict.fromkeys(made.nodes, made.start)
    seen = {len(up)}
    for time in sorted({change.time + late for change in made.changes for late in (0.0, 45.0)}):
        for change in made.changes:
            if change.time == time:
                up = {node: since for node, since in up.items() if node not in change.lost}
                up |= dict.fromkeys(change.added, time + 45.0)
        if time < made.end:
            seen.add(sum(since <= time for since in up.values()))
    assert seen <= set(live_counts(made, 45.0))
