"""What is cut by the definition of a pattern is put together again by its rule, of any shape and number of holders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.pieces import Stored, TensorEntry, entry_of, row_major
from holdfast.checkpoint.rules import (
    Flat,
    Fragment,
    Pattern,
    Replicate,
    Rule,
    Rules,
    Shard,
    Unique,
    copies,
    lay_out,
    merge,
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tensor, what each holder has of it by the definition of a pattern, and the rule that says so."""

    tensor: Array
    local: dict[tuple[tuple[str, int], ...], Array]
    pattern: Pattern
    axes: tuple[str, ...] = ()
    times: int = 1
    unflattened: tuple[int, ...] | None = None


# --- cutting, by definition and without the code that is tested ------------------------------------


def chunks(array: Array, n: int, dim: int) -> list[Array]:
    """What torch.chunk gives, with empty arrays for the holders it leaves out."""
    step = -(-array.shape[dim] // n)
    return [
        array.take(range(min(i * step, array.shape[dim]), min((i + 1) * step, array.shape[dim])), dim) for i in range(n)
    ]


def at(**place: int) -> tuple[tuple[str, int], ...]:
    return tuple(place.items())


def numbers(shape: tuple[int, ...]) -> Array:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
holders = st.integers(1, 5)


@st.composite
def cut_plain(draw: st.DrawFn) -> Case:
    tensor = numbers(draw(shapes))
    dim, n = draw(st.integers(-tensor.ndim, tensor.ndim - 1)), draw(holders)
    local = {at(tp=i): part for i, part in enumerate(chunks(tensor, n, dim))}
    return Case(tensor=tensor, local=local, pattern=Shard(dim=dim))


@st.composite
def cut_padded(draw: st.DrawFn) -> Case:
    tensor = numbers(draw(shapes))
    dim, n = draw(st.integers(0, tensor.ndim - 1)), draw(holders)
    size = tensor.shape[dim]
    padding = [(0, 0)] * tensor.ndim
    padding[dim] = (0, draw(st.integers(0, 9)))
    padded = np.pad(tensor, padding, constant_values=-1)
    local = {at(tp=i): part for i, part in enumerate(chunks(padded, n, dim))}
    return Case(tensor=tensor, local=local, pattern=Shard(dim=dim, size=size))


@st.composite
def cut_fused(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    rest, dim, n = draw(shapes), draw(st.integers(0, 1)), draw(holders)
    tensor = numbers((*rest[:dim], sum(sizes), *rest[dim:]))
    subs = np.split(tensor, np.cumsum(sizes)[:-1], axis=dim)
    local = {at(tp=i): np.concatenate([chunks(sub, n, dim)[i] for sub in subs], axis=dim) for i in range(n)}
    equal = len(set(sizes)) == 1 and draw(st.booleans())
    return Case(tensor=tensor, local=local, pattern=Shard(dim=dim, parts=len(sizes) if equal else tuple(sizes)))


@st.composite
def cut_grouped(draw: st.DrawFn) -> Case:
    groups, each = draw(st.integers(1, 6)), draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    n, width = draw(holders), draw(st.integers(1, 3))
    tensor = numbers((groups * sum(each), width))
    subs = np.split(tensor, np.cumsum([groups * size for size in each])[:-1])
    woven = np.concatenate([sub.reshape(groups, -1, width) for sub in subs], axis=1)  # per group: q…q k v
    local = {at(tp=i): part.reshape(-1, width) for i, part in enumerate(chunks(woven, n, 0))}
    parts = tuple(groups * size for size in each)
    return Case(tensor=tensor, local=local, pattern=Shard(dim=0, parts=parts, groups=groups))


@st.composite
def cut_flat(draw: st.DrawFn) -> Case:
    tensor = numbers(draw(st.one_of(shapes, st.just(()))))
    n, extra = draw(holders), draw(st.integers(0, 9))
    flat = np.pad(tensor.reshape(-1), (0, extra), constant_values=-1)
    local = {at(dp=i): part for i, part in enumerate(chunks(flat, n, 0))}
    given = draw(st.booleans())
    pattern = Flat(shape=tensor.shape) if given else Flat()
    return Case(tensor=tensor, local=local, pattern=pattern, unflattened=None if given else tensor.shape)


@st.composite
def cut_twice(draw: st.DrawFn) -> Case:
    """Two cuts on two axes; along one dim, the second cuts what the first has left."""
    tensor = numbers(draw(shapes))
    dims = [draw(st.integers(0, tensor.ndim - 1)) for _ in range(2)]
    n, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    local = {
        at(tp=i, dp=j): inner
        for i, outer in enumerate(chunks(tensor, n, dims[0]))
        for j, inner in enumerate(chunks(outer, m, dims[1]))
    }
    return Case(tensor=tensor, local=local, pattern=(Shard(dim=dims[0]), Shard(dim=dims[1], axis="dp")))


@st.composite
def cut_fused_then_flat(draw: st.DrawFn) -> Case:
    """ZeRO inside tensor parallelism, along any dim: flat ranges of each holder's part of a fused tensor."""
    sizes = draw(st.lists(st.sampled_from([0, 2, 4]), min_size=1, max_size=3))
    n, m, dim = 2, draw(st.integers(1, 3)), draw(st.integers(0, 2))
    rest = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2).map(tuple))
    tensor = numbers((*rest[:dim], sum(sizes), *rest[dim:]))
    subs = np.split(tensor, np.cumsum(sizes)[:-1], axis=dim)
    local, shape = {}, ()
    for i in range(n):
        mine = np.concatenate([chunks(sub, n, dim)[i] for sub in subs], axis=dim)
        shape = mine.shape
        padded = np.pad(mine.reshape(-1), (0, draw(st.integers(0, 4))), constant_values=-1)
        local |= {at(tp=i, dp=j): part for j, part in enumerate(chunks(padded, m, 0))}
    pattern = (Shard(dim=dim, parts=tuple(sizes)), Flat(axis="dp"))
    return Case(tensor=tensor, local=local, pattern=pattern, unflattened=shape)


@st.composite
def copied(draw: st.DrawFn) -> Case:
    """Any cut again on every holder along two more axes; or the whole tensor, a scalar perhaps."""
    if draw(st.booleans()):
        tensor = numbers(draw(st.one_of(shapes, st.just(()))))
        local = {at(tp=i, pp=j): tensor for i, j in product(range(draw(holders)), range(2))}
        return Case(tensor=tensor, local=local, pattern=Replicate(), times=len(local))
    case = draw(st.one_of(cut_plain(), cut_fused(), cut_padded()))
    local = {
        (*place, ("ep", j), ("pp", k)): part for j, k in product(range(2), (1, 3)) for place, part in case.local.items()
    }
    return replace(case, local=local, axes=("ep", "pp"), times=4)


@st.composite
def alone(draw: st.DrawFn) -> Case:
    tensor = numbers(draw(st.one_of(shapes, st.just(()))))
    return Case(tensor=tensor, local={at(tp=0, pp=draw(st.integers(0, 3))): tensor}, pattern=Unique())


cases = st.one_of(
    cut_plain(),
    cut_padded(),
    cut_fused(),
    cut_grouped(),
    cut_flat(),
    cut_twice(),
    cut_fused_then_flat(),
    copied(),
    alone(),
)


def fragments_of(case: Case, order: Callable[[int], float] = float) -> list[Fragment]:
    made = [
        Fragment(
            name="w",
            shape=part.shape,
            dtype=torch.int32,
            place=dict(place),
            holder=i,
            unflattened=case.unflattened,
        )
        for i, (place, part) in enumerate(case.local.items())
    ]
    return sorted(made, key=lambda fragment: order(fragment.holder))


def rules_of(case: Case) -> Rules:
    return Rules([Rule(match="w", pattern=case.pattern, copies=case.axes)])


# --- putting together -----------------------------------------------------------------------------


@given(case=cases, seed=st.integers(0, 99))
@settings(max_examples=400, deadline=None)
def test_what_is_cut_is_put_together_again(case: Case, seed: int) -> None:
    locals_ = list(case.local.values())
    fragments = fragments_of(case, order=lambda holder: hash((holder, seed)))
    laid = lay_out(fragments, rules_of(case))["w"]

    assert (laid.shape, laid.dtype, laid.mean) == (case.tensor.shape, torch.int32, False)
    made = np.full(laid.shape, -7, np.int32)
    times = np.zeros(laid.shape, int)
    for part in laid.parts:
        local = locals_[fragments[part.fragment].holder][part.local.slices()]
        made[part.box.slices()] = local.reshape(part.box.shape)
        times[part.box.slices()] += 1
    np.testing.assert_array_equal(made, case.tensor)
    assert (times == case.times).all()
    assert len(copies(laid)) == (case.times - 1) * len({part.box for part in laid.parts})


@given(case=cases, transposed=st.booleans(), split=st.booleans())
@settings(max_examples=300, deadline=None)
def test_stored_fragments_become_entries(case: Case, transposed: bool, split: bool) -> None:
    files: dict[str, bytes] = {}
    fragments = []
    for fragment, local in zip(fragments_of(case), case.local.values(), strict=True):
        stored = write(local, f"{fragment.holder}.bin", files, transposed=transposed and local.ndim > 1)
        fragments.append(replace(fragment, stored=halved(stored) if split else stored))
    entry = merge(fragments, rules_of(case))["w"]

    assert (entry.shape, entry.dtype) == (case.tensor.shape, torch.int32)
    made = np.full(entry.shape, -7, np.int32)
    for piece in reversed(entry.pieces):  # where boxes overlap, the first counts
        assert piece.stored.shape == piece.box.shape
        made[piece.box.slices()] = read(piece.stored, files)
    np.testing.assert_array_equal(made, case.tensor)


@pytest.mark.parametrize("groups", [None, 10**9])
def test_an_empty_tensor_has_any_number_of_equal_parts(groups: int | None) -> None:
    """Also as many as a hostile rule says, without a list of them."""
    assert Shard(dim=0, parts=10**9, groups=groups).runs([0, 0]) == (0, [[(0, 0)], [(0, 0)]])


def write(array: Array, name: str, files: dict[str, bytes], *, transposed: bool) -> Stored:
    strides = row_major(array.shape)
    files[name] = b"head" + array.tobytes()
    if transposed:
        files[name] = b"head" + array.T.tobytes()
        strides = tuple(reversed(row_major(array.shape[::-1])))
    return Stored(file=name, offset=4, dtype=torch.int32, shape=array.shape, strides=strides)


def halved(stored: Stored) -> TensorEntry:
    """The same array as two pieces of a tensor."""
    whole = entry_of(stored)
    if not stored.shape or stored.shape[0] < 2:
        return whole
    box, middle = whole.pieces[0].box, stored.shape[0] // 2
    first = replace(box, shape=(middle, *box.shape[1:]))
    second = replace(box, offset=(middle, *box.offset[1:]), shape=(stored.shape[0] - middle, *box.shape[1:]))
    return replace(whole, pieces=tuple(replace(whole.pieces[0], box=b, stored=stored.part(b)) for b in (first, second)))


def read(stored: Stored, files: dict[str, bytes]) -> Array:
    strides = tuple(4 * s for s in stored.strides)
    return np.ndarray(stored.shape, np.int32, files[stored.file], stored.offset, strides)
