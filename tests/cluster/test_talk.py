"""Sums along the tree and parts for everybody, in few messages: the same bits, whoever has what."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import talk
from holdfast.cluster.talk import Shared, add_up, nodes_of, share
from holdfast.plan.batch import shares
from holdfast.plan.tree import Node, combine, tree_sum
from tests.engine.memory_group import Network, on_workers

SIZES = [1, 2, 3, 5, 8, 9, 12]


@pytest.fixture(params=["told to all", "in rounds"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(talk, "DIRECT", 99 if request.param == "told to all" else 1)
    return request.param


def of_very_different_sizes(count: int, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [chance.uniform(-1, 1) * 2.0 ** chance.randint(-30, 30) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ["by rank", "mixed", "few have any"])
def test_sums_are_those_of_the_tree(size: int, order: str) -> None:
    """Also if ranks do not have their micro-batches in order, as in pipelines, and some have none."""
    for count in (0, 1, 7, 16, 33):
        rows = [of_very_different_sizes(count, seed) for seed in range(3)]
        parts = shares(count, size if order != "few have any" else max(1, size // 3))
        parts += [range(0)] * (size - len(parts))
        if order != "by rank":
            random.Random(size).shuffle(parts)

        def work(group: Any, rows: Any = rows, parts: Any = parts) -> tuple[list[float], float]:
            mine = [[value if leaf in parts[group.rank] else 1e300 for leaf, value in enumerate(row)] for row in rows]
            head = torch.tensor([2.0**group.rank], dtype=torch.float64)
            sums = add_up(group, Shared(rows=mine, shares=parts), head, tag=0)
            return sums, float(head)

        expected = [tree_sum(row) for row in rows]
        assert on_workers(size, work) == [(expected, 2.0**size - 1)] * size


def test_a_message_has_a_few_numbers_however_many_micro_batches_there_are(way: str) -> None:
    sent = {}
    for count in (64, 4096):
        network = Network(8)

        def work(group: Any, count: int = count) -> None:
            values = [1.0] * count
            add_up(group, Shared(rows=[values], shares=shares(count, 8)), torch.zeros(1, dtype=torch.float64), tag=0)

        on_workers(8, work, network)
        sent[count] = network.bytes
    assert sent[64] == sent[4096]


@given(pieces=st.lists(st.integers(0, 9), min_size=1, max_size=20), seed=st.integers(0, 99), first=st.integers(0, 19))
def test_what_a_block_has_together_does_not_depend_on_how_it_is_put_together(
    pieces: list[int], seed: int, first: int
) -> None:
    ends = [sum(pieces[: n + 1]) for n in range(len(pieces))]
    spans = [(end - piece, end) for piece, end in zip(pieces, ends, strict=True)]
    random.Random(seed).shuffle(spans)
    start, stop = first % len(spans), len(spans)
    leaves = [leaf for begin, end in spans[start:stop] for leaf in range(begin, end)]
    random.Random(seed).shuffle(leaves)
    at_once = combine([(Node(0, leaf), None) for leaf in leaves], ends[-1], lambda left, right: None)
    assert list(nodes_of(tuple(spans), ends[-1], start, stop)) == [node for node, _ in at_once]


@pytest.mark.parametrize("size", SIZES)
def test_everybody_gets_everybodys_part(size: int) -> None:
    """Of different sizes; some have nothing to say."""
    sizes = [(7 * rank) % 5 for rank in range(size)]

    def work(group: Any) -> list[list[int]]:
        mine = torch.full((sizes[group.rank],), group.rank, dtype=torch.int32)
        return [part.tolist() for part in share(group, mine, sizes, tag=0)]

    assert on_workers(size, work) == [[[rank] * sizes[rank] for rank in range(size)]] * size


def test_control_a_sum_in_another_order_is_another_one() -> None:
    values = of_very_different_sizes(33)
    assert sum(values) != tree_sum(values)
