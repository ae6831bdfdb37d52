"""Boxes that cover another exactly once: found out in a time that grows with their number, never with its square."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch

from holdfast.checkpoint import tiling
from holdfast.checkpoint.coverage import check_tiling, gaps
from holdfast.checkpoint.pieces import Box, Piece, TensorEntry, dense, whole
from holdfast.checkpoint.tiling import sources, tiles
from holdfast.errors import CheckpointError


def cells(box: Box) -> list[tuple[int, ...]]:
    return [*itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)))]


def cut(box: Box, draw: random.Random, times: int) -> list[Box]:
    """A box cut at random places, in random order."""
    boxes = [box]
    for _ in range(times):
        one = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(one.shape))
        at = draw.randint(0, one.shape[dim])
        for start, stop in ((0, at), (at, one.shape[dim])):
            offset = tuple(o + (start if d == dim else 0) for d, o in enumerate(one.offset))
            shape = tuple(stop - start if d == dim else n for d, n in enumerate(one.shape))
            boxes.append(Box(offset=offset, shape=shape))
    draw.shuffle(boxes)
    return boxes


def test_it_agrees_with_counting_every_element() -> None:
    draw = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(400):
        outer = Box(offset=(1, 2, 0), shape=tuple(draw.randint(1, 4) for _ in range(3)))
        boxes = cut(outer, draw, draw.randint(0, 5))
        if draw.random() < 0.6:  # one is moved, left out, or there twice
            odd = boxes.pop(draw.randrange(len(boxes)))
            moved = Box(offset=(odd.offset[0] + draw.randint(-1, 1), *odd.offset[1:]), shape=odd.shape)
            boxes += draw.choice([[], [moved], [odd, odd]])
        exact = sorted(itertools.chain.from_iterable(map(cells, boxes))) == sorted(cells(outer))
        assert tiles(boxes, outer) is exact
        seen[exact] += 1
    assert min(seen.values()) > 50


def test_tilings_of_nothing_and_of_scalars() -> None:
    scalar = Box(offset=(), shape=())
    assert tiles([scalar], scalar)
    assert not tiles([], scalar)
    assert not tiles([scalar, scalar], scalar)
    assert tiles([], whole((0, 3)))
    assert not tiles([whole((2,))], whole((2, 1)))
    assert not tiles([Box(offset=(-1,), shape=(2,)), Box(offset=(1,), shape=(1,))], whole((2,)))


def test_sources_say_who_holds_what() -> None:
    draw = random.Random(1)
    for _ in range(200):
        outer = whole((4, 5))
        boxes = [*cut(outer, draw, 4), *cut(outer, draw, 2)][draw.randint(0, 5) :]
        held, left = sources(outer, boxes)
        owner = {cell: number for number, box in reversed([*enumerate(boxes)]) for cell in cells(box)}
        assert {cell: number for number, part in held for cell in cells(part)} == owner
        assert sum(part.numel for _, part in held) == len(owner)
        assert sorted(itertools.chain.from_iterable(map(cells, left))) == sorted(set(cells(outer)) - set(owner))


# --- the time it takes ------------------------------------------------------------------------------

SHUFFLED = [*range(40_000)]
random.Random(2).shuffle(SHUFFLED)
ROWS: dict[str, Callable[[int], list[Box]]] = {
    "every other first": lambda n: [Box(offset=(k,), shape=(1,)) for k in [*range(0, n, 2), *range(1, n, 2)]],
    "shuffled": lambda n: [Box(offset=(k,), shape=(1,)) for k in SHUFFLED if k < n],
    "columns": lambda n: [Box(offset=(0, k), shape=(7, 1)) for k in SHUFFLED if k < n],
    "many dimensions": lambda n: [Box(offset=(0,) * 9 + (k,), shape=(2,) * 9 + (1,)) for k in SHUFFLED if k < n],
}


@pytest.mark.parametrize("kind", ROWS)
def test_many_pieces_take_no_longer_each_than_few(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in boxes that are compared, and generously in time: 8 times the pieces, less than 30 times as long."""

    def taken(count: int) -> float:
        boxes = ROWS[kind](count)
        shape = tuple(max(column) for column in zip(*((o + n for o, n in zip(b.offset, b.shape)) for b in boxes)))  # noqa: B905
        pieces = tuple(
            Piece(box=box, stored=dense(file="a", offset=0, dtype=torch.uint8, shape=box.shape)) for box in boxes
        )
        start = time.process_time()
        check_tiling(boxes, shape, name="w", where="a")
        assert gaps(TensorEntry(shape=shape, dtype=torch.uint8, pieces=pieces)) == []
        return time.process_time() - start

    def cut_apart(*_: object) -> None:
        raise AssertionError("boxes were compared one by one")

    monkeypatch.setattr(tiling, "take_out", cut_apart)
    assert taken(40_000) < 30 * taken(5000) + 1


def test_pieces_that_overlap_in_too_many_places_are_refused_before_they_are_cut_apart() -> None:
    boxes = [Box(offset=(k,), shape=(2,)) for k in range(0, 60_000, 3)]
    with pytest.raises(CheckpointError, match="too many places"):
        sources(whole((60_000,)), boxes)
    with pytest.raises(CheckpointError, match="overlap or leave gaps"):
        check_tiling(boxes, (60_000,), name="w", where="a")
