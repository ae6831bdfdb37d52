"""Safetensors files, written block by block from arrays that may be larger than memory."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.checkpoint.disk import ALIGN, BLOCK, THREADS, Bytes, Progress, aligned, silent, write_blocks
from holdfast.checkpoint.pieces import Shape
from holdfast.errors import UsageError

# Names of safetensors' own, in the order of falling size, so that each array is aligned to its elements.
DTYPES = {
    torch.complex128: "C128",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Array:
    """Something to write: ``fill(start, stop, out)`` puts bytes [start, stop) of it into ``out``."""

    name: str
    dtype: torch.dtype
    shape: Shape
    fill: Callable[[int, int, Bytes], None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, row-major; without a copy where it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """A tensor as an array to write.

    >>> array_of("w", torch.zeros(2, 3)).nbytes
    24
    """
    kept: list[Bytes] = []

    def fill(start: int, stop: int, out: Bytes) -> None:
        if not kept:  # a tensor that is strided or on another device is copied when its turn comes
            kept.append(bytes_of(tensor))
        np.copyto(out, kept[0][start:stop])

    return Array(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), fill=fill)


class Image:
    """A safetensors file before it is written: what every byte of it will be.

    The header is padded with blanks, so that the data starts on a page.

    >>> image = Image([array_of("w", torch.ones(3))])
    >>> image.offsets["w"], image.size
    (4096, 4108)
    """

    def __init__(self, arrays: Sequence[Array], metadata: Mapping[str, str] | None = None) -> None:
        order = {dtype: number for number, dtype in enumerate(DTYPES)}
        for array in arrays:
            if array.dtype not in DTYPES:
                raise UsageError(f"{array.name} is {array.dtype}, which safetensors files cannot hold")
        self.arrays = sorted(arrays, key=lambda array: order[array.dtype])
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        starts = []
        for array in self.arrays:
            if array.name in header:
                raise UsageError(f"two arrays are named {array.name}")
            ends = [position, position + array.nbytes]
            header[array.name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": ends}
            starts.append(position)
            position += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGN)
        self._head = np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
        self._starts = [len(self._head) + start for start in starts]
        self.offsets = {array.name: start for array, start in zip(self.arrays, self._starts, strict=True)}
        self.size = len(self._head) + position

    def fill(self, start: int, stop: int, out: Bytes) -> Bytes:
        """Puts bytes [start, stop) of the file at the begin of ``out``, and returns it."""
        head = self._head[start:stop]
        out[: len(head)] = head
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while index < len(self.arrays) and self._starts[index] < stop:
            array, origin = self.arrays[index], self._starts[index]
            first, last = max(start, origin), min(stop, origin + array.nbytes)
            if first < last:
                array.fill(first - origin, last - origin, out[first - start : last - start])
            index += 1
        return out


class Staged:
    """A copy of an image in memory that is kept from one save to the next, so that its pages are warm."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self.size = 0

    def take(self, image: Image) -> None:
        if self._memory.nbytes < image.size:
            self._memory = aligned(image.size)
        self.size = image.size
        for start in range(0, image.size, BLOCK):
            image.fill(start, min(start + BLOCK, image.size), self._memory[start:])

    def fill(self, start: int, stop: int, out: Bytes) -> Bytes:
        return self._memory[start:]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file that is durable: its length, its blocks' checksums and where each array begins."""

    bytes: int
    checksums: tuple[str, ...]
    offsets: Mapping[str, int]


def write_safetensors(
    path: Path,
    arrays: Sequence[Array],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = silent,
    threads: int = THREADS,
) -> Written:
    """Writes a safetensors file, durable when this returns; the path must not exist."""
    image = Image(arrays, metadata)
    sums = write_blocks(path, image.size, image.fill, progress=progress, threads=threads)
    return Written(bytes=image.size, checksums=sums, offsets=image.offsets)
