"""Models that nobody measured: throughput by our planner, moved bytes as it plans them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.plan.planner import Plan, make_plan
from holdfast.plan.profile import uniform
from holdfast.simulate.outcome import SYSTEMS, Setting, judge
from holdfast.simulate.planned import make_facts, make_model, planning, read_model
from holdfast.simulate.trace import Change, Trace

PROFILE = uniform(12, memory=3_000_000_000)
NAMES = tuple(f"n{number}" for number in range(9))


def trace(*changes: Change, end: float = 5000.0) -> Trace:
    return Trace(name="t", start=0.0, end=end, nodes=NAMES, changes=changes)


def setting(made: Trace, **asked: int) -> Setting:
    model = make_model(PROFILE, made, **asked)
    facts = make_facts(model, made)
    return Setting(trace=made, facts=facts, recovery=0.04, arrange=planning(model, restart=facts.restart))


def test_throughput_is_the_plans() -> None:
    made = trace()
    model = make_model(PROFILE, made)
    plan = make_plan(model.templates, NAMES, micro_batches=36)
    assert isinstance(plan, Plan)
    assert math.isclose(judge("holdfast", setting(made)).samples_per_s, 36 / plan.seconds)
    assert judge("holdfast", setting(made)).lost == 0


def test_every_system_runs_and_none_loses_an_hour() -> None:
    made = trace(Change(time=1000.0, lost=("n0",)), Change(time=2000.0, lost=("n4", "n5"), added=("new",)))
    for system in SYSTEMS:
        outcome = judge(system, setting(made))
        assert math.isclose(outcome.used + outcome.idle + outcome.lost, made.node_hours), system
        assert outcome.samples_per_s > 0


def test_hours_are_of_devices() -> None:
    made = trace(Change(time=1000.0, lost=("n0",)))
    model = make_model(PROFILE, made, devices=2)
    outcome = judge("varuna", Setting(trace=made, facts=make_facts(model, made), devices=2))
    assert math.isclose(outcome.used + outcome.idle + outcome.lost, 2 * made.node_hours)


def test_moving_takes_what_the_node_that_lacks_most_is_sent() -> None:
    made = trace(Change(time=1000.0, lost=("n0",)))
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
    made = trace()
    roomy = make_facts(make_model(uniform(12), made), made)
    assert roomy.speeds["bamboo"] is not None
    fits = max(stage.bytes for stage in make_model(uniform(12), made).templates.by_nodes[roomy.depth].stages)
    tight = make_model(replace(uniform(12), memory=int(1.5 * fits)), made, tolerate=0)
    assert make_facts(tight, made).speeds["bamboo"] is None


def test_which_model(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.to_json()))
    assert read_model(str(path)) == PROFILE
    for text, said in (("uniform:", "no made-up model"), ("GPT-2", "there is no profile 'GPT-2'")):
        with pytest.raises(UsageError, match=said):
            read_model(text)
    path.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_model(str(path))
