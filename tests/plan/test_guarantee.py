"""Whatever f nodes are lost, every layer has a holder, and there is a plan that uses all the others.

Layers are few here (twice the nodes of the smallest pipeline, or 16): templates and plans are then made in
milliseconds, and all sizes that any plan needs are there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.plan.planner import PipelinePlan, Shortage, make_plan
from holdfast.plan.profile import Profile, uniform
from holdfast.plan.template import Templates, make_templates
from tests.plan import judge

MOST = 60  # nodes


@cache
def menu(minimum: int, tolerate: int, nodes: int = MOST, layers: int = 16) -> Templates:
    return make_templates(uniform(max(layers, 2 * minimum)), nodes=nodes, tolerate=tolerate, minimum=minimum)


def names(count: int, first: int = 0) -> list[str]:
    return [f"n{number}" for number in range(first, first + count)]


def check(
    plan: PipelinePlan | Shortage, templates: Templates, nodes: Collection[str], micro_batches: int
) -> PipelinePlan:
    """The whole guarantee, for one plan."""
    assert isinstance(plan, PipelinePlan)
    used = [node for pipeline in plan.pipelines for node in pipeline.nodes]
    assert sorted(used) == sorted(nodes), "every node is used, and once"
    assert plan.spares == ()
    assert len(plan.pipelines) >= templates.tolerate + 1
    for pipeline in plan.pipelines:
        assert pipeline.template is templates.by_nodes[len(pipeline.nodes)]
        assert pipeline.micro_batches >= 1
        roles = [pipeline.template.roles[place] for place in range(len(pipeline.nodes))]
        assert [layer for role in roles for layer in role] == list(range(len(templates.profile.layers)))
    assert sum(pipeline.micro_batches for pipeline in plan.pipelines) == micro_batches
    held = plan.held()
    assert sorted(held) == sorted(nodes)
    for layer in range(len(templates.profile.layers)):
        holders = plan.holders(layer)
        assert len(set(holders)) >= templates.tolerate + 1, "a host is a node: f+1 of them"
        assert all(layer in held[node] for node in holders)
    return plan


COVERING = {(1, 0), (1, 5), (2, 2), (3, 1), (3, 3), (4, 1), (5, 2), (6, 4), (7, 3), (8, 0), (8, 5)}
EXHAUSTIVE = pytest.mark.thorough("eleven of the 48 pairs of n0 and f run without it")


@pytest.mark.parametrize(
    ("minimum", "tolerate"),
    [
        pytest.param(*pair, marks=() if pair in COVERING else EXHAUSTIVE)
        for pair in itertools.product(range(1, 9), range(6))
    ],
)
def test_every_number_of_nodes_has_a_plan(minimum: int, tolerate: int) -> None:
    """All n0 ≤ 8, f ≤ 5, N ≤ 60, N'.

    The templates for N nodes are those for 60 up to N − f·n0 (the test below); a plan for N' uses none
    above N' − f·n0, so it is the plan for every N from N' to 60.
    """
    templates = menu(minimum, tolerate)
    for count in range((tolerate + 1) * minimum, MOST + 1):
        plan = check(make_plan(templates, names(count), micro_batches=120), templates, names(count), 120)
        assert max(len(pipeline.nodes) for pipeline in plan.pipelines) <= count - tolerate * minimum


@pytest.mark.parametrize("family", sorted(judge.FAMILIES))
@pytest.mark.parametrize("devices", [2, 4])
def test_unequal_layers_and_several_devices(family: str, devices: int) -> None:
    profile = judge.FAMILIES[family](random.Random(1), 12)
    templates = make_templates(profile, nodes=16, tolerate=2, devices=devices, minimum=2)
    held = None
    for count in (*range(16, 5, -1), *range(6, 17)):
        plan = check(make_plan(templates, names(count), micro_batches=64, held=held), templates, names(count), 64)
        assert plan.lost == ()
        held = plan.held()


@pytest.mark.parametrize(("minimum", "tolerate"), [(1, 0), (1, 5), (3, 2), (4, 1), (8, 5)])
def test_templates_for_fewer_nodes_are_the_same_ones(minimum: int, tolerate: int) -> None:
    whole = menu(minimum, tolerate).by_nodes
    needed = (tolerate + 1) * minimum
    for nodes in {needed, needed + 1, (needed + MOST) // 2}:
        some = menu(minimum, tolerate, nodes).by_nodes
        assert list(some) == [size for size in whole if size <= nodes - tolerate * minimum]
        assert all(some[size] == whole[size] for size in some)


@pytest.mark.parametrize(
    ("minimum", "tolerate", "nodes"),
    [(1, 1, 6), (1, 2, 7), (2, 1, 7), (2, 2, 8), (3, 1, 9), (3, 2, 9), (1, 3, 6), (2, 3, 9)],
)
def test_every_loss_of_up_to_f_nodes(minimum: int, tolerate: int, nodes: int) -> None:
    """Exhaustively: each set of nodes that may be lost, from each plan."""
    templates = menu(minimum, tolerate, nodes)
    plan = check(make_plan(templates, names(nodes), micro_batches=24), templates, names(nodes), 24)
    for lost in itertools.chain.from_iterable(
        itertools.combinations(names(nodes), count) for count in range(1, tolerate + 1)
    ):
        left = [node for node in names(nodes) if node not in lost]
        after = make_plan(templates, left, micro_batches=24, held=plan.held())
        assert orphans(plan.held(), left, templates) == []
        if len(left) >= templates.needed:
            assert check(after, templates, left, 24).lost == ()
        else:
            assert isinstance(after, Shortage)


def orphans(held: Mapping[str, range], alive: Collection[str], templates: Templates) -> list[int]:
    """Layers that nobody alive holds, counted by hand."""
    kept = {layer for node in alive for layer in held.get(node, ())}
    return [layer for layer in range(len(templates.profile.layers)) if layer not in kept]


def losses(plan: PipelinePlan, tolerate: int, rng: random.Random) -> list[str]:
    """Whom an adversary would take: a whole pipeline of any size, one of each, neighbours, who holds most, anybody."""
    kind = rng.choice(["pipeline", "one of each", "neighbours", "same place", "largest role", "anybody"])
    pipelines = rng.sample(plan.pipelines, len(plan.pipelines))
    if kind == "pipeline":
        return list(pipelines[0].nodes)
    if kind == "one of each":
        return [rng.choice(pipeline.nodes) for pipeline in pipelines[:tolerate]]
    if kind == "neighbours":
        start = rng.randrange(len(pipelines[0].nodes))
        return list(pipelines[0].nodes[start : start + tolerate])
    if kind == "same place":
        return [pipeline.nodes[0] for pipeline in pipelines[:tolerate]]
    held = plan.held()
    if kind == "largest role":
        return sorted(held, key=lambda node: (-len(held[node]), node))[:tolerate]
    return rng.sample(sorted(held), min(rng.randint(1, tolerate), len(held)))


def history(
    minimum: int, tolerate: int, start: int, events: int, seed: int
) -> Iterator[tuple[list[str], PipelinePlan]]:
    """Losses and joins, one after the other; each plan starts from what the one before left behind."""
    rng = random.Random(seed)
    templates = menu(minimum, tolerate)
    alive, fresh = names(start), start
    plan = check(make_plan(templates, alive, micro_batches=120), templates, alive, 120)
    held = plan.held()
    for _ in range(events):
        if rng.random() < 0.6:
            lost = losses(plan, tolerate, rng)
            alive = [node for node in alive if node not in lost]
            assert orphans(held, alive, templates) == [], lost
            found = make_plan(templates, alive, micro_batches=120, held=held)
            if len(alive) < templates.needed:
                check_shortage(found, templates, len(alive))
                joining = names(templates.needed - len(alive), fresh)
                alive, fresh = [*alive, *joining], fresh + len(joining)
        elif len(alive) < MOST:
            joining = names(rng.randint(1, min(4, MOST - len(alive))), fresh)
            alive, fresh = [*alive, *joining], fresh + len(joining)
        plan = check(make_plan(templates, alive, micro_batches=120, held=held), templates, alive, 120)
        assert plan.lost == ()
        held = plan.held()
        yield alive, plan


def check_shortage(found: PipelinePlan | Shortage, templates: Templates, alive: int) -> None:
    """Too few: it says how many there are, how many are needed, and what would help."""
    assert isinstance(found, Shortage)
    assert (found.nodes, found.needed) == (alive, templates.needed)
    assert str(alive) in found.reason
    assert str(templates.minimum) in found.reason
    assert str(templates.needed - alive) in found.hint
    if alive >= templates.minimum:
        assert str(alive // templates.minimum - 1) in found.hint


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 40), st.integers(0, 10**9))
@judge.examples(12)
def test_losses_and_joins_one_after_the_other(minimum: int, tolerate: int, more: int, seed: int) -> None:
    start = min((tolerate + 1) * minimum + more, MOST)
    assert len(list(history(minimum, tolerate, start, events=10, seed=seed))) == 10


def test_control_more_than_f_losses_are_noticed() -> None:
    """One node of every pipeline, all with the same layers: nobody holds these any more, and the plan says which."""
    templates = menu(3, 1, 9)
    plan = check(make_plan(templates, names(9), micro_batches=24), templates, names(9), 24)
    lost = [pipeline.nodes[0] for pipeline in plan.pipelines]
    alive = [node for node in names(9) if node not in lost]
    after = make_plan(templates, alive, micro_batches=24, held=plan.held())
    assert isinstance(after, PipelinePlan)
    assert list(after.lost) == orphans(plan.held(), alive, templates) != []
    assert ", ".join(map(str, after.lost)) in after.reason


@pytest.mark.parametrize("held", [None, {}, {"n0": range(0)}, {"n0": range(0), "gone": range(0)}])
def test_what_nobody_ever_held_is_not_lost(held: dict[str, range] | None) -> None:
    """A fresh start: nothing moves and nothing is lost."""
    templates = menu(2, 1, 6)
    plan = check(make_plan(templates, names(6), micro_batches=24, held=held), templates, names(6), 24)
    assert (plan.lost, plan.moved_bytes) == ((), 0)


def test_when_all_holders_are_gone_every_layer_is_lost() -> None:
    templates = menu(2, 1, 6)
    plan = make_plan(templates, names(6), micro_batches=24, held={"gone": range(16)})
    assert isinstance(plan, PipelinePlan)
    assert plan.lost == tuple(range(16))


# --- greedy borrow-and-merge ---------------------------------------------------------------------------------------


def greedy(sizes: list[int], minimum: int) -> list[int]:
    """As published: short pipelines borrow from longer ones; those that cannot are merged with the smallest other."""
    sizes = sorted(sizes)
    for place, size in enumerate(sizes):
        while size < minimum and max(sizes) > minimum:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[place] = size = size + 1
    sizes.sort()
    while sizes[0] < minimum and len(sizes) > 1:
        sizes = sorted([sizes[0] + sizes[1], *sizes[2:]])
    return sizes


def test_greedy_borrow_and_merge_breaks_the_guarantee_and_the_planner_does_not() -> None:
    """n0=3, f=3, five pipelines of 3, one node lost in three of them: twelve nodes are four pipelines of three."""
    minimum, tolerate = 3, 3
    templates = menu(minimum, tolerate, 15)
    roles = templates.by_nodes[3].roles
    pipelines = [names(3, 3 * number) for number in range(5)]
    held = {node: role for nodes in pipelines for node, role in zip(nodes, roles, strict=True)}
    alive = [node for node in held if node not in ("n0", "n4", "n8")]
    assert greedy([2, 2, 2, 3, 3], minimum) == [3, 4, 5], "three pipelines, and four are needed"
    plan = check(make_plan(templates, alive, micro_batches=24, held=held), templates, alive, 24)
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [3, 3, 3, 3]
    assert plan.lost == ()
    assert plan.moved_bytes == 0, "n0, n4 and n8 had three different roles: who is left of these is a whole pipeline"


def test_greedy_breaks_it_often() -> None:
    """The control: it is no curiosity of one case."""
    broken = 0
    for minimum, tolerate in itertools.product(range(2, 6), range(1, 6)):
        for hurt in range(1, tolerate + 1):
            sizes = [minimum - 1] * hurt + [minimum] * (tolerate + 2 - hurt)
            if sum(sizes) >= (tolerate + 1) * minimum:
                broken += len(greedy(sizes, minimum)) < tolerate + 1
    assert broken > 5


# --- below the minimum, and few layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("minimum", "tolerate", "alive"), [(1, 1, 1), (3, 2, 8), (3, 2, 2), (8, 5, 0), (4, 0, 3)])
def test_below_the_minimum_words_say_what_would_help(minimum: int, tolerate: int, alive: int) -> None:
    templates = menu(minimum, tolerate)
    check_shortage(make_plan(templates, names(alive), micro_batches=24), templates, alive)


@pytest.mark.parametrize("minimum", range(2, 7))
def test_a_model_with_too_few_layers_leaves_nodes_over_and_says_so(minimum: int) -> None:
    """With as many layers as the smallest pipeline has nodes there is one size; only its multiples can be used."""
    templates = make_templates(uniform(minimum), nodes=5 * minimum, tolerate=1, minimum=minimum)
    assert list(templates.by_nodes) == [minimum]
    assert f"{minimum} layers" in templates.reason
    for count in range(2 * minimum, 5 * minimum):
        plan = make_plan(templates, names(count), micro_batches=24)
        assert isinstance(plan, PipelinePlan)
        assert len(plan.spares) == count % minimum
        assert len(plan.pipelines) == count // minimum
        assert ("left over" in plan.reason) == bool(plan.spares)


def first_layer_keeps_much() -> Profile:
    """Three stages fit, four do not: the first stage has one more micro-batch under way for each stage behind."""
    giga = 10**9
    layers = [judge.layer(0, 0.01, 0.02, 1 << 20, 0, giga)]
    layers += [judge.layer(number, 0.01, 0.02, 1 << 20, giga // 4, 0) for number in range(1, 7)]
    return judge.model(layers, bandwidth=1e10, memory=int(3.2 * giga))


def test_memory_may_forbid_longer_pipelines() -> None:
    templates = make_templates(first_layer_keeps_much(), nodes=12, tolerate=1)
    assert list(templates.by_nodes) == [3]
    assert "layers" not in templates.reason
    assert "memory" in templates.reason
    plan = make_plan(templates, names(8), micro_batches=24)
    assert isinstance(plan, PipelinePlan)
    assert plan.spares == ("n6", "n7")
    assert "n6, n7" in plan.reason
    assert "only 7 layers" not in plan.reason


def test_a_minimum_that_memory_forbids_is_refused() -> None:
    with pytest.raises(UsageError, match="memory"):
        make_templates(first_layer_keeps_much(), nodes=12, tolerate=1, minimum=4)


def test_control_one_template_short_of_the_tight_condition() -> None:
    """p ≥ 1 + ⌈(n0−1)/(f+1)⌉ sizes are enough, and with one fewer some number of nodes has no plan."""
    for minimum, tolerate in itertools.product(range(1, 9), range(6)):
        tight = 1 + -(-(minimum - 1) // (tolerate + 1))
        for count, complete in ((tight, True), (tight - 1, False)):
            sizes = range(minimum, minimum + count)
            assert (reach(sizes, tolerate) >= set(range((tolerate + 1) * minimum, MOST + 1))) == complete


def reach(sizes: range, tolerate: int) -> set[int]:
    """Sums of at least f+1 sizes, up to MOST."""
    sums, found = {0}, set()
    for count in range(1, MOST + 1):
        sums = {total + size for total in sums for size in sizes if total + size <= MOST}
        found |= sums if count > tolerate else set()
    return found
