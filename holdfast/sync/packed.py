"""Tensors that travel together, in few buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Packed:
    """Tensors of any shapes, read into and written from few buffers: one for each kind of number.

    >>> packed = Packed([torch.ones(2, 2), torch.zeros(())])
    >>> packed.read()
    [tensor([1., 1., 1., 1., 0.])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
        """``device``: where the buffers are; None: where the first tensor is."""
        self._tensors = [plain(tensor) for tensor in tensors]
        self._kinds: dict[torch.dtype, list[int]] = {}  # places of tensors, in the order of the buffers
        for place, tensor in enumerate(self._tensors):
            self._kinds.setdefault(tensor.dtype, []).append(place)
        self.device = device or (tensors[0].device if tensors else torch.device("cpu"))
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)

    def read(self) -> list[torch.Tensor]:
        """The values now, in memory of their own."""
        return [self._gather([self._tensors[place] for place in places]) for places in self._kinds.values()]

    def _gather(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0].reshape(-1).to(self.device, copy=True)
        return torch.cat([tensor.reshape(-1).to(self.device) for tensor in tensors])

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of buffers, in the shapes and the order of the tensors."""
        found = [torch.empty(0)] * len(self._tensors)
        for buffer, places in zip(buffers, self._kinds.values(), strict=True):
            parts = buffer.split_with_sizes([self._tensors[place].numel() for place in places])
            for part, place in zip(parts, places, strict=True):
                found[place] = part.view(self._tensors[place].shape)
        return found

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """The tensors become what the buffers hold."""
        for tensor, part in zip(self._tensors, self.views(buffers), strict=True):
            tensor.copy_(part)

    def add(self, buffers: Sequence[torch.Tensor]) -> None:
        """Adds what the buffers hold to the tensors."""
        for tensor, part in zip(self._tensors, self.views(buffers), strict=True):
            tensor.add_(part.to(tensor.device))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a graph; complex numbers as pairs, which all backends can send."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
