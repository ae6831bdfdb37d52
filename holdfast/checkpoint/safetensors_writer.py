"""Writes safetensors files block by block, from arrays that may be larger than memory."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.checkpoint.disk import (
    ALIGN,
    BLOCK,
    THREADS,
    Bytes,
    Progress,
    aligned,
    blocks_of,
    in_parallel,
    silent,
    write_blocks,
)
from holdfast.checkpoint.pieces import Shape, flat_boxes
from holdfast.errors import UsageError

# The names of dtypes in safetensors files.
DTYPES = {
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
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
# Dtypes that safetensors lacks. They are written as pairs of numbers: with a last dimension of two.
PAIRS = {torch.complex128: torch.float64, torch.complex32: torch.float16}


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array to write: ``fill(start, stop, out)`` puts bytes [start, stop) of it into ``out``."""

    name: str
    dtype: torch.dtype
    shape: Shape
    fill: Callable[[int, int, Bytes], None]

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, row-major; without a copy where it is contiguous on the CPU."""
    if not tensor.numel():
        return np.empty(0, dtype=np.uint8)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous with any stride, but only with a stride of one can it be seen as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """A tensor as an array to write.

    >>> array_of("w", torch.zeros(2, 3)).nbytes
    24
    """
    tensor, size = tensor.detach(), tensor.element_size()
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    line = bytes_of(tensor) if plain else None

    def fill(start: int, stop: int, out: Bytes) -> None:
        if line is not None:
            np.copyto(out, line[start:stop])
            return
        # A strided tensor, or one on another device, is copied box by box, straight to where it is wanted.
        target = torch.from_numpy(out).view(tensor.dtype)
        for box in flat_boxes(tuple(tensor.shape), start // size, stop // size):
            target[: box.numel].view(box.shape).copy_(tensor[box.slices()])
            target = target[box.numel :]

    return Array(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), fill=fill)


class Image:
    """A safetensors file before it is written: its header, and what fills the rest.

    The header is padded with blanks, so that the data starts on a page. ``size`` is in bytes, ``offsets`` has the
    first byte of each array. Raises ``UsageError`` for two arrays of one name, and a dtype that cannot be written.

    >>> image = Image([array_of("w", torch.ones(3))])
    >>> image.offsets["w"], image.size
    (4096, 4108)
    """

    def __init__(self, arrays: Sequence[Array], metadata: Mapping[str, str] | None = None) -> None:
        # Largest elements first: so every array is aligned to its elements, and no block ends inside an element.
        self.arrays = sorted(arrays, key=lambda array: -array.dtype.itemsize)
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        starts = []
        for array in self.arrays:
            if array.name in header or array.name == "__metadata__":
                raise UsageError(f"two arrays are named {array.name}")
            ends = [position, position + array.nbytes]
            header[array.name] = {**_described(array), "data_offsets": ends}
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


def _described(array: Array) -> dict[str, object]:
    dtype, shape = array.dtype, list(array.shape)
    if dtype in PAIRS:
        dtype, shape = PAIRS[dtype], [*shape, 2]
    if dtype not in DTYPES:
        raise UsageError(f"{array.name} is {dtype}, which safetensors files cannot hold")
    return {"dtype": DTYPES[dtype], "shape": shape}


class StagedImage:
    """A copy of an image in memory, for a save in the background.

    The memory is kept from one save to the next: memory touched for the first time costs more than the copy.
    """

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self.size = 0

    def take(self, image: Image) -> None:
        """Copies an image; what changes afterwards in the tensors is not in the copy."""
        if self._memory.nbytes < image.size:
            self._memory = aligned(image.size)
        self.size = image.size

        def copy(start: int) -> None:
            image.fill(start, min(start + BLOCK, image.size), self._memory[start:])

        in_parallel(copy, blocks_of(image.size))  # training waits meanwhile, so all cores are free

    def fill(self, start: int, stop: int, out: Bytes) -> Bytes:
        """Bytes [start, stop) of the file, in the copy itself; ``out`` is not needed."""
        return self._memory[start:]


class StagedImages:
    """Copies in memory of the images of one save."""

    def __init__(self) -> None:
        self._staged: list[StagedImage] = []

    def take(self, images: Sequence[Image]) -> None:
        """Copies images; memory of the last time that is of no use for them is given back."""
        self._staged = [*self._staged[: len(images)], *(StagedImage() for _ in images[len(self._staged) :])]
        for staged, image in zip(self._staged, images, strict=True):
            staged.take(image)

    @property
    def fills(self) -> list[Callable[[int, int, Bytes], Bytes]]:
        """For each image, the function that gives its bytes."""
        return [staged.fill for staged in self._staged]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A durable file: its length, its blocks' checksums, and the offset of each array, in bytes."""

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
    """Writes a safetensors file, durable when this returns.

    Raises ``CheckpointError`` if the path exists or cannot be written.
    """
    image = Image(arrays, metadata)
    sums = write_blocks(path, image.size, image.fill, progress=progress, threads=threads)
    return Written(bytes=image.size, checksums=sums, offsets=image.offsets)
