"""Nodes take the places that move the fewest bytes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.place import natural, place
from tests.plan import judge

LAYERS = judge.cnn(random.Random(0), 8).layers
SIZES = [layer.state_bytes for layer in LAYERS]
ranges = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: range(min(pair), max(pair)))


@given(st.lists(ranges, min_size=1, max_size=6), st.lists(ranges, min_size=6, max_size=6), st.integers(0, 6))
@judge.examples(60)
def test_equal_to_trying_every_assignment(wanted: list[range], has: list[range], spare: int) -> None:
    count = min(len(wanted) + spare, 6)
    held = {f"n{number}": layers for number, layers in enumerate(has[:count])}
    found = place(wanted, list(held), held, LAYERS)
    assert sorted([*found.nodes, *found.spares]) == sorted(held)
    assert len(found.nodes) == len(wanted)
    best = min(
        sum(judge.moved({node: role}, held, SIZES) for node, role in zip(order, wanted, strict=True))
        for order in itertools.permutations(held, len(wanted))
    )
    mine = sum(judge.moved({node: role}, held, SIZES) for node, role in zip(found.nodes, wanted, strict=True))
    assert mine == best
    assert found.moved_bytes == (best if any(held.values()) else 0)


def test_who_holds_a_place_keeps_it() -> None:
    wanted = [range(0, 4), range(4, 8), range(0, 4), range(4, 8)]
    held = {"d": range(0, 4), "c": range(4, 8), "b": range(0, 4), "a": range(4, 8)}
    found = place(wanted, list("abcd"), held, LAYERS)
    assert found.moved_bytes == 0
    assert all(held[node] == role for node, role in zip(found.nodes, wanted, strict=True))


def test_before_anything_is_held_nothing_moves() -> None:
    found = place([range(0, 4), range(4, 8)], ["n10", "n9"], {}, LAYERS)
    assert found.moved_bytes == 0
    assert found.nodes == ("n9", "n10")


@given(st.permutations(["n1", "n01", "n2", "n10", "x", "", "7", "³", "a-b", "1a"]))
def test_the_order_of_the_argument_does_not_matter(nodes: list[str]) -> None:
    """Names that people would sort alike (n1, n01) too."""
    wanted = [range(0, 2), range(2, 4), range(4, 8)]
    held = {"n1": range(0, 2), "n01": range(0, 2)}
    assert place(wanted, nodes, held, LAYERS) == place(wanted, sorted(nodes), held, LAYERS)


@given(st.lists(st.text(max_size=6), unique=True, max_size=8), st.randoms(use_true_random=False))
def test_any_names_have_one_order(names: list[str], rng: random.Random) -> None:
    shuffled = rng.sample(names, len(names))
    assert place([], shuffled, {}, LAYERS).spares == place([], names, {}, LAYERS).spares
    assert set(map(natural, shuffled)) == set(map(natural, names))


@pytest.mark.parametrize("count", [200])
def test_many_nodes_are_placed_exactly(count: int) -> None:
    """A lost node and a shifted cut: what moves is what brute force on the changed part alone says."""
    wanted = [range(0, 3), range(3, 8)] * (count // 2)
    held = {f"n{number}": (range(0, 3) if number % 2 == 0 else range(3, 8)) for number in range(count)}
    held["n0"] = range(0)
    assert place(wanted, list(held), held, LAYERS).moved_bytes == sum(SIZES[0:3])
