"""Whoever computes the leaves, and however many they are: the root is the same to the last bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.tree import Adder, Node, lift, roots, tree_sum
from tests.plan import judge


@st.composite
def partitions(draw: st.DrawFn) -> list[range]:
    """Consecutive shares of up to 40 leaves among any number of workers; some may be empty."""
    leaves = draw(st.integers(1, 40))
    cuts = sorted(draw(st.lists(st.integers(0, leaves), max_size=8)))
    return [range(a, b) for a, b in zip([0, *cuts], [*cuts, leaves], strict=True)]


def gradients(leaves: int, seed: int) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that any other order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 12, (leaves, 16), generator=generator)
    return list(torch.randn(leaves, 16, generator=generator) * 2.0**exponents)


def add_up(nodes: list[tuple[Node, torch.Tensor]], leaves: int) -> list[tuple[Node, torch.Tensor]]:
    adder: Adder[torch.Tensor] = Adder(leaves, torch.add)
    for node, value in nodes:
        adder.push(node, value)
    return adder.stack


def one_worker(values: list[torch.Tensor]) -> torch.Tensor:
    ((_, total),) = add_up([(Node(0, i), value) for i, value in enumerate(values)], len(values))
    return total


def by_definition(values: list[torch.Tensor]) -> torch.Tensor:
    """The tree written as a recursion: cut at the largest power of two below the number of leaves."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return by_definition(values[:half]) + by_definition(values[half:])


@given(partitions())
def test_roots_of_any_partition_cover_each_leaf_once(parts: list[range]) -> None:
    leaves = parts[-1].stop
    assert [leaf for share in parts for node in roots(share, leaves) for leaf in node.span(leaves)] == list(
        range(leaves)
    )


@given(partitions())
def test_roots_are_few(parts: list[range]) -> None:
    leaves = parts[-1].stop
    assert all(len(roots(share, leaves)) <= 2 * leaves.bit_length() for share in parts)
    assert len(roots(range(leaves), leaves)) == 1


@given(partitions(), st.integers(0, 2**32))
def test_any_partition_sums_bit_for_bit_as_one_worker(parts: list[range], seed: int) -> None:
    leaves = parts[-1].stop
    values = gradients(leaves, seed)
    sent = [root for share in parts for root in add_up([(Node(0, i), values[i]) for i in share], leaves)]
    ((_, total),) = add_up(sent, leaves)
    assert torch.equal(total, one_worker(values))


@given(st.integers(1, 70), st.integers(0, 2**32))
@judge.examples(50)
def test_one_worker_sums_along_the_tree_of_the_definition(leaves: int, seed: int) -> None:
    values = gradients(leaves, seed)
    assert torch.equal(one_worker(values), by_definition(values))


def test_left_to_right_sums_differ() -> None:
    """The control: without the tree the properties above would not hold."""
    values = gradients(8, seed=0)
    left_to_right = torch.stack(values).new_zeros(16)
    for value in values:
        left_to_right += value
    assert not torch.equal(left_to_right, one_worker(values))


@given(st.integers(1, 200), st.data())
def test_lift_keeps_the_leaves(leaves: int, data: st.DataObject) -> None:
    node = Node(0, data.draw(st.integers(0, leaves - 1)))
    assert lift(node, leaves).span(leaves) == node.span(leaves)


def test_tree_sum_of_nothing_is_zero() -> None:
    assert tree_sum([]) == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(0, 30))
def test_zeros_of_others_do_not_change_a_tree_sum(values: list[float], cut: int) -> None:
    """A vote sums workers' lists of values; where one computed, the others have zeros."""
    mine = [v if i < cut else 0.0 for i, v in enumerate(values)]
    theirs = [0.0 if i < cut else v for i, v in enumerate(values)]
    assert tree_sum([a + b for a, b in zip(mine, theirs, strict=True)]) == tree_sum(values)
