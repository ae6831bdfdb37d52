"""Every micro-batch has a pipeline, and no other split is faster."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.plan.batch import shares, split
from holdfast.plan.profile import uniform
from holdfast.plan.template import Template, make_templates
from tests.plan import judge


@cache
def templates(family: str, seed: int, devices: int) -> dict[int, Template]:
    profile = judge.FAMILIES[family](random.Random(seed), 9)
    return make_templates(profile, nodes=5, tolerate=0, devices=devices).by_nodes


def step(given_out: list[int], chosen: list[Template]) -> float:
    alone = len(chosen) == 1
    return max(template.seconds(n, alone=alone) for template, n in zip(chosen, given_out, strict=True))


menus = st.tuples(st.sampled_from(sorted(judge.FAMILIES)), st.integers(0, 5), st.sampled_from([1, 2]))


@given(menus, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 12))
@judge.examples(60)
def test_equal_to_trying_every_split(menu: tuple[str, int, int], sizes: list[int], more: int) -> None:
    chosen = [templates(*menu)[size] for size in sizes]
    total = len(chosen) + more
    given_out = split(total, chosen)
    assert sum(given_out) == total
    assert min(given_out) >= 1
    alone = len(chosen) == 1
    best = judge.best_split(total, [lambda n, t=t: t.seconds(n, alone=alone) for t in chosen])
    assert step(given_out, chosen) == pytest.approx(best, rel=2e-9)


@given(menus, st.lists(st.integers(1, 5), min_size=2, max_size=7), st.integers(0, 150))
@judge.examples(30)
def test_equal_to_dynamic_programming(menu: tuple[str, int, int], sizes: list[int], more: int) -> None:
    chosen = [templates(*menu)[size] for size in sizes]
    total = len(chosen) + more
    given_out = split(total, chosen)
    assert sum(given_out) == total
    best = judge.fastest_split(total, [lambda n, t=t: t.seconds(n) for t in chosen])
    assert step(given_out, chosen) == pytest.approx(best, rel=2e-9)


def test_the_two_judges_agree() -> None:
    chosen = [templates("cnn", 0, 1)[size] for size in (1, 2, 4)]
    seconds = [lambda n, t=t: t.seconds(n) for t in chosen]
    assert judge.best_split(17, seconds) == judge.fastest_split(17, seconds)


def test_control_an_equal_split_is_slower() -> None:
    """Pipelines of unlike size get unlike shares; as many for each would take longer."""
    chosen = [templates("cnn", 0, 1)[size] for size in (1, 4)]
    assert step([20, 20], chosen) > 1.2 * step(split(40, chosen), chosen)


@pytest.mark.parametrize("total", range(7))
def test_too_few_name_the_nearest_number_that_can_be_split(total: int) -> None:
    chosen = [templates("cnn", 0, 1)[1]] * 7
    with pytest.raises(UsageError, match=f"{total} .* 7"):
        split(total, chosen)
    assert split(7, chosen) == [1] * 7


def test_lanes_do_not_lose_micro_batches() -> None:
    """Once, time for one micro-batch was rounded to time for none, and the sum was short."""
    template = make_templates(uniform(12), nodes=13, tolerate=1, devices=2, minimum=1).by_nodes[1]
    assert template.lanes == 2
    for total in range(5, 40):
        assert sum(split(total, [template] * 5)) == total


def test_thousands_are_split_at_once() -> None:
    made = make_templates(uniform(32), nodes=16, tolerate=1, minimum=2).by_nodes
    chosen = [made[2 + number % 5] for number in range(300)]
    given_out = split(100_000, chosen)
    assert sum(given_out) == 100_000
    seconds = [template.seconds(n) for template, n in zip(chosen, given_out, strict=True)]
    assert max(seconds) - min(seconds) < 2 * max(t.seconds(2) - t.seconds(1) for t in chosen)


def test_a_slow_pipeline_beside_a_fast_one_is_no_work() -> None:
    """While the slow one does its single micro-batch, the fast one would have time for millions."""
    slow = make_templates(uniform(2, forward=1000.0, backward=2000.0), nodes=1, tolerate=0).by_nodes[1]
    fast = make_templates(uniform(2, forward=1e-6, backward=2e-6, weight_bytes=1), nodes=1, tolerate=0).by_nodes[1]
    assert split(12, [slow, fast]) == [1, 11]


@given(st.integers(0, 100), st.integers(1, 20))
def test_every_micro_batch_has_one_worker_and_the_shares_are_consecutive(micro_batches: int, workers: int) -> None:
    parts = shares(micro_batches, workers)
    assert len(parts) == workers
    assert [index for share in parts for index in share] == list(range(micro_batches))


@given(st.integers(0, 100), st.integers(1, 20))
def test_no_worker_has_two_more_than_another(micro_batches: int, workers: int) -> None:
    sizes = [len(share) for share in shares(micro_batches, workers)]
    assert max(sizes) - min(sizes) <= 1
