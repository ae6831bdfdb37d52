"""How far replicas are from each other, estimated from a few numbers (after FDA, arXiv 2405.20988).

Each replica tells a *sketch* of its parameters: every parameter gets a random sign, and is added to one of a few
buckets. A sketch is linear, and the squared length of a sketch is on average that of the vector. So the variance of
the sketches is an estimate of the variance of the replicas: never below zero, and zero when they are equal. FDA's own
(mean square length less the length of the mean sketch) has an error in proportion to the way from the last
synchronisation, which all replicas share and which is far longer. For the same reason no anchor is kept: it would
be taken away again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from holdfast.rng import seed_of
from holdfast.sync.significance import squared_length

BUCKETS = 61  # a prime: rows of a matrix do not fall into step with it, so each bucket gets some of everything
ROOM = BUCKETS * 1024  # numbers in one go: what a processor keeps at hand
WHOLE = 4096  # numbers of a tensor that is small enough to be read as a whole
ROUNDING = 1e-13  # of the squared length: what single precision cannot tell from nothing


class Sketch:
    """Sketches of lists of tensors, all with the same signs. Its memory is small, whatever the size of the model."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(seed_of("sketch"))
        self._signs = torch.randint(0, 2, (2 * ROOM,), generator=source).mul_(2).sub_(1).float()
        self._flat = torch.empty(ROOM)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """
        >>> weight = torch.arange(4.0)
        >>> length = sum(number**2 for number in Sketch()([weight]))  # of four parameters: each in its own bucket
        >>> length == float(weight.square().sum())
        True
        """
        total = torch.zeros(BUCKETS, dtype=torch.float64)
        for turn, parts in enumerate(_batches(tensors)):
            # The same few signs serve all batches. Each begins at another bucket, and after a round at another sign.
            found = self._fold(parts, turn // BUCKETS % ROOM).double().roll(turn)
            total = total.to(found.device) + found
        numbers: list[float] = total.tolist()
        return numbers

    def _fold(self, parts: list[torch.Tensor], first: int) -> torch.Tensor:
        self._signs, self._flat = self._signs.to(parts[0].device), self._flat.to(parts[0].device)
        count = sum(map(len, parts))
        rows = -(-count // BUCKETS)
        flat = self._flat[: rows * BUCKETS]
        torch.cat(parts, out=flat[:count])
        flat[:count].mul_(self._signs[first : first + count])
        flat[count:].zero_()
        return flat.view(rows, BUCKETS).sum(0)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors as flat ones, at most ``ROOM`` numbers at a time and on one device. Each batch has its price."""
    held: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if flat.dim() != 1:
            flat = flat.reshape(-1)
        if flat.dtype != torch.float32:
            flat = flat.float()
        for part in (flat,) if flat.numel() <= ROOM else torch.split(flat, ROOM):
            size = part.numel()
            if held and (count + size > ROOM or part.device != held[0].device):
                yield held
                held, count = [], 0
            held.append(part)
            count += size
    if held:
        yield held


def sampled(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float]:
    """A quarter of each large tensor, the same on every replica, and how much more there is: reading all takes longer.

    >>> parts, more = sampled([torch.zeros(2), torch.zeros(4 * WHOLE)])
    >>> [len(part) for part in parts] == [2, WHOLE], round(more, 2)
    (True, 4.0)
    """
    flat = [parameter.detach().reshape(-1) for parameter in parameters]
    parts = []
    for number, tensor in enumerate(flat):
        length = max(min(len(tensor), WHOLE), len(tensor) // 4)
        start = (len(tensor) - length) * (number % 5) // 4  # here and there: layers of a kind are not cut alike
        parts.append(tensor[start : start + length])
    seen = sum(map(len, parts))
    return parts, sum(map(len, flat)) / seen if seen else 1.0


class ReplicaVariance:
    """The variance between replicas, relative to the squared length of the parameters at the last synchronisation.

    A ``delta`` of 1e-4 means: replicas are 1% of the length of the parameters away from their mean.
    """

    ballot = 2 + BUCKETS

    def __init__(self, *, delta: float | None) -> None:
        self._sketch = Sketch()
        self._delta = delta
        self._length = 0.0  # squared, at the last synchronisation
        self._where: list[int] = []  # the memory of the parameters that ``_parts`` are of
        self._parts: list[torch.Tensor] = []
        self._more = 1.0

    def measure(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        where = [parameter.data_ptr() for parameter in parameters]
        if where != self._where:  # views are made once: that takes longer than reading them
            self._parts, self._more = sampled(parameters)
            # What does not lie in one piece has been copied, and would stay as it was.
            self._where = where if all(parameter.is_contiguous() for parameter in parameters) else []
        scale = math.sqrt(self._more)  # of a squared length that is so many times as large
        sketch = [scale * number for number in self._sketch(self._parts)]
        return [self._length, sum(number * number for number in sketch), *sketch]

    def pass_by(self, parameters: Sequence[torch.Tensor]) -> None:
        """It has no memory."""

    def read(self, sums: Sequence[float], workers: int) -> float:
        """The estimate; nan if a replica's parameters are not finite."""
        length, squares, *sketch = (number / workers for number in sums)
        if not all(map(math.isfinite, (length, squares, *sketch))):
            return math.nan
        # fsum rounds once: the same bits with every version of Python.
        variance = squares - math.fsum(number * number for number in sketch)
        if variance < ROUNDING * squares:
            return 0.0
        return variance / length if length > 0 else variance

    def over(self, sums: Sequence[float], workers: int) -> str | None:
        far = self._delta is not None and self.read(sums, workers) >= self._delta
        return "replicas are far from each other" if far else None

    def synchronised(self, parameters: Sequence[torch.Tensor]) -> None:
        self._length = squared_length([parameter.detach() for parameter in parameters])

    def state(self) -> list[float]:
        return [self._length]

    def load(self, state: Sequence[float]) -> None:
        (self._length,) = state
