"""Layouts: every layer in every pipeline, every worker used, every micro-batch once, whatever is asked for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.plan import template_stock as stock
from holdfast.plan.fixed_stages import best_merge, fewest_workers, fixed_cut, merged
from holdfast.plan.lay_out import lay_out
from holdfast.plan.layout import Layout, PlacedPipeline, Role, side_by_side
from holdfast.plan.pipeline_sizes import PER_DEVICE
from holdfast.plan.planner import Shortage
from holdfast.plan.profile import Profile, uniform
from holdfast.plan.template_stock import stock_of
from tests.plan import judge

Stages = int | Sequence[int] | None


def names(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


def plan(layers: int, workers: int | Sequence[str], **wishes: Any) -> Layout | Shortage:
    settings = {
        "layers": layers,
        "workers": names(workers) if isinstance(workers, int) else workers,
        "held": {},
        "leaving": (),
        "micro_batches": 8,
        "tolerate": 1,
        "stages": None,
        "profile": None,
        "hosts": {},
    }
    return lay_out(**{**settings, **wishes})


def laid(layers: int, workers: int | Sequence[str], **wishes: Any) -> Layout:
    layout = plan(layers, workers, **wishes)
    assert isinstance(layout, Layout), layout
    return layout


def shape(layout: Layout) -> list[list[int]]:
    """The layers of each stage of each pipeline."""
    return [[len(layers) for layers in line.layers] for line in layout.pipelines]


def check(layout: Layout) -> Layout:
    """What holds for every layout."""
    ranks = [rank for line in layout.pipelines for rank in line.ranks]
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= set(range(layout.size))
    for line in layout.pipelines:
        assert len(line.ranks) == len(line.layers)
        assert all(len(layers) > 0 for layers in line.layers)
        assert [layer for layers in line.layers for layer in layers] == list(range(layout.layers))
    for layer in range(layout.layers):
        holders = layout.holders(layer)
        assert len(holders) >= layout.tolerate + 1
        assert list(holders) == sorted(set(holders))
        assert all(layer in role.layers for rank in holders if (role := layout.role(rank)))
    for rank in range(layout.size):
        role = layout.role(rank)
        assert (role is not None) == (rank in ranks)
        if role is not None:
            assert layout.pipelines[role.pipeline].ranks[role.stage] == rank
            assert layout.pipelines[role.pipeline].layers[role.stage] == role.layers
    for micro_batches in (0, 1, 2, 3, 5, 8, 13):
        shares = layout.shares(micro_batches)
        assert len(shares) == len(layout.pipelines)
        assert [index for share in shares for index in share] == list(range(micro_batches))
        assert sum(len(share) > 0 for share in shares) == min(micro_batches, len(layout.pipelines))
    return layout


def uneven(layers: int, seed: int, *, memory: int | None = None) -> Profile:
    """A model whose layers differ by up to four times in all they cost."""
    draw = random.Random(seed)
    made = uniform(layers, memory=memory)
    costs = [
        replace(
            layer,
            forward=layer.forward * draw.uniform(0.5, 2),
            backward=layer.backward * draw.uniform(0.5, 2),
            weight_bytes=(size := draw.randint(1, 4)),
            trainable_bytes=size,
            slot_bytes=2 * size,
            saved_bytes=draw.randint(0, 3),
        )
        for layer in made.layers
    ]
    return replace(made, layers=tuple(costs))


def cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), stages - 1)]


def fits(profile: Profile, bounds: Sequence[int]) -> bool:
    """Stage by stage, with nothing of the planner's but the cost model: 1F1B has S - s micro-batches under way."""
    stages = len(bounds) - 1
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        mine = profile.layers[first:stop]
        under_way = min(stages - stage, PER_DEVICE * stages)
        needs = sum(layer.resident_bytes + under_way * layer.saved_bytes for layer in mine)
        if profile.memory is not None and needs > profile.memory:
            return False
    return True


def most_used(sizes: Collection[int], workers: int, fewest: int, most: int) -> int:
    """The most workers that ``fewest`` to ``most`` pipelines of these sizes can have in all."""
    reachable = {0}
    best = 0
    for count in range(1, most + 1):
        reachable = {total + size for total in reachable for size in sizes if total + size <= workers}
        if count >= fewest:
            best = max(best, *reachable, 0)
    return best


# --- data parallelism -------------------------------------------------------------------------------


def test_side_by_side() -> None:
    layout = check(side_by_side(10, 3))
    assert [line.ranks for line in layout.pipelines] == [(0,), (1,), (2,)]
    assert layout.role(1) == Role(pipeline=1, stage=0, layers=range(10))
    assert (layout.size, layout.tolerate, layout.minimum) == (3, 2, 1)
    assert layout.shares(2) == [range(0, 0), range(0, 1), range(1, 2)]


@pytest.mark.parametrize("stages", [None, 1, [6]])
def test_without_a_profile_or_with_one_stage_every_worker_holds_everything(stages: Stages) -> None:
    layout = check(laid(6, ["b", "a", "c"], stages=stages, held={"c": range(6)}))
    assert layout.pipelines == side_by_side(6, 3).pipelines
    assert (layout.tolerate, layout.minimum) == (1, 1)
    assert check(laid(6, 3, stages=1, profile=uneven(6, 0))).pipelines[0].ranks == (0,)


def test_a_single_layer_is_not_planned() -> None:
    assert check(laid(1, 4, profile=uniform(1))).pipelines == side_by_side(1, 4).pipelines


def test_who_leaves_has_no_role_and_workers_beyond_the_micro_batches_hold_everything() -> None:
    layout = check(laid(6, 5, leaving={"w1", "w4"}, micro_batches=2))
    assert [line.ranks for line in layout.pipelines] == [(0,), (2,), (3,)]
    assert (layout.role(1), layout.holders(5)) == (None, (0, 2, 3))
    assert sum(len(share) for share in layout.shares(2)) == 2


# --- the planner's ----------------------------------------------------------------------------------


@judge.examples(50)
@given(st.data())
def test_whatever_is_asked_for_there_is_a_layout_or_a_shortage(data: st.DataObject) -> None:
    layers, count = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 9))
    workers = data.draw(st.permutations(names(count)))
    leaving = data.draw(st.sets(st.sampled_from(workers)))
    micro_batches, tolerate = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 3))
    memory = data.draw(st.none() | st.integers(20, 120))
    profile = uneven(layers, data.draw(st.integers(0, 5)), memory=memory)
    held = {worker: data.draw(st.sets(st.integers(0, layers - 1))) for worker in workers[: count // 2]}
    sizes = [n for n in range(1, layers + 1) if any(fits(profile, cut) for cut in cuts(layers, n))]
    asked = {"profile": profile, "micro_batches": micro_batches, "tolerate": tolerate, "held": held}
    if not sizes:
        with pytest.raises(UsageError, match="memory"):
            plan(layers, workers, leaving=leaving, **asked)
        return
    layout = plan(layers, workers, leaving=leaving, **asked)
    if count < sizes[0]:
        assert isinstance(layout, Shortage)
        assert (layout.nodes, layout.needed) == (count, sizes[0])
        return
    assert isinstance(layout, Layout)
    check(layout)
    crew = max(count - len(leaving), sizes[0])
    survived = min(tolerate, crew // sizes[0] - 1)
    most = max(micro_batches, survived + 1)
    used = [workers[rank] for line in layout.pipelines for rank in line.ranks]
    assert layout.minimum == sizes[0]
    assert layout.tolerate == survived
    assert len(used) == most_used(sizes, crew, survived + 1, most)
    assert len(set(used) & leaving) <= max(sizes[0] - (count - len(leaving)), 0)
    assert all(fits(profile, (0, *(part.stop for part in line.layers))) for line in layout.pipelines)
    assert layout == plan(layers, workers, leaving=leaving, **asked)


@pytest.mark.parametrize(
    "seed",
    [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough("two seeds run without it")) for seed in range(2, 12))],
)
def test_any_losses_that_are_tolerated_leave_every_layer_and_all_survivors_work(seed: int) -> None:
    draw = random.Random(seed)
    layers, tolerate = 10, 2
    profile = uneven(layers, seed, memory=72)
    fewest = stock_of(profile).minimum
    assert fewest > 1
    workers, fresh = names(5 * fewest), itertools.count(100)
    layout = check(laid(layers, workers, profile=profile, tolerate=tolerate, micro_batches=64))
    for _ in range(30):
        held = {workers[rank]: role.layers for rank in range(layout.size) if (role := layout.role(rank))}
        lost = draw.sample(workers, draw.randint(0, tolerate))
        joined = [f"w{next(fresh)}" for _ in range(draw.randint(0, 3))]
        workers = [worker for worker in workers if worker not in lost] + joined
        if len(workers) < (tolerate + 1) * fewest:
            workers += [f"w{next(fresh)}" for _ in range(3 * fewest)]
        left = {layer for worker in workers for layer in held.get(worker, ())}
        assert left == set(range(layers)), "more than f copies"
        layout = check(laid(layers, workers, profile=profile, tolerate=tolerate, micro_batches=64, held=held))
        assert layout.tolerate == tolerate
        assert all(layout.role(rank) is not None for rank in range(layout.size))


def test_losing_one_more_than_tolerated_would_be_noticed() -> None:
    """The control of the test above: f+1 losses can take every copy of a layer."""
    layout = laid(4, 4, profile=uneven(4, 0, memory=40), tolerate=1)
    assert layout.minimum == 2
    gone = set(layout.holders(0))
    assert len(gone) == layout.tolerate + 1
    assert not any(rank not in gone for rank in layout.holders(0))


def test_fewer_workers_than_tolerating_takes_go_on_and_say_so() -> None:
    profile = uneven(6, 1, memory=40)
    fewest = stock_of(profile).minimum
    assert fewest > 1
    layout = check(laid(6, 2 * fewest - 1, profile=profile, tolerate=1))
    assert (layout.tolerate, len(layout.pipelines)) == (0, 1)
    assert len(layout.pipelines[0].ranks) == 2 * fewest - 1, "all work, in one pipeline that is longer than any of two"
    assert "survives" in layout.reason
    assert "survives" not in laid(6, 2 * fewest, profile=profile, tolerate=1).reason


def test_too_few_micro_batches_for_all_pipelines_keep_their_copies() -> None:
    profile = uniform(4, memory=700 << 20)
    assert stock_of(profile).minimum == 2
    layout = check(laid(4, 6, profile=profile, tolerate=2, micro_batches=1))
    assert (layout.tolerate, len(layout.pipelines)) == (2, 3)
    assert sorted(len(share) for share in layout.shares(1)) == [0, 0, 1]
    assert "2 pipelines" in layout.reason


@pytest.mark.parametrize("held", [{}, {"w0": range(3)}])
def test_more_workers_than_a_step_can_feed_are_left_over(held: Mapping[str, range]) -> None:
    layout = check(laid(3, 20, profile=uniform(3), tolerate=1, micro_batches=4, held=held))
    assert len(layout.pipelines) == 4
    assert sum(layout.role(rank) is None for rank in range(20)) == 8
    assert "8 workers left over" in layout.reason


def test_templates_share_out_micro_batches_by_speed_and_few_go_to_the_fastest() -> None:
    profile = uniform(6, memory=1_300 << 20)
    assert stock_of(profile).minimum == 2
    layout = check(laid(6, 5, profile=profile, tolerate=1, micro_batches=20))
    assert sorted(len(line.ranks) for line in layout.pipelines) == [2, 3]
    by_size = {len(line.ranks): len(share) for line, share in zip(layout.pipelines, layout.shares(20), strict=True)}
    assert by_size == {2: 8, 3: 12}
    quickest = min(layout.pipelines, key=lambda line: line.template.seconds(1) if line.template else 0.0)
    assert [len(share) for share in layout.shares(1)] == [int(line is quickest) for line in layout.pipelines]


def test_a_copy_that_broke_off_counts_with_its_longest_run() -> None:
    profile = uniform(4, memory=700 << 20)
    held = {"w0": {0, 2, 3}, "w1": {0}}
    layout = check(laid(4, 2, profile=profile, tolerate=0, held=held))
    assert layout.pipelines[0].ranks == (1, 0)
    assert laid(4, 2, profile=profile, tolerate=0).pipelines[0].ranks == (0, 1)


# --- the stock --------------------------------------------------------------------------------------


def test_what_others_have_seen_changes_no_layout() -> None:
    """Who was there when there were more workers has more templates than who joined later."""
    profile = uneven(9, 3)
    asked: list[dict[str, Any]] = [
        {"workers": n, "tolerate": f, "stages": s} for n in (1, 3, 5, 6) for f in (0, 1) for s in (None, 3)
    ]
    stock._stock.cache_clear()
    alone = []
    for one in asked:
        alone.append(plan(9, profile=profile, **one))
        stock._stock.cache_clear()
    stock_of(profile).templates(40, tolerate=0)
    assert list(stock_of(profile).templates(5, tolerate=1).by_nodes) == [1, 2, 3, 4, 5]
    assert [plan(9, profile=profile, **one) for one in asked] == alone


def test_after_a_loss_no_template_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(uneven(9, 4), notes={"not": "hashable"})
    stock._stock.cache_clear()
    stock_of(profile).templates(8, tolerate=0)
    made: list[int] = []

    def make(*args: Any, **kwargs: Any) -> None:
        made.append(kwargs["nodes"])
        raise AssertionError

    monkeypatch.setattr(stock, "make_templates", make)
    for count, tolerate in itertools.product(range(1, 9), range(4)):
        check(laid(9, count, profile=replace(profile), tolerate=tolerate))
    assert made == []
    with pytest.raises(AssertionError):
        laid(9, 9, profile=profile)
    assert made == [9]


# --- fixed stages -----------------------------------------------------------------------------------


def test_fixed_stages_without_a_profile_have_equal_numbers_of_layers() -> None:
    layout = check(laid(10, 7, stages=3))
    assert shape(layout) == [[3, 3, 4]] * 2
    assert "1 worker left over" in layout.reason
    assert shape(check(laid(10, 4, stages=[1, 9]))) == [[1, 9]] * 2
    assert layout.shares(7) == [range(0, 3), range(3, 7)]


def test_a_number_of_stages_is_cut_by_the_profile() -> None:
    slow = [replace(layer, forward=0.09) if n == 0 else layer for n, layer in enumerate(uniform(4).layers)]
    profile = replace(uniform(4), layers=tuple(slow))
    layout = check(laid(4, 4, stages=2, profile=profile))
    assert shape(layout) == [[1, 3]] * 2
    assert layout.pipelines[0].template is stock_of(profile).template(2)
    assert shape(check(laid(4, 4, stages=[2, 2], profile=profile))) == [[2, 2]] * 2


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (0, "1 to 10"),
        (11, "11.*10"),
        ([3, 3], r"6.*10.*\[5, 5\]"),
        ([10, 0], "10, 0"),
        ([], "stages"),
        ([1] * 11, r"stages=\[1, 1, 1, 1, 1, 1, 1, 1, 1, 1\]"),
    ],
)
def test_stages_that_cannot_be(stages: Stages, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(10, 4, stages=stages)


@pytest.mark.parametrize("stages", [1, 2, [2, 2]])
def test_fixed_stages_that_do_not_fit_the_memory_are_refused(stages: Stages) -> None:
    profile = uniform(4, memory=500 << 20)
    assert stock_of(profile).minimum == 4
    with pytest.raises(UsageError, match="memory"):
        plan(4, 8, stages=stages, profile=profile)


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"4.*10"):
        plan(10, 4, profile=uniform(4))


@pytest.mark.parametrize("workers", range(1, 4))
def test_fewer_workers_than_stages_merge_neighbours(workers: int) -> None:
    layout = check(laid(10, workers, stages=[1, 2, 3, 4]))
    assert [line.ranks for line in layout.pipelines] == [tuple(range(workers))]
    ends = {0, 1, 3, 6, 10}
    assert {layers.start for layers in layout.pipelines[0].layers} < ends
    assert shape(layout)[0] == {1: [10], 2: [6, 4], 3: [3, 3, 4]}[workers]
    assert f"merged into {workers}" in layout.reason
    assert (layout.tolerate, layout.minimum) == (0, 1)


@judge.examples(50)
@given(st.data())
def test_merged_stages_are_the_most_even_that_fit(data: st.DataObject) -> None:
    layers, seed = data.draw(st.integers(2, 9)), data.draw(st.integers(0, 5))
    profile = data.draw(st.sampled_from([None, uneven(layers, seed), uneven(layers, seed, memory=150)]))
    bounds = data.draw(st.sampled_from([cut for n in range(1, layers + 1) for cut in cuts(layers, n)]))

    def longest(cut: Sequence[int]) -> float:
        spans = itertools.pairwise(cut)
        if profile is None:
            return max(stop - first for first, stop in spans)
        return max(sum(layer.forward + layer.backward for layer in profile.layers[a:b]) for a, b in spans)

    fitting = {}
    for stages in range(1, len(bounds) - 1):
        options = [(0, *inner, layers) for inner in itertools.combinations(bounds[1:-1], stages - 1)]
        fitting[stages] = [cut for cut in options if profile is None or fits(profile, cut)]
        found = merged(bounds, stages, profile)
        if not fitting[stages]:
            assert found is None
            continue
        assert found in fitting[stages]
        assert longest(found) == pytest.approx(min(map(longest, fitting[stages])))
    able = [stages for stages, options in fitting.items() if options] + [len(bounds) - 1]
    assert fewest_workers(bounds, profile) == able[0]
    for workers in range(1, layers + 2):
        chosen = best_merge(bounds, workers, profile)
        possible = [stages for stages in able if stages <= workers]
        assert (chosen and len(chosen) - 1) == (possible[-1] if possible else None)


def moved(layout: Layout, workers: Sequence[str], held: Mapping[str, range], sizes: Sequence[int]) -> int:
    roles = {workers[rank]: role.layers for rank in range(layout.size) if (role := layout.role(rank))}
    return sum(sizes[n] for worker, layers in roles.items() for n in layers if n not in held.get(worker, ()))


@judge.examples(30)
@given(st.data())
def test_fixed_stages_move_the_fewest_bytes(data: st.DataObject) -> None:
    layers, count, stages = 6, data.draw(st.integers(2, 6)), data.draw(st.sampled_from([2, 3, [1, 2, 3]]))
    workers = data.draw(st.permutations(names(count)))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    ends = st.tuples(st.integers(0, layers), st.integers(0, layers))
    held = {worker: range(*sorted(data.draw(ends))) for worker in workers}
    layout = check(laid(layers, workers, stages=stages, sizes=sizes, held=held))
    places = [part for line in layout.pipelines for part in line.layers]
    least = min(
        sum(sizes[n] for worker, part in zip(chosen, places, strict=True) for n in part if n not in held[worker])
        for chosen in itertools.permutations(workers, len(places))
    )
    assert moved(layout, workers, held, sizes) == least


@pytest.mark.parametrize("stages", [None, 2])
@pytest.mark.parametrize("hosts", [{}, {worker: f"host {number % 3}" for number, worker in enumerate(names(9))}])
def test_a_generation_of_the_same_workers_moves_nothing(stages: Stages, hosts: Mapping[str, str]) -> None:
    for seed, count in itertools.product(range(3), range(4, 10)):
        profile = uneven(8, seed, memory=80)
        asked: dict[str, Any] = {"profile": profile, "stages": stages, "hosts": hosts, "micro_batches": 32}
        workers = names(count)
        first = laid(8, workers, **asked)
        held = {workers[rank]: role.layers for rank in range(count) if (role := first.role(rank))}
        sizes = [layer.state_bytes for layer in profile.layers]
        again = laid(8, workers, held=held, **asked)
        assert moved(again, workers, held, sizes) == 0
        shuffled = random.Random(seed).sample(workers, count)
        assert moved(laid(8, shuffled, held=held, **asked), shuffled, held, sizes) == 0
        assert moved(again, workers, {}, sizes) > 0


def test_sizes_decide_who_moves() -> None:
    """Two workers, two places: who goes where is a matter of bytes."""
    held = {"w0": range(1, 2), "w1": range(0, 2)}
    first = laid(4, 2, stages=[2, 2], held=held, sizes=[1, 1, 1, 1])
    assert first.pipelines[0].ranks == (1, 0)
    held = {"w0": range(0, 3), "w1": range(1, 2)}
    assert laid(4, 2, stages=[2, 2], held=held, sizes=[9, 1, 1, 1]).pipelines[0].ranks == (0, 1)
    assert laid(4, 2, stages=[2, 2], held=held, sizes=[1, 1, 9, 1]).pipelines[0].ranks == (1, 0)


# --- leavers and shortage ---------------------------------------------------------------------------


def test_a_leaver_stays_only_where_the_others_could_not_hold_the_model() -> None:
    profile = uniform(6, memory=1_300 << 20)
    assert stock_of(profile).minimum == 2
    workers, leaving = names(4), {"w1", "w2", "w3"}
    layout = check(laid(6, workers, profile=profile, leaving=leaving, held={"w2": range(3)}))
    assert sorted(layout.pipelines[0].ranks) == [0, 2], "the one that holds something"
    assert layout.pipelines[0].ranks == (2, 0)
    assert (layout.tolerate, "w2 cannot leave" in layout.reason) == (0, True)
    both = check(laid(6, workers, profile=profile, leaving={"w1", "w3"}))
    assert sorted(both.pipelines[0].ranks) == [0, 2]
    assert "cannot leave" not in both.reason


def test_too_few_to_hold_the_model() -> None:
    profile = uniform(6, memory=1_300 << 20)
    layout = plan(6, 1, profile=profile)
    assert isinstance(layout, Shortage)
    assert (layout.nodes, layout.needed) == (1, 2)
    assert layout.reason
    fixed = plan(6, 1, profile=profile, stages=3)
    assert isinstance(fixed, Shortage)
    assert fixed.needed == 2, "three stages may be merged into two"


# --- hosts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, None])
def test_copies_of_a_layer_sit_on_different_hosts(stages: Stages) -> None:
    profile = uniform(6, memory=1_300 << 20)
    hosts = {"w0": "left", "w1": "right", "w2": "left", "w3": "right"}
    layout = check(laid(6, 4, profile=profile, stages=stages, hosts=hosts))
    assert shape(layout) == [[3, 3]] * 2
    for layer in range(6):
        assert {hosts[f"w{rank}"] for rank in layout.holders(layer)} == {"left", "right"}
    one = check(laid(6, 4, profile=profile, stages=stages, hosts=dict.fromkeys(hosts, "left")))
    assert one == laid(6, 4, profile=profile, stages=stages)


def test_who_leaves_is_not_called_back_for_the_sake_of_hosts() -> None:
    hosts = {"w0": "left", "w1": "left", "w2": "right"}
    layout = check(laid(6, 3, hosts=hosts, leaving={"w2"}))
    assert layout.role(2) is None


# --- fixed cuts on their own ------------------------------------------------------------------------


def test_a_cut_of_a_number_is_the_template_s() -> None:
    profile = uneven(8, 2)
    template = stock_of(profile).template(3)
    assert template is not None
    assert fixed_cut(8, 3, profile) == (0, *(role.stop for role in template.roles))
    assert fixed_cut(8, 8, None) == tuple(range(9))


def test_shares_are_worked_out_once_and_handed_out_as_copies() -> None:
    layout = laid(6, 5, profile=uniform(6, memory=1_300 << 20), micro_batches=20)
    layout.shares(20).clear()
    assert [index for share in layout.shares(20) for index in share] == list(range(20))
    mixed = replace(layout, pipelines=(layout.pipelines[0], PlacedPipeline(ranks=(4,), layers=(range(6),))))
    assert mixed.shares(4) == [range(0, 2), range(2, 4)], "without a template, equally"
