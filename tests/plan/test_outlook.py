"""What happens after each loss: every loss is in exactly one case, and a case says what all its losses do."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.outlook import (
    SIZES,
    Groups,
    Hit,
    _all_hits,
    _some_hits,
    after_losses,
    example,
    groups_of,
    hits_of,
    look_ahead,
    names,
    sizes_down,
    ways,
)
from holdfast.plan.planner import PipelinePlan, Shortage, make_plan
from holdfast.plan.profile import uniform
from holdfast.plan.template import Templates, make_templates
from tests.plan import judge

ENOUGH = 10_000


def planned(layers: int, nodes: int, *, tolerate: int, minimum: int) -> tuple[Templates, PipelinePlan]:
    templates = make_templates(uniform(layers), nodes=nodes, tolerate=tolerate, minimum=minimum)
    plan = make_plan(templates, [f"n{n}" for n in range(nodes)], micro_batches=4 * nodes)
    assert isinstance(plan, PipelinePlan)
    return templates, plan


@st.composite
def groups(draw: st.DrawFn) -> Groups:
    """Pipelines of up to three shapes, at most twelve nodes."""
    shapes = draw(st.dictionaries(st.tuples(st.integers(1, 4), st.integers(1, 2)), st.integers(1, 3), max_size=3))
    made: Groups = {}
    number = 0
    for (size, share), count in shapes.items():
        for _ in range(count):
            if number + size <= 12:
                made.setdefault((size, share), []).append(tuple(f"n{number + n}" for n in range(size)))
                number += size
    return made


@judge.examples(30)
@given(groups(), st.integers(1, 3))
def test_every_loss_is_in_exactly_one_case(made: Groups, count: int) -> None:
    everyone = [node for group in made.values() for pipeline in group for node in pipeline]
    brute = Counter(hits_of(made, set(lost)) for lost in combinations(everyone, count))
    found = {tuple(sorted(hits)): ways(made, hits) for hits in _all_hits(made, count)}
    assert found == brute
    assert sum(found.values()) == comb(len(everyone), count)
    for hits in found:
        assert hits_of(made, example(made, hits)) == hits


@pytest.mark.parametrize(("layers", "nodes", "tolerate", "minimum"), [(9, 9, 2, 2), (12, 11, 1, 3), (3, 8, 1, 3)])
def test_a_case_stands_for_all_its_losses(layers: int, nodes: int, tolerate: int, minimum: int) -> None:
    """The last one has spare nodes. The control: there are cases that differ, so a wrong case would be seen."""
    templates, plan = planned(layers, nodes, tolerate=tolerate, minimum=minimum)
    made = groups_of(plan)
    differ = set()
    for count in range(1, tolerate + 1):
        losses = after_losses(templates, plan, count, most=ENOUGH)
        assert losses.complete
        by_hits = {tuple(sorted(case.hits)): case for case in losses.cases}
        for lost in combinations(names(plan), count):
            left = [node for node in names(plan) if node not in lost]
            held = {node: layers for node, layers in plan.held().items() if node not in lost}
            after = make_plan(templates, left, micro_batches=plan.micro_batches, held=held)
            said = by_hits[hits_of(made, lost)].after
            assert isinstance(after, PipelinePlan)
            assert isinstance(said, PipelinePlan)
            assert (after.seconds, after.moved_bytes, after.lost) == (said.seconds, said.moved_bytes, ())
            assert len(after.pipelines) > tolerate
            differ.add((count, after.moved_bytes))
    assert len(differ) > tolerate


def test_the_worst_comes_first() -> None:
    templates, plan = planned(12, 11, tolerate=2, minimum=2)
    cases = after_losses(templates, plan, 2, most=ENOUGH).cases
    assert len(cases) > 3
    costs = [(case.after.seconds, case.after.moved_bytes) for case in cases if isinstance(case.after, PipelinePlan)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_what_is_not_tolerated_is_worse() -> None:
    """Without a second pipeline a loss takes layers along; with too few nodes the training stops."""
    templates, plan = planned(6, 3, tolerate=0, minimum=2)
    assert len(plan.pipelines) == 1
    (worst, *_) = after_losses(templates, plan, 1, most=ENOUGH).cases
    assert isinstance(worst.after, PipelinePlan)
    assert worst.after.lost
    (stops,) = {type(case.after) for case in after_losses(templates, plan, 2, most=ENOUGH).cases}
    assert stops is Shortage


def test_of_very_many_cases_the_nastiest_are_looked_at() -> None:
    templates, plan = planned(12, 40, tolerate=3, minimum=4)
    losses = after_losses(templates, plan, 3, most=20)
    assert not losses.complete
    assert len(losses.cases) == 20
    assert len({case.hits for case in losses.cases}) == 20
    assert any(len(case.hits) == 1 for case in losses.cases), "three of one pipeline"
    assert any(len({hit.positions for hit in case.hits}) == 1 < len(case.hits) for case in losses.cases), (
        "all holders of a layer in three pipelines"
    )
    assert losses == after_losses(templates, plan, 3, most=20), "the same on every worker"


@pytest.mark.parametrize("nodes", [5, 6, 9, 30, 999])
def test_the_way_down_ends_one_below_the_minimum(nodes: int) -> None:
    templates = make_templates(uniform(4), nodes=nodes, tolerate=1, minimum=2)
    sizes = sizes_down(templates, nodes)
    assert len(sizes) <= SIZES
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == 3
    assert sizes[0] == nodes - 2
    assert not sizes_down(templates, 4), "the loss of one is in the outlook already, and stops the training"


def test_the_outlook_goes_down_to_where_training_stops() -> None:
    templates, plan = planned(8, 9, tolerate=1, minimum=2)
    outlook = look_ahead(templates, plan)
    assert [losses.count for losses in outlook.losses] == [1]
    assert [one.nodes for one in outlook.fewer] == [7, 6, 5, 4, 3]
    *trains, stops = outlook.fewer
    assert isinstance(stops.after, Shortage)
    seconds = [one.after.seconds for one in trains if isinstance(one.after, PipelinePlan)]
    assert len(seconds) == 4
    assert seconds == sorted(seconds), "fewer nodes are not faster"
    assert isinstance(outlook.join, PipelinePlan)
    assert sum(len(pipeline.nodes) for pipeline in outlook.join.pipelines) == 10
    assert outlook.join.seconds <= plan.seconds


def test_a_spare_node_is_a_case_of_its_own() -> None:
    templates, plan = planned(3, 8, tolerate=1, minimum=3)
    assert len(plan.spares) == 2
    cases = after_losses(templates, plan, 1, most=ENOUGH).cases
    (spare,) = [case for case in cases if case.hits[0].nodes == 0]
    assert spare.alike == 2
    assert isinstance(spare.after, PipelinePlan)
    assert spare.after.moved_bytes == 0


def test_with_slack_less_moves_and_steps_are_hardly_longer() -> None:
    templates = make_templates(uniform(24), nodes=7, tolerate=1, minimum=2)
    plan = make_plan(templates, [f"n{number}" for number in range(7)], micro_batches=28)
    assert isinstance(plan, PipelinePlan)
    strict, loose = (look_ahead(templates, plan, slack=slack).join for slack in (0.0, 0.2))
    assert isinstance(strict, PipelinePlan)
    assert isinstance(loose, PipelinePlan)
    assert loose.moved_bytes < strict.moved_bytes
    assert strict.seconds < loose.seconds <= 1.2 * strict.seconds


def test_one_position_in_several_pipelines_is_among_the_nastiest() -> None:
    groups: Groups = {(3, 8): [(f"a{number}", f"b{number}", f"c{number}") for number in range(50)]}
    everyone = [node for pipeline in groups[3, 8] for node in pipeline]
    assert (Hit(3, 8, (0,)),) * 4 in _some_hits(everyone, groups, 4, 2)
