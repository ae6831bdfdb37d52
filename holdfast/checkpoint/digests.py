"""Digests of frozen tensors: by these a save and a load tell that weights which do not change are still the same.

A tensor is cut into boxes of some megabytes, and each box has its digest. Boxes, because a rank that holds a part of a
tensor can compare that part, whatever the layout was when the digests were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast import codec
from holdfast.checkpoint.disk import in_parallel
from holdfast.checkpoint.held import Held
from holdfast.checkpoint.pieces import Box, Digested
from holdfast.checkpoint.safetensors_writer import bytes_of

CHUNK = 4 << 20  # bytes of a box at most, unless one row has more: a few thousand boxes for the largest models
Task = tuple[str, Box]  # a tensor's name, and one of its boxes


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of a tensor's elements, row-major: XXH3, 128 bits, as hexadecimal digits.

    >>> digest_of(torch.zeros(3))
    'e6674c25262712b2faca856ad20a2da8'
    """
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor).data)


def chunks(box: Box, itemsize: int) -> list[Box]:
    """Boxes of whole rows, of at most ``CHUNK`` bytes each, that together are a box.

    >>> [piece.shape for piece in chunks(Box(offset=(0, 0), shape=(3, CHUNK // 8)), itemsize=4)]
    [(2, 524288), (1, 524288)]
    """
    if not box.numel:
        return []
    if not box.shape:
        return [box]
    rows = box.shape[0]
    each = max(1, CHUNK // (math.prod(box.shape[1:]) * itemsize))
    return [
        Box(offset=(box.offset[0] + start, *box.offset[1:]), shape=(min(each, rows - start), *box.shape[1:]))
        for start in range(0, rows, each)
    ]


def part_of(held: Held, box: Box) -> torch.Tensor | None:
    """The memory on this worker that holds all of a box; None if no part does."""
    for part in held.parts:
        if part.box.intersect(box) == box:
            return part.tensor[box.relative_to(part.box).slices()]
    return None


def digests(tasks: Sequence[Task], held: Mapping[str, Held]) -> list[str | None]:
    """The digest of each box in the memory of this worker; None if it does not hold all of a box."""
    found: list[str | None] = [None] * len(tasks)

    def work(number: int) -> None:
        name, box = tasks[number]
        memory = part_of(held[name], box) if name in held else None
        found[number] = None if memory is None else digest_of(memory)

    in_parallel(work, range(len(tasks)))
    return found


def to_json(digested: Digested) -> dict[str, Any]:
    """Digests as plain values, for :func:`from_json`."""
    return {
        "dtype": codec.dtype_name(digested.dtype),
        "shape": [*digested.shape],
        "boxes": [[[*box.offset], [*box.shape], digest] for box, digest in digested.boxes],
    }


def from_json(said: Mapping[str, Any]) -> Digested:
    """Digests from the plain values of :func:`to_json`."""
    boxes = ((Box(offset=tuple(offset), shape=tuple(size)), digest) for offset, size, digest in said["boxes"])
    return Digested(shape=tuple(said["shape"]), dtype=codec.dtype_of(said["dtype"]), boxes=tuple(boxes))


def in_order(boxes: Iterable[tuple[Box, str]]) -> tuple[tuple[Box, str], ...]:
    """Boxes with their digests, by their places in the tensor."""
    return tuple(sorted(boxes, key=lambda one: one[0].offset))
