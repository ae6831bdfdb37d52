"""The patterns by which fragments make up a tensor: pure geometry, from shapes and places alone.

A *fragment* is the part of a tensor that one holder has. A pattern says how the fragments relate to each other; steps
(``Shard``, ``Flat``) may stand inside one another, the outermost first. ``assemble`` turns fragments into a block:
boxes of the whole, each with the box of the fragment that holds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.pieces import Box, Shape, flat_boxes, row_major, whole
from holdfast.errors import UsageError

Rows = tuple[int, int]  # the first row in the whole, and how many


class Misfit(Exception):
    """Fragments that do not fit their rule; the caller adds the tensor's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentPart:
    """A box of a logical tensor, and the box of a fragment (given by its index) that holds it.

    Both boxes have the same shape, unless the fragment is flat: then ``local`` is a range of it.
    """

    fragment: int
    box: Box
    local: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBlock:
    """A tensor or a part of one: its shape, the parts of fragments in it, and its shape before it was flattened."""

    shape: Shape
    parts: tuple[FragmentPart, ...]
    unflattened: Shape | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unique:
    """Pattern: one holder has the whole tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicate:
    """Pattern: every holder has the whole tensor, all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """Pattern: every holder has other values for the whole tensor, which is their mean. Lossy, so never assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Pattern: consecutive parts along ``dim``, one for each place along ``axis``.

    ``size`` is the tensor's size along ``dim`` where padding was added at its end. ``parts`` are the sizes of
    the tensors that were fused along ``dim`` (or how many of equal size): each holder has its part of every
    one, one behind the other. ``groups``: a holder has whole groups instead, and each group a slice of
    every fused tensor, as Megatron lays out the heads of grouped-query attention.

    >>> Shard(dim=0, parts=(4, 2)).runs([3, 3])  # q: 4 rows, k: 2; both holders have 2 of q and 1 of k
    (6, [[(0, 2), (4, 1)], [(2, 2), (5, 1)]])
    """

    dim: int
    axis: str = "tp"
    size: int | None = None
    parts: int | tuple[int, ...] | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.parts is not None:
            raise UsageError("a shard has either a size or parts: the parts add up to the size")
        if self.groups is not None and self.parts is None:
            raise UsageError("groups of a shard need parts: the sizes of what each group has a slice of")
        numbers = [self.size, self.groups, *(self.parts if isinstance(self.parts, tuple) else [self.parts])]
        if any(number is not None and number < 0 for number in numbers) or self.groups == 0 or self.parts in (0, ()):
            raise UsageError(f"sizes, parts and groups of a shard count something, {numbers} cannot be")
        for part in self.parts if isinstance(self.parts, tuple) else ():
            if self.groups and part % self.groups:
                raise UsageError(f"a part of {part} cannot be cut into {self.groups} equal groups")

    def runs(self, sizes: Sequence[int]) -> tuple[int, list[list[Rows]]]:
        """The size of the whole along ``dim``, and for each holder the runs of rows it has, in its order.

        ``sizes`` are the holders' sizes along ``dim``; ``Misfit`` if they do not fit.
        """
        if self.parts is None:
            starts = list(itertools.accumulate(sizes, initial=0))
            total = starts[-1] if self.size is None else self.size
            if total > starts[-1]:
                raise Misfit(f"its shards have {_sum(sizes)} along dim {self.dim}, fewer than the {total} of its rule")
            return total, [[(start, size)] for start, size in zip(starts, sizes, strict=False)]
        if not isinstance(self.parts, tuple) and not any(sizes):
            return 0, [[(0, 0)] for _ in sizes]  # an empty tensor has any number of equal parts
        parts = self._fused(sizes)
        runs = _grouped(parts, self.groups, len(sizes)) if self.groups else _chunked(parts, len(sizes))
        for i, (size, mine) in enumerate(zip(sizes, runs, strict=True)):
            wanted = sum(length for _, length in mine)
            if size != wanted:
                fused = f"parts {list(parts)}" + (f" in {self.groups} groups" if self.groups else "")
                raise Misfit(f"{self.axis} {i} has {size} along dim {self.dim}, but its share of {fused} is {wanted}")
        return sum(parts), runs

    def _fused(self, sizes: Sequence[int]) -> tuple[int, ...]:
        if isinstance(self.parts, tuple):
            return self.parts
        assert self.parts is not None
        count, total = self.parts * (self.groups or 1), sum(sizes)
        if total % count or count > total:
            what = f"{self.parts} parts" + (f" in {self.groups} groups" if self.groups else "")
            raise Misfit(f"its shards have {_sum(sizes)} along dim {self.dim}, which is not {what} of equal size")
        return (total // self.parts,) * self.parts

    def join(self, blocks: Sequence[TensorBlock]) -> TensorBlock:
        """The block that one block for each place along ``axis`` makes up."""
        first = blocks[0].shape
        dim = self.dim + len(first) if self.dim < 0 else self.dim
        if not 0 <= dim < len(first):
            raise Misfit(f"it has no dim {self.dim} to be cut along: {self.axis} 0 has the shape {first}")
        for i, block in enumerate(blocks):
            if len(block.shape) != len(first) or _but(block.shape, dim) != _but(first, dim):
                raise Misfit(
                    f"its shards differ in more than dim {self.dim}: "
                    f"{self.axis} 0 has the shape {first}, {self.axis} {i} {block.shape}"
                )
        # Each holder's rows along dim, and where they belong in the whole: move every part of its block there.
        total, runs = self.runs([block.shape[dim] for block in blocks])
        parts: list[FragmentPart] = []
        for block, mine in zip(blocks, runs, strict=True):
            done = 0
            for start, length in mine:
                kept = max(min(length, total - start), 0)  # the rest is padding
                source = _slab(block.shape, dim, done, kept)
                parts += _moved(block, source, _slab(block.shape, dim, start, kept))
                done += length
        return TensorBlock(shape=(*first[:dim], total, *first[dim + 1 :]), parts=tuple(parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Pattern: consecutive ranges of the flattened tensor, one for each place along ``axis``; padding at the end.

    ``shape`` is the shape before it was flattened, where the fragments do not say it themselves.
    """

    axis: str = "dp"
    shape: Shape | None = None

    def join(self, blocks: Sequence[TensorBlock]) -> TensorBlock:
        """The block that one range for each place along ``axis`` makes up."""
        shapes = {block.unflattened for block in blocks} if self.shape is None else {self.shape}
        shape = shapes.pop()
        if shape is None or shapes:
            raise Misfit("nothing says, or not with one voice, which shape it had before it was flattened")
        sizes = [_length(block, f"{self.axis} {i}") for i, block in enumerate(blocks)]
        count = math.prod(shape)
        if sum(sizes) < count:
            raise Misfit(f"its flat shards have {_sum(sizes)} elements, fewer than the {count} of shape {shape}")
        parts: list[FragmentPart] = []
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            # A range of the flattened tensor is no box, but a few: part of a row, whole rows, part of a row.
            for box in flat_boxes(shape, start, min(start + size, count)):
                begin = sum(o * s for o, s in zip(box.offset, row_major(shape), strict=True))
                local = Box(offset=(begin - start,), shape=(box.numel,))
                parts += (FragmentPart(fragment=part.fragment, box=box, local=local) for part in block.parts)
            start += size
        return TensorBlock(shape=shape, parts=tuple(parts))


Step = Shard | Flat
Pattern = Unique | Replicate | Partial | Shard | Flat | tuple[Step, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedFragment:
    """A fragment at its place among those of its tensor: its index, where it lies, and its shape."""

    index: int
    place: Mapping[str, int]
    shape: Shape
    unflattened: Shape | None = None


def assemble(members: Sequence[PlacedFragment], steps: Sequence[Step], sizes: Mapping[str, int]) -> TensorBlock:
    """The block that fragments make up; ``sizes`` says how many places an axis has.

    >>> halves = [PlacedFragment(index=i, place={"tp": i}, shape=(2, 3)) for i in range(2)]
    >>> assemble(halves, [Shard(dim=1)], {"tp": 2}).parts[1].box
    Box(offset=(0, 3), shape=(2, 3))
    """
    if not steps:
        assert len(members) == 1, "the caller has seen to it that places differ along the steps' axes alone"
        one = members[0]
        box = whole(one.shape)
        parts = (FragmentPart(fragment=one.index, box=box, local=box),) if box.numel else ()
        return TensorBlock(shape=one.shape, parts=parts, unflattened=one.unflattened)
    step, *inner = steps
    at: dict[int, list[PlacedFragment]] = {}
    for member in members:
        if step.axis not in member.place:
            raise Misfit(f"it is cut along {step.axis}, but its fragments have no place there: {dict(member.place)}")
        at.setdefault(member.place[step.axis], []).append(member)
    count = sizes[step.axis]
    missing = [i for i in range(count) if i not in at]
    if missing:
        raise Misfit(f"there is no fragment at {step.axis} {', '.join(map(str, missing))} of {count}")
    if len(at) > count:
        raise Misfit(f"it has fragments at {step.axis} {sorted(at)}, but there are {count} places")
    return step.join([assemble(at[i], inner, sizes) for i in range(count)])


def _moved(block: TensorBlock, source: Box, target: Box) -> Iterator[FragmentPart]:
    """The parts of a block that lie in the box ``source``, moved to the box ``target`` of a larger whole."""
    for part in block.parts:
        common = part.box.intersect(source)
        if common is None:
            continue
        for box, local in _within(part, common.relative_to(part.box)):
            offset = (
                t + p + b - s
                for t, p, b, s in zip(target.offset, part.box.offset, box.offset, source.offset, strict=True)
            )
            yield FragmentPart(fragment=part.fragment, box=Box(offset=tuple(offset), shape=box.shape), local=local)


def _within(part: FragmentPart, box: Box) -> Iterator[tuple[Box, Box]]:
    """Boxes that make up a box of a part, each with where it lies in the fragment."""
    if part.local.shape == part.box.shape:
        offset = tuple(a + b for a, b in zip(part.local.offset, box.offset, strict=True))
        yield box, Box(offset=offset, shape=box.shape)
        return
    for stretch, start in _stretches(part.box.shape, box):
        yield stretch, Box(offset=(part.local.offset[0] + start,), shape=(stretch.numel,))


def _stretches(shape: Shape, box: Box) -> Iterator[tuple[Box, int]]:
    """Boxes that make up a box and are consecutive in the flattened tensor, with the element each starts at."""
    cut = max((d for d, n in enumerate(shape) if box.shape[d] != n), default=0)  # behind it, all is whole
    for index in itertools.product(*map(range, box.shape[:cut])):
        offset = (*(o + i for o, i in zip(box.offset, index, strict=False)), *box.offset[cut:])
        start = sum(o * s for o, s in zip(offset, row_major(shape), strict=True))
        yield Box(offset=offset, shape=((1,) * cut + box.shape[cut:])), start


def _chunked(parts: Sequence[int], holders: int) -> list[list[Rows]]:
    """Each holder's chunk of each part, cut as ``torch.chunk`` does: the last may be smaller, or empty."""
    runs: list[list[Rows]] = [[] for _ in range(holders)]
    begin = 0
    for part in parts:
        step = -(-part // holders)
        for i, mine in enumerate(runs):
            start, stop = min(i * step, part), min((i + 1) * step, part)
            mine.append((begin + start, stop - start))
        begin += part
    return runs


def _grouped(parts: Sequence[int], groups: int, holders: int) -> list[list[Rows]]:
    """Each holder's groups, and in each group a slice of every part."""
    starts = list(itertools.accumulate(parts, initial=0))
    return [
        [
            (start + group * (part // groups), part // groups)
            for group in range(first, first + count)
            for start, part in zip(starts, parts, strict=False)
        ]
        for ((first, count),) in _chunked([groups], holders)
    ]


def _slab(shape: Shape, dim: int, start: int, length: int) -> Box:
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(offset=offset, shape=(*shape[:dim], length, *shape[dim + 1 :]))


def _but(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _length(block: TensorBlock, where: str) -> int:
    if len(block.shape) != 1:
        raise Misfit(f"it should be flat, but {where} has the shape {block.shape}")
    return block.shape[0]


def _sum(sizes: Sequence[int]) -> str:
    return f"{' + '.join(map(str, sizes))} = {sum(sizes)}" if len(sizes) > 1 else str(sizes[0])
