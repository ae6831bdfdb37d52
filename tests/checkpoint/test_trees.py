"""Merging the trees of several ranks: stages add up, copies must agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.pieces import Ref
from holdfast.checkpoint.trees import is_optimizer, merge_trees
from holdfast.errors import UsageError


def optimizer(*groups: dict[str, Any], **state: Any) -> dict[str, Any]:
    return {"state": state, "param_groups": list(groups)}


def test_stages_add_up_and_copies_are_one() -> None:
    first = {"model": {"a": Ref(name="model/a"), "c": Ref(name="model/c")}, "step": 7, "only first": [1]}
    second = {"model": {"b": Ref(name="model/b"), "c": Ref(name="model/c")}, "step": 7}
    merged = merge_trees([first, second, first])
    assert merged["model"] == {name: Ref(name=f"model/{name}") for name in "acb"}
    assert (merged["step"], merged["only first"]) == (7, [1])
    assert list(first["model"]) == ["a", "c"], "what was merged is not changed"


def test_optimizers_add_up_group_by_group() -> None:
    first = optimizer({"params": ["a"], "lr": 1}, {"params": ["b"], "lr": 2}, a={"step": 3})
    second = optimizer({"params": ["c", "a"], "lr": 1}, {"params": ["d"], "lr": 2}, c={"step": 3})
    third = optimizer({"params": ["e"], "lr": 9})
    assert merge_trees([first, second, third]) == optimizer(
        {"params": ["a", "c"], "lr": 1},
        {"params": ["b", "d"], "lr": 2},
        {"params": ["e"], "lr": 9},
        a={"step": 3},
        c={"step": 3},
    )


def test_optimizers_in_lists_add_up_too() -> None:
    one, two = optimizer({"params": ["a"], "lr": 1}), optimizer({"params": ["b"], "lr": 1})
    assert merge_trees([{"all": [one]}, {"all": [two]}]) == {"all": [optimizer({"params": ["a", "b"], "lr": 1})]}


def test_an_empty_group_of_a_stage_is_not_in_the_way() -> None:
    first = optimizer({"params": ["a"], "lr": 1}, {"params": [], "lr": 5})
    second = optimizer({"params": [], "lr": 7}, {"params": ["b"], "lr": 2})
    assert [group["params"] for group in merge_trees([first, second])["param_groups"]] == [["a"], [], ["b"]]


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        ({"run": {"seed": 1}}, {"run": {"seed": 2}}, "run/seed"),
        ({"flag": 1}, {"flag": True}, "flag"),
        ({"lr": 1}, {"lr": 1.0}, "lr"),
        ({"history": [1, 2]}, {"history": [1, 2, 3]}, "history"),
        ({"pair": (1, 2)}, {"pair": (1, 3)}, "pair/1"),
        ({"w": Ref(name="w")}, {"w": 3}, "w"),
        ({"o": optimizer({"params": ["a"], "lr": 1})}, {"o": optimizer({"params": ["a"], "lr": 2})}, "o/a"),
    ],
)
def test_what_is_not_the_same_is_refused_by_name(a: Any, b: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"workers disagree on (the settings of )?{name}:"):
        merge_trees([a, a, b])


def test_not_a_number_is_the_same_as_itself() -> None:
    assert math.isnan(merge_trees([{"loss": [math.nan]}, {"loss": [math.nan]}])["loss"][0])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=2), VALUES, max_size=4), st.integers(1, 4))
def test_copies_of_anything_are_that_thing(tree: dict[str, Any], count: int) -> None:
    assert repr(merge_trees([tree] * count)) == repr(tree)


def test_only_what_torch_gives_is_an_optimizer() -> None:
    assert is_optimizer(optimizer())
    assert not is_optimizer({"state": {}})
    assert not is_optimizer({"state": {}, "param_groups": {}})
