"""Who writes what: every element once, evenly, and the same for everybody who asks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.pieces import Box, whole
from holdfast.checkpoint.who_writes import HeldBoxes, share
from holdfast.errors import UsageError

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def box(*ranges: tuple[int, int]) -> Box:
    return Box(offset=tuple(a for a, _ in ranges), shape=tuple(b - a for a, b in ranges))


def holding(shape: tuple[int, ...], *boxes: Box, **options: object) -> HeldBoxes:
    return HeldBoxes(shape=shape, dtype=torch.float32, boxes=boxes or (whole(shape),), **options)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut into boxes, again and again."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        cut = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, n in enumerate(cut.shape) if n > 1]
        if not dims:
            boxes.append(cut)
            continue
        dim = draw(st.sampled_from(dims))
        middle = draw(st.integers(1, cut.shape[dim] - 1))
        for a, b in ((0, middle), (middle, cut.shape[dim])):
            offset, size = list(cut.offset), list(cut.shape)
            offset[dim], size[dim] = offset[dim] + a, b - a
            boxes.append(Box(offset=tuple(offset), shape=tuple(size)))
    return boxes


@st.composite
def inventories(draw: st.DrawFn) -> list[dict[str, HeldBoxes]]:
    """What some workers hold: of each tensor every box is on at least one of them; some do not know it at all."""
    count = draw(st.integers(1, 4))
    found: list[dict[str, HeldBoxes]] = [{} for _ in range(count)]
    for number in range(draw(st.integers(0, 5))):
        shape, dtype = draw(SHAPES), draw(DTYPES)
        owners: dict[int, list[Box]] = {rank: [] for rank in range(count) if draw(st.booleans())}
        for one in draw(tilings(shape)):
            for rank in draw(st.sets(st.integers(0, count - 1), min_size=1)):
                if one.numel or draw(st.booleans()):  # a sharded tensor's empty box is not mentioned
                    owners.setdefault(rank, []).append(one)
        for rank, boxes in (owners or {0: []}).items():
            found[rank][f"t{number}"] = HeldBoxes(shape=shape, dtype=dtype, boxes=tuple(boxes))
    return found


@given(inventories())
def test_every_element_is_written_once_by_somebody_who_has_it(found: list[dict[str, HeldBoxes]]) -> None:
    jobs = share(found)
    assert jobs == share(found)
    for name in {name for inventory in found for name in inventory}:
        shape = next(inventory[name].shape for inventory in found if name in inventory)
        times = torch.zeros(shape, dtype=torch.int64)
        written = [(rank, part) for rank, mine in enumerate(jobs) for n, part in mine if n == name]
        assert written, "even an empty tensor is in one file"
        for rank, part in written:
            times[part.slices()] += 1
            assert name in found[rank]
            if part.numel:
                assert any(part.intersect(one) == part for one in found[rank][name].boxes)
        assert (times == 1).all()


@given(st.lists(SHAPES, min_size=1, max_size=30), st.integers(2, 5))
def test_copies_are_shared_out_evenly(shapes: list[tuple[int, ...]], count: int) -> None:
    everything = {f"t{n}": holding(shape) for n, shape in enumerate(shapes)}
    loads = [sum(part.numel for _, part in mine) for mine in share([everything] * count)]
    # What is not cut is small; what is cut has whole rows.
    rows = [next((n for n in shape if n > 1), 1) for shape in shapes]
    slices = [math.prod(shape) // n * math.ceil(n / count) for shape, n in zip(shapes, rows, strict=True)]
    assert max(loads) - min(loads) <= max(sum(loads) / count / 8, *slices, 1)


def test_what_only_one_has_counts_in_the_balance() -> None:
    ours = {f"own{n}": holding((10,)) for n in range(8)}
    shared = {"shared": holding((80,))}
    first, second = share([{**ours, **shared}, shared])
    assert sum(part.numel for _, part in first) == pytest.approx(80, abs=40)
    assert "own0" not in [name for name, _ in second]


def test_a_row_is_cut_along_its_columns() -> None:
    jobs = share([{"row": holding((1, 1, 8))}] * 2)
    assert [[(part.offset, part.shape) for _, part in mine] for mine in jobs] == [
        [((0, 0, 0), (1, 1, 4))],
        [((0, 0, 4), (1, 1, 4))],
    ]


def test_an_empty_tensor_is_written_by_a_worker_that_has_it() -> None:
    sharded = HeldBoxes(shape=(0, 4), dtype=torch.float32, boxes=())
    assert [[name for name, _ in mine] for mine in share([{}, {"e": sharded}, {"e": sharded}])] == [[], ["e"], []]


def test_the_first_worker_writes_buffers_whatever_the_others_have() -> None:
    copies = [{"mean": holding((90,), leading=True, digest=str(rank))} for rank in range(3)]
    assert [[part.shape for _, part in mine] for mine in share(copies)] == [[(90,)], [], []]


def test_a_larger_box_serves_for_the_smaller_ones_in_it() -> None:
    jobs = share([{"w": holding((4,))}, {"w": holding((4,), box((0, 2)), box((2, 4)))}])
    assert [len(mine) for mine in jobs] == [1, 0]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (holding((4,)), holding((5,)), r"workers disagree on w: torch.float32 \(4,\) on worker 1"),
        (holding((4,)), HeldBoxes(shape=(4,), dtype=torch.int64, boxes=()), "workers disagree on w"),
        (holding((4,), digest="a"), holding((4,), digest="b"), "workers 1 and 2 have different values of w"),
        (holding((4,), box((0, 1))), holding((4,), box((2, 4))), "no worker holds .*1.* of w"),
        (holding((4,), box((0, 3))), holding((4,), box((2, 4))), "parts of w that overlap"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(first: HeldBoxes, second: HeldBoxes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        share([{}, {"w": first}, {"w": second}])
