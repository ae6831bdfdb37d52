"""The vocabulary of all formats: boxes of logical tensors, and where their bytes lie.

A checkpoint of any format is a *catalogue*: logical tensors (name, shape, dtype), each made of pieces; a
piece is a box of the tensor and an array of bytes in a file. Nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint.places import Place
from holdfast.errors import CheckpointError

Shape = tuple[int, ...]
_LONG = "do not trust this checkpoint, or save it under shorter keys"
NAME_LIMIT = 1000  # characters of a tensor's name: a tensor deep inside has the keys of all dicts above in its name
PER_RANK = "__per_rank__"  # the only key of a dict in the tree that holds a value for each rank, by its number as text
NUMPY = "__numpy__"  # the only key of a dict in the tree that stands for a numpy array: its value is the tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    >>> Box(offset=(2, 0), shape=(3, 4)).intersect(Box(offset=(4, 1), shape=(9, 9)))
    Box(offset=(4, 1), shape=(1, 3))
    """

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The box that both cover; None if they have nothing in common. Boxes of scalars are equal."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return None if any(n <= 0 for n in shape) else Box(offset=offset, shape=shape)

    def relative_to(self, outer: Box) -> Box:
        """The same elements, counted from the first corner of ``outer``."""
        return Box(offset=tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), shape=self.shape)

    def without(self, hole: Box) -> list[Box]:
        """Boxes that cover this one except a box inside of it.

        >>> [b.offset for b in Box(offset=(0, 0), shape=(2, 4)).without(Box(offset=(1, 1), shape=(1, 2)))]
        [(0, 0), (1, 0), (1, 3)]
        """
        left = []
        offset, shape = list(self.offset), list(self.shape)
        for dim, (start, length) in enumerate(zip(hole.offset, hole.shape, strict=True)):
            for a, b in ((offset[dim], start), (start + length, offset[dim] + shape[dim])):
                if a < b:
                    corner, size = [*offset], [*shape]
                    corner[dim], size[dim] = a, b - a
                    left.append(Box(offset=tuple(corner), shape=tuple(size)))
            offset[dim], shape[dim] = start, length
        return left

    def slices(self) -> tuple[slice, ...]:
        """The box as an index: ``tensor[box.slices()]``."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box that covers all of a tensor of a shape."""
    return Box(offset=(0,) * len(shape), shape=tuple(shape))


def take_out(boxes: Sequence[Box], hole: Box) -> tuple[list[Box], list[Box]]:
    """Parts of some boxes that lie inside of another box, and what is left of them without those.

    >>> inside, left = take_out([Box(offset=(0,), shape=(4,))], Box(offset=(3,), shape=(9,)))
    >>> inside[0].offset, left[0].shape
    ((3,), (3,))
    """
    inside, left = [], []
    for box in boxes:
        common = box.intersect(hole)
        if common is None:
            left.append(box)
        else:
            inside.append(common)
            left += box.without(common)
    return inside, left


def row_major(shape: Sequence[int]) -> Shape:
    """The strides of a contiguous array, in elements.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Boxes that cover elements [start, stop) of the flattened tensor, in that order.

    A flat shard (ZeRO) is not a box, but it is a few: part of a row, whole rows, part of a row.

    >>> [(b.offset, b.shape) for b in flat_boxes((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box(offset=(start,) * len(shape), shape=(stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows [first, last)
    if first > last:  # within one row
        yield from _in_row(shape, start // row, start % row, stop - start // row * row)
        return
    if start % row:
        yield from _in_row(shape, start // row, start % row, row)
    if first < last:
        yield Box(offset=(first, *(0,) * (len(shape) - 1)), shape=(last - first, *shape[1:]))
    if stop % row:
        yield from _in_row(shape, stop // row, 0, stop % row)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield Box(offset=(row, *box.offset), shape=(1, *box.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """An array of elements in a file; ``strides`` are counted in elements, ``offset`` in bytes.

    >>> weight = Stored(file="a.bin", offset=64, dtype=torch.float32, shape=(4, 2), strides=(2, 1))
    >>> weight.part(Box(offset=(1, 0), shape=(2, 2))).offset
    72
    """

    file: str
    offset: int
    dtype: torch.dtype
    shape: Shape
    strides: Shape

    @property
    def nbytes(self) -> int:
        """The size of its elements, without gaps."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Row-major without holes; dimensions of one element may have any stride."""
        wanted = row_major(self.shape)
        return 0 in self.shape or all(
            n == 1 or a == b for n, a, b in zip(self.shape, self.strides, wanted, strict=True)
        )

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last, with the gaps between."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    def part(self, box: Box) -> Stored:
        """The part of the array that a box inside of it covers."""
        skipped = sum(o * s for o, s in zip(box.offset, self.strides, strict=True))
        offset = self.offset + skipped * self.dtype.itemsize
        return Stored(file=self.file, offset=offset, dtype=self.dtype, shape=box.shape, strides=self.strides)

    def reshaped(self, shape: Shape) -> Stored:
        """The same elements under another shape; only for a contiguous array."""
        assert self.is_contiguous, f"{self.file}: a strided array cannot be reshaped"
        assert math.prod(shape) == math.prod(self.shape)
        return dense(file=self.file, offset=self.offset, dtype=self.dtype, shape=shape)

    def flat(self, start: int, stop: int, shape: Shape) -> Stored:
        """Elements [start, stop) of a contiguous array, seen under a shape."""
        line = self.reshaped((math.prod(self.shape),))
        return line.part(Box(offset=(start,), shape=(stop - start,))).reshaped(shape)


def dense(*, file: str, offset: int, dtype: torch.dtype, shape: Shape) -> Stored:
    """A row-major array without gaps."""
    return Stored(file=file, offset=offset, dtype=dtype, shape=shape, strides=row_major(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a logical tensor, and the array of the same shape in a file that holds it."""

    box: Box
    stored: Stored


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A logical tensor and its pieces. ``mean``: each piece holds other values of all of it, to be averaged."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    mean: bool = False

    @property
    def nbytes(self) -> int:
        """The size of its elements, without gaps."""
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(stored: Stored) -> TensorEntry:
    """The entry of a tensor that lies whole in one array."""
    piece = Piece(box=whole(stored.shape), stored=stored)
    return TensorEntry(shape=stored.shape, dtype=stored.dtype, pieces=(piece,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """Stands in a catalogue's tree where a tensor is; ``name`` is its key in ``Catalogue.tensors``."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A data file: its length, the checksum of each block where the format has them, and who wrote it."""

    bytes: int
    checksums: tuple[str, ...] | None = None
    writer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Digested:
    """A frozen tensor by its content: boxes that together cover it, each with the digest of its elements."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[tuple[Box, str], ...]


@dataclass(kw_only=True)
class Catalogue:
    """The content of a checkpoint of any format, without its data.

    ``tree`` is what was saved, with a ``Ref`` for each tensor. A model is a dict of names. An optimizer is
    what ``torch.optim.Optimizer.state_dict`` gives, with names of parameters in the place of numbers where
    the format knows them. A tensor's name is its path in the tree, see :func:`name_of`. ``files`` has an
    item for each file, by its path relative to ``root``. ``tied`` leads from a second name to the first,
    both as keys of the model's dict; ``frozen`` are the names of parameters that are not trained. ``digests`` has
    frozen tensors by their names; one that is not in ``tensors`` was left out, and must be there already when the rest
    is loaded.

    >>> from pathlib import Path
    >>> Catalogue(format="empty", root=Path("x")).tensors
    {}
    """

    format: str
    root: Place
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    digests: dict[str, Digested] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def left_out(self) -> list[str]:
        """The names of frozen tensors that are not in the checkpoint (``trainable_only``)."""
        return [name for name in self.digests if name not in self.tensors]


def name_of(path: Sequence[Any]) -> str:
    """The name of a tensor at a path in the tree.

    >>> name_of(("optimizer", "state", "layers.0.weight", "exp_avg"))
    'optimizer/state/layers.0.weight/exp_avg'
    """
    return "/".join(str(key).replace("%", "%25").replace("/", "%2F") for key in path)


def check_name(name: str) -> None:
    """Refuses a name that is so long that names alone could fill the memory, or take long to match."""
    if len(name) > NAME_LIMIT:
        raise CheckpointError(f"a tensor has a name of {len(name)} characters: {name[:60]}…", hint=_LONG)


def path_of(name: str) -> list[str]:
    """The keys of the path whose name this is (as texts): the inverse of :func:`name_of`.

    >>> path_of("model/a%2Fb")
    ['model', 'a/b']
    """
    return [key.replace("%2F", "/").replace("%25", "%") for key in name.split("/")]


def catalogue_tree(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Replaces each ``Stored`` or ``TensorEntry`` in nested dicts, lists and tuples by a ``Ref``, and collects them.

    >>> stored = Stored(file="a.bin", offset=0, dtype=torch.float32, shape=(2,), strides=(1,))
    >>> catalogue_tree({"model": {"w": stored}, "step": 3})[0]
    {'model': {'w': Ref(name='model/w')}, 'step': 3}
    """
    found: dict[str, TensorEntry] = {}

    def walk(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, Stored | TensorEntry):
            name = name_of(path)
            check_name(name)
            assert name not in found, f"two tensors are named {name}"
            found[name] = node if isinstance(node, TensorEntry) else entry_of(node)
            return Ref(name=name)
        if isinstance(node, dict):
            return {key: walk(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(walk(value, (*path, i)) for i, value in enumerate(node))
        return node

    return walk(dict(tree), ()), found
