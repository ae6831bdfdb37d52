"""Templates equal brute force over all cuts, judged by another simulation; the cost model is within 2% of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.plan import stage_cut as cut
from holdfast.plan import template as template_module
from holdfast.plan.profile import Profile, uniform
from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.stage_cut import LowerBounds, best_cut
from holdfast.plan.template import Template, make_templates
from holdfast.plan.timeline import simulate
from tests.plan import judge
from tests.plan.test_timeline import makespan

families = st.sampled_from(sorted(judge.FAMILIES))
seeds = st.integers(0, 10**6)
CHAIN = Chain(stages=9, per_node=1, lanes=1, micro_batches=36)


def made_up(family: str, seed: int, layers: int, memory: float | None = None) -> Profile:
    """``memory``: of a device, as a share of what all layers' state takes."""
    profile = judge.FAMILIES[family](random.Random(seed), layers)
    if memory is None:
        return profile
    return replace(profile, memory=int(memory * sum(cost.resident_bytes for cost in profile.layers)) + 1)


def bounds_of(template: Template) -> tuple[int, ...]:
    return (*(stage.first for stage in template.stages), template.stages[-1].stop)


def times_of(template: Template) -> list[judge.Times]:
    return [(s.times.forward, s.times.backward, s.times.send_forward, s.times.send_backward) for s in template.stages]


def exact(template: Template, count: int) -> float:
    """A step with so many micro-batches in each lane, by the judge's events."""
    after = [(stage.update, stage.exchange) for stage in template.stages]
    return judge.whole_step(times_of(template), after, count)


def check_against_all(profile: Profile, nodes: int, devices: int) -> int:
    """Every template of up to so many nodes; how many there were."""
    choices = {size: judge.all_choices(profile, size, devices) for size in range(1, nodes + 1)}
    fits = [size for size in choices if choices[size]]
    try:
        made = make_templates(profile, nodes=nodes, tolerate=0, devices=devices)
    except UsageError:
        assert not fits
        return 0
    assert made.minimum == fits[0]
    assert sorted(made.by_nodes) == fits
    for size, template in made.by_nodes.items():
        chosen = next((c for c in choices[size] if (c.lanes, c.bounds) == (template.lanes, bounds_of(template))), None)
        assert chosen is not None, "it does not fit into memory"
        check_template(profile, template, chosen)
        assert template.gap == 0.0, "so few layers are always finished"
        assert chosen.seconds == pytest.approx(min(c.seconds for c in choices[size]), rel=1e-9)
    return len(fits)


def check_template(profile: Profile, template: Template, chosen: judge.Choice) -> None:
    """What a template says of itself is what the judge computes for its cut."""
    shape = {"per_node": template.devices // template.lanes, "lanes": template.lanes}
    expected = judge.stage_times(profile, bounds_of(template), **shape)
    for got, want in zip(times_of(template), expected, strict=True):
        assert got == pytest.approx(want, rel=1e-9)
    after = judge.after_seconds(profile, bounds_of(template), **shape)
    for stage, want in zip(template.stages, after, strict=True):
        assert (stage.update, stage.exchange) == pytest.approx(want, rel=1e-9)
    assert [stage.node for stage in template.stages] == [i // shape["per_node"] for i in range(len(template.stages))]
    count = judge.PER_DEVICE * len(template.stages)
    assert [stage.bytes for stage in template.stages] == judge.stage_bytes(profile, bounds_of(template), count)
    stages = [stage.times for stage in template.stages]
    assert makespan(stages, count) == pytest.approx(judge.step_seconds(times_of(template), count), rel=1e-9)
    assert max(span.end for span in simulate(stages, count)) == pytest.approx(makespan(stages, count), rel=1e-9)
    assert template.seconds(count * template.lanes) == pytest.approx(chosen.seconds, rel=0.02)


@given(families, seeds, st.integers(1, 10), st.integers(1, 5), st.none() | st.floats(0.2, 1.5))
@example("wild", 4, 4, 4, 0.625)  # its last layer fits only where one micro-batch is under way
@judge.examples(60)
def test_one_device_per_node(family: str, seed: int, layers: int, nodes: int, memory: float | None) -> None:
    check_against_all(made_up(family, seed, layers, memory), min(nodes, layers), 1)


@given(families, seeds, st.integers(1, 9), st.integers(1, 3), st.sampled_from([2, 4]), st.none() | st.floats(0.2, 1.5))
@judge.examples(40)
def test_several_devices_and_lanes(
    family: str, seed: int, layers: int, nodes: int, devices: int, memory: float | None
) -> None:
    check_against_all(made_up(family, seed, layers, memory), min(nodes, layers), devices)


def test_ten_layers_in_all_sizes() -> None:
    assert check_against_all(made_up("transformer", 1, 10), 10, 1) == 10


def test_control_the_judge_sees_a_bad_cut() -> None:
    """Most other cuts are slower: equality above says something."""
    choices = judge.all_choices(made_up("cnn", 3, 8), 4, 1)
    least = min(choice.seconds for choice in choices)
    assert sum(choice.seconds > 1.001 * least for choice in choices) > 0.9 * len(choices)


@given(families, seeds, st.integers(1, 24), st.integers(1, 24), st.sampled_from([1, 2, 4]))
@example("wild", 364, 24, 1, 1)  # 5% off where few micro-batches are not timed one by one
@example("wild", 168, 23, 4, 1)
@judge.examples(8)
def test_the_cost_model_is_within_two_percent(family: str, seed: int, nodes: int, more: int, devices: int) -> None:
    """Up to six micro-batches per stage, the sends included."""
    profile = made_up(family, seed, nodes + more)
    template = make_templates(profile, nodes=nodes, tolerate=0, devices=devices, minimum=nodes).by_nodes[nodes]
    stages = len(template.stages)
    some = sorted({*range(1, 20), *random.Random(seed).choices(range(1, 6 * stages + 1), k=12), 6 * stages})
    for count in some:
        ends = judge.last_ends(times_of(template), count)
        for alone in (False, True):
            after = [stage.update + (0.0 if alone else stage.exchange) for stage in template.stages]
            exactly = max(end + rest for end, rest in zip(ends, after, strict=True))
            assert template.seconds(count * template.lanes, alone=alone) == pytest.approx(exactly, rel=0.02), count


@pytest.mark.parametrize("family", sorted(judge.FAMILIES))
def test_the_cost_model_for_every_number_of_micro_batches(family: str) -> None:
    template = make_templates(made_up(family, 7, 16), nodes=11, tolerate=0, minimum=11).by_nodes[11]
    for count in range(1, 6 * 11 + 1):
        assert template.seconds(count) == pytest.approx(exact(template, count), rel=0.02), count


@pytest.mark.parametrize("family", sorted(judge.FAMILIES))
def test_the_cost_model_on_long_pipelines(family: str) -> None:
    """With 64 stages not every number of micro-batches can be tried."""
    template = make_templates(made_up(family, 5, 96), nodes=64, tolerate=0, minimum=64).by_nodes[64]
    for count in (1, 2, 3, 5, 9, 15, 17, 19, 30, 63, 65, 100, 300, 384):
        assert template.seconds(count) == pytest.approx(exact(template, count), rel=0.02), count


@given(families, seeds, st.integers(1, 6), st.integers(1, 200))
@judge.examples(30)
def test_capacity_is_the_inverse_of_seconds(family: str, seed: int, nodes: int, count: int) -> None:
    profile = made_up(family, seed, 9)
    for devices in (1, 2):
        made = make_templates(profile, nodes=nodes, tolerate=0, devices=devices, minimum=nodes)
        template = made.by_nodes[nodes]
        seconds = template.seconds(count)
        assert template.capacity(seconds) >= count, "what takes so long fits into so long"
        assert template.seconds(template.capacity(seconds)) <= seconds * (1 + 1e-9)
        assert template.capacity(template.seconds(1) * 0.99) == 0


def cut_short(profile: Profile, nodes: int, devices: int, effort: int) -> Template:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_module, "EFFORT", effort)
        return make_templates(profile, nodes=nodes, tolerate=0, devices=devices, minimum=nodes).by_nodes[nodes]


@given(families, seeds, st.integers(6, 10), st.integers(2, 5), st.sampled_from([1, 2, 4]), st.integers(0, 20))
@example("cnn", 491608, 10, 4, 2, 0)  # the best has another number of lanes than the one whose gap was given
@example("cnn", 397388, 9, 4, 4, 20)
@judge.examples(20)
def test_a_search_that_is_cut_short_says_how_far_off_it_may_be(
    family: str, seed: int, layers: int, nodes: int, devices: int, effort: int
) -> None:
    """Over all cuts and all numbers of lanes."""
    profile = made_up(family, seed, layers)
    template = cut_short(profile, nodes, devices, effort)
    least = min(choice.seconds for choice in judge.all_choices(profile, nodes, devices))
    count = judge.PER_DEVICE * len(template.stages)
    assert exact(template, count) <= least * (1 + template.gap) * (1 + 1e-9)
    assert ("no cut is faster" in template.reason) == (template.gap == 0.0)


def test_control_searches_are_cut_short() -> None:
    gaps = [cut_short(made_up("cnn", seed, 10), 4, 2, 0).gap for seed in range(20)]
    assert sum(gap > 0 for gap in gaps) > 5


def test_large_models_have_a_small_gap() -> None:
    """96 equal layers are cut almost equally: the bound shows that little is left to gain."""
    made = make_templates(uniform(96), nodes=24, tolerate=1, minimum=4)
    assert max(template.gap for template in made.by_nodes.values()) < 0.05


def test_polishing_makes_a_search_that_ended_early_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without effort the first guess is all there is: moving boundaries must help somewhere, and never harm."""
    better = 0
    for seed in range(12):
        bounds = LowerBounds(StageCosts(judge.FAMILIES["cnn"](random.Random(seed), 30)), CHAIN)
        polished = best_cut(bounds, effort=-1)
        with monkeypatch.context() as patch:
            patch.setattr(cut, "SWEEPS", 0)
            rough = best_cut(bounds, effort=-1)
        assert polished is not None
        assert rough is not None
        assert polished.seconds <= rough.seconds
        better += polished.seconds < rough.seconds
    assert better > 2
