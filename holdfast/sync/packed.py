"""Tensors that travel together in few buffers, and the check that all replicas send the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from holdfast.errors import UsageError

MARKS = 2**20  # marks are below this: a float64 holds the sum of the squares of 8,000 of them exactly


class Packed:
    """Tensors of any shapes that are read into flat buffers, and written from them: one buffer for each dtype.

    >>> packed = Packed([torch.ones(2, 2), torch.zeros(())])
    >>> packed.read()
    [tensor([1., 1., 1., 1., 0.])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
        """``device``: where the buffers are; None: where the first tensor is."""
        self._tensors = [plain(tensor) for tensor in tensors]
        self._kinds: dict[torch.dtype, list[int]] = {}  # indices into ``_tensors``, one list for each buffer
        for place, tensor in enumerate(self._tensors):
            self._kinds.setdefault(tensor.dtype, []).append(place)
        self.device = device or (tensors[0].device if tensors else torch.device("cpu"))
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)

    def read(self) -> list[torch.Tensor]:
        """Copies of the present values, as flat buffers."""
        return [self._gather([self._tensors[place] for place in places]) for places in self._kinds.values()]

    def _gather(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0].reshape(-1).to(self.device, copy=True)
        return torch.cat([tensor.reshape(-1).to(self.device) for tensor in tensors])

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of parts of the buffers, in the shapes and the order of the tensors."""
        found = [torch.empty(0)] * len(self._tensors)
        for buffer, places in zip(buffers, self._kinds.values(), strict=True):
            parts = buffer.split_with_sizes([self._tensors[place].numel() for place in places])
            for part, place in zip(parts, places, strict=True):
                found[place] = part.view(self._tensors[place].shape)
        return found

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the buffers' values into the tensors."""
        for tensor, part in zip(self._tensors, self.views(buffers), strict=True):
            tensor.copy_(part)

    def add(self, buffers: Sequence[torch.Tensor]) -> None:
        """Add the buffers' values to the tensors."""
        for tensor, part in zip(self._tensors, self.views(buffers), strict=True):
            tensor.add_(part.to(tensor.device))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory without a graph; complex numbers as pairs of real ones, which all backends can send."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def mark_of(form: object) -> int:
    """Return a number below ``MARKS`` that stands for the form (names, shapes and dtypes) of what a replica sends."""
    return zlib.crc32(repr(form).encode()) % MARKS


def refuse_other_forms(marks: float, squares: float, replicas: int) -> None:
    """Raise ``UsageError`` if replicas have different marks, given the sum of all marks and of their squares.

    It is asked before tensors travel, because Gloo ends the process if sizes differ.

    >>> refuse_other_forms(3 + 3, 9 + 9, 2)
    >>> refuse_other_forms(3 + 4, 9 + 16, 2)
    Traceback (most recent call last):
    holdfast.errors.UsageError: replicas hold different tensors (the same model everywhere; and an optimizer that has \
made no step with gradients has no state, where others have one)
    """
    if marks**2 != squares * replicas:  # the mean of the squares is the square of the mean only if all are the same
        raise UsageError(
            "replicas hold different tensors",
            hint="the same model everywhere; and an optimizer that has made no step with gradients has no state, "
            "where others have one",
        )
