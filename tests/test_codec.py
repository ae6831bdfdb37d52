"""State crosses a wire as JSON and tensors, and comes out as it was."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import UsageError

TENSORS = [
    torch.tensor([1.5, -0.0, math.nan, math.inf]),
    torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
    torch.tensor(7, dtype=torch.int64),
    torch.tensor(0.25),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.arange(6.0).view(2, 3).t(),
]

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
scalars = plain | st.sampled_from(TENSORS)
dict_keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(dict_keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["tensor", "dict", "list", "tuple"]), inner)
    ),
    max_leaves=12,
)


def over_a_wire(value: Any) -> Any:
    text, sent = codec.flatten(value)
    received = codec.empty_tensors(text)
    for room, tensor in zip(received, sent, strict=True):
        room.copy_(tensor)
    return codec.unflatten(text, received)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        equal = a.shape == b.shape and a.dtype == b.dtype
        return equal and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    return bool(a == b)


# Zero-dimensional tensors cannot be viewed as bytes: compare them as vectors of one.
def as_vectors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (list(value.shape), value.reshape(-1))
    if isinstance(value, list | tuple):
        return type(value)(as_vectors(item) for item in value)
    if isinstance(value, dict):
        return {key: as_vectors(item) for key, item in value.items()}
    return value


@given(values)
@settings(deadline=None)
def test_a_value_comes_out_as_it_went_in(value: Any) -> None:
    assert same(as_vectors(over_a_wire(value)), as_vectors(value))


@given(values)
@settings(deadline=None, max_examples=30)
def test_equal_values_have_equal_texts(value: Any) -> None:
    assert codec.flatten(value)[0] == codec.flatten(over_a_wire(value))[0]


def test_the_receivers_tensors_are_its_own() -> None:
    sent = torch.ones(3)
    over_a_wire([sent])[0].zero_()
    assert sent.sum() == 3


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"groups": [{"lr": object()}]}, r"state\.groups\[0\]\.lr is an object"),
        ({"fn": len}, r"state\.fn is a builtin_function_or_method"),
        ({"s": {1}}, r"state\.s is a set"),
        ({1: 1j}, r"state\.1 is a complex"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_name(value: Any, where: str) -> None:
    with pytest.raises(UsageError, match=where):
        codec.flatten(value)


def test_an_ordered_dict_keeps_its_order() -> None:
    assert list(over_a_wire(OrderedDict(b=1, a=2))) == ["b", "a"]
