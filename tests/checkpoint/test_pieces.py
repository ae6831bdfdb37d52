"""Boxes and arrays against numpy, which is the judge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.pieces import (
    Box,
    Ref,
    Stored,
    TensorEntry,
    catalogue_tree,
    entry_of,
    flat_boxes,
    name_of,
    row_major,
    whole,
)

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def numbers(shape: Shape) -> Array:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def marked(shape: Shape, *boxes: Box) -> Array:
    """How many of the boxes each element lies in."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices()] += 1
    return counts


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offset=offset, shape=tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


@st.composite
def boxed(draw: st.DrawFn, count: int = 1) -> tuple[Shape, list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


# --- boxes ----------------------------------------------------------------------------------------


@given(case=boxed(count=2))
def test_intersect_is_what_both_cover(case: tuple[Shape, list[Box]]) -> None:
    shape, (a, b) = case
    common = a.intersect(b)
    assert common == b.intersect(a)
    both = marked(shape, a, b) == 2
    if common is None:
        assert not both.any()
    else:
        assert common.numel > 0
        np.testing.assert_array_equal(marked(shape, common) == 1, both)


@given(case=boxed(count=2))
def test_without_leaves_the_rest_once(case: tuple[Shape, list[Box]]) -> None:
    shape, (outer, other) = case
    hole = outer.intersect(other)
    if hole is None:
        return
    left = outer.without(hole)
    assert all(box.numel for box in left)
    np.testing.assert_array_equal(marked(shape, hole, *left), marked(shape, outer))


@given(case=boxed(count=2))
def test_relative_to_counts_from_the_corner(case: tuple[Shape, list[Box]]) -> None:
    shape, (outer, other) = case
    inner = outer.intersect(other)
    if inner is not None:
        tensor = numbers(shape)
        seen = tensor[outer.slices()][inner.relative_to(outer).slices()]
        np.testing.assert_array_equal(seen, tensor[inner.slices()])


def test_boxes_of_scalars() -> None:
    scalar = whole(())
    assert scalar.intersect(scalar) == scalar
    assert scalar.numel == 1
    assert scalar.without(scalar) == []


@given(shape=shapes, data=st.data())
@settings(max_examples=300)
def test_flat_boxes_cover_a_range_exactly_and_in_order(shape: Shape, data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    boxes = list(flat_boxes(shape, start, stop))
    tensor = numbers(shape)
    found = [element for box in boxes for element in tensor[box.slices()].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert all(box.numel and len(box.shape) == len(shape) for box in boxes)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)  # few, however large the tensor is


# --- arrays ---------------------------------------------------------------------------------------


@st.composite
def stored_arrays(draw: st.DrawFn) -> tuple[Stored, bytes, Array]:
    """An array anywhere in a file, permuted and with holes; the file; and what numpy sees there."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step = step * max(shape[dim], 1) + gaps[dim]
    head = 4 * draw(st.integers(0, 3))
    file = np.arange(head // 4 + step, dtype=np.int32).tobytes()
    seen: Array = np.ndarray(shape, np.int32, file, head, tuple(4 * s for s in strides))
    stored = Stored(file="f", offset=head, dtype=torch.int32, shape=shape, strides=tuple(strides))
    return stored, file, seen


def view(stored: Stored, file: bytes) -> Array:
    if 0 in stored.shape:
        return np.empty(stored.shape, np.int32)
    return np.ndarray(stored.shape, np.int32, file, stored.offset, tuple(4 * s for s in stored.strides))


@given(case=stored_arrays(), data=st.data())
@settings(max_examples=300)
def test_a_part_is_what_numpy_slices(case: tuple[Stored, bytes, Array], data: st.DataObject) -> None:
    stored, file, seen = case
    box = data.draw(boxes_in(stored.shape))
    part = stored.part(box)
    np.testing.assert_array_equal(view(part, file), seen[box.slices()])
    assert part.nbytes == seen[box.slices()].nbytes
    if part.nbytes:
        last = view(part, file).reshape(-1)[-1]  # elements are numbered by their places in the file
        assert part.offset + part.span == 4 * (last + 1)
        assert part.offset + part.span <= stored.offset + stored.span
    else:
        assert part.span == 0


@given(case=stored_arrays())
def test_contiguous_is_what_numpy_calls_so(case: tuple[Stored, bytes, Array]) -> None:
    stored, _, seen = case
    assert stored.is_contiguous == seen.flags.c_contiguous


@given(shape=shapes, data=st.data())
def test_flat_and_reshaped_keep_the_order(shape: Shape, data: st.DataObject) -> None:
    count = math.prod(shape)
    file = numbers((count + 2,)).tobytes()
    stored = Stored(file="f", offset=8, dtype=torch.int32, shape=shape, strides=row_major(shape))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = stored.flat(start, stop, (stop - start, 1))
    assert view(part, file).reshape(-1).tolist() == list(range(start + 2, stop + 2))
    np.testing.assert_array_equal(view(stored.reshaped((1, *shape)), file)[0], view(stored, file))


def test_a_strided_array_is_not_reshaped() -> None:
    stored = Stored(file="f", offset=0, dtype=torch.int32, shape=(2, 2), strides=(1, 2))
    with pytest.raises(AssertionError, match="f: a strided array"):
        stored.reshaped((4,))


@given(shape=shapes)
def test_row_major_strides_are_numpys(shape: Shape) -> None:
    if 0 not in shape:  # numpy keeps no strides worth the name for empty arrays
        assert tuple(4 * s for s in row_major(shape)) == numbers(shape).strides


# --- trees ----------------------------------------------------------------------------------------


def scalar_at(offset: int) -> Stored:
    return Stored(file="f", offset=offset, dtype=torch.int32, shape=(), strides=())


def test_a_tree_gives_its_tensors_names_and_keeps_all_else() -> None:
    tree = {"model": {"a/b%": scalar_at(0)}, "list": [1, (scalar_at(4), None)], "size": torch.Size([2, 3]), 5: {}}
    made, tensors = catalogue_tree(tree)
    assert made == {
        "model": {"a/b%": Ref(name="model/a%2Fb%25")},
        "list": [1, (Ref(name="list/1/0"), None)],
        "size": torch.Size([2, 3]),
        5: {},
    }
    assert tensors == {"model/a%2Fb%25": entry_of(scalar_at(0)), "list/1/0": entry_of(scalar_at(4))}
    assert isinstance(made["size"], torch.Size)


def test_entries_are_kept_as_they_are() -> None:
    entry = TensorEntry(shape=(2,), dtype=torch.int32, pieces=())
    assert catalogue_tree({"w": entry})[1]["w"] is entry


@given(
    a=st.lists(st.text("a/%2F5", max_size=3), min_size=1, max_size=3),
    b=st.lists(st.text("a/%2F5", max_size=3), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_different_paths_have_different_names(a: list[str], b: list[str]) -> None:
    assert (name_of(a) == name_of(b)) == (a == b)
