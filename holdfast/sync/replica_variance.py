"""The variance between replicas, estimated from a few numbers (after FDA, arXiv 2405.20988).

Each replica sends a *sketch* of its parameters: every parameter gets a random sign, and is added to one of a few
buckets. A sketch is linear, and its squared length is on average that of the parameters. So the variance of the
sketches is an estimate of the variance of the replicas. It is never below zero, and zero when replicas are equal.

FDA sketches the difference to the parameters at the last synchronisation, and takes the mean squared length less the
squared length of the mean sketch. Its error is in proportion to that difference, most of which replicas have in
common, and which is far longer than the distance between them. A variance of sketches is the same with and without
that common part, so nothing is subtracted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from holdfast.rng import seed_of
from holdfast.sync.gradient_change import squared_length

BUCKETS = 61  # numbers in a sketch: an error of about a fifth. A prime, so that no column of a matrix fills one bucket
ROOM = BUCKETS * 1024  # elements sketched at a time: they fit into a processor's cache
WHOLE = 4096  # elements; tensors up to this size are read as a whole, of larger ones a part
ROUNDING = 1e-13  # relative to the squared length: below it a variance is rounding error of single precision


class Sketch:
    """A function from a list of tensors to its sketch. The signs are the same on all replicas."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(seed_of("sketch"))
        self._signs = torch.randint(0, 2, (2 * ROOM,), generator=source).mul_(2).sub_(1).float()
        self._flat = torch.empty(ROOM)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """Return the sketch: ``BUCKETS`` numbers.

        >>> weight = torch.arange(4.0)
        >>> length = sum(number**2 for number in Sketch()([weight]))  # four elements: each in its own bucket
        >>> length == float(weight.square().sum())
        True
        """
        total = torch.zeros(BUCKETS, dtype=torch.float64)
        for turn, parts in enumerate(_batches(tensors)):
            # All batches use the same signs. Each batch starts at another bucket, and after BUCKETS of them at another
            # sign: equal batches must not add up in the same buckets.
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
    """Yield the tensors as flat ones, in batches of up to ``ROOM`` elements on one device: few batches are quicker."""
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
    """Return a quarter of each large tensor, and the ratio of all elements to those returned. To read all takes longer.

    The parts are the same on every replica.

    >>> parts, more = sampled([torch.zeros(2), torch.zeros(4 * WHOLE)])
    >>> [len(part) for part in parts] == [2, WHOLE], round(more, 2)
    (True, 4.0)
    """
    flat = [parameter.detach().reshape(-1) for parameter in parameters]
    parts = []
    for number, tensor in enumerate(flat):
        length = max(min(len(tensor), WHOLE), len(tensor) // 4)
        start = (len(tensor) - length) * (number % 5) // 4  # another place in each: layers of a kind are not cut alike
        parts.append(tensor[start : start + length])
    seen = sum(map(len, parts))
    return parts, sum(map(len, flat)) / seen if seen else 1.0


class ReplicaVariance:
    """Signal: the variance between replicas, relative to the squared norm of the parameters when they were last equal.

    With a ``delta`` of 1e-4 replicas synchronise when their distance from the mean is 1% of the parameters' norm. A
    ballot is that squared norm, the squared length of the replica's sketch, and the sketch.
    """

    ballot = 2 + BUCKETS

    def __init__(self, *, delta: float | None) -> None:
        self._sketch = Sketch()
        self._delta = delta
        self._length = 0.0  # squared norm of the parameters at the last synchronisation
        self._where: list[int] = []  # addresses of the parameters of which ``_parts`` are views
        self._parts: list[torch.Tensor] = []
        self._more = 1.0  # how many times as many elements the parameters have as ``_parts``

    def measure(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        where = [parameter.data_ptr() for parameter in parameters]
        if where != self._where:  # views are kept: to make them takes longer than to read them
            self._parts, self._more = sampled(parameters)
            # Parts of a tensor that is not contiguous are copies, which would not follow it: make them anew each time.
            self._where = where if all(parameter.is_contiguous() for parameter in parameters) else []
        scale = math.sqrt(self._more)  # the squared length of all elements is ``_more`` times that of the parts
        sketch = [scale * number for number in self._sketch(self._parts)]
        return [self._length, sum(number * number for number in sketch), *sketch]

    def skip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing: the variance does not depend on earlier steps."""

    def read(self, sums: Sequence[float], workers: int) -> float:
        """Return the estimate; nan if a replica's parameters are not finite."""
        length, squares, *sketch = (number / workers for number in sums)
        if not all(map(math.isfinite, (length, squares, *sketch))):
            return math.nan
        # fsum rounds once: the same bits with every version of Python.
        variance = squares - math.fsum(number * number for number in sketch)
        if variance < ROUNDING * squares:
            return 0.0
        return variance / length if length > 0 else variance

    def over(self, sums: Sequence[float], workers: int) -> str | None:
        """Return the reason to synchronise if the variance has reached ``delta``, else None."""
        far = self._delta is not None and self.read(sums, workers) >= self._delta
        return "replicas are far from each other" if far else None

    def synchronised(self, parameters: Sequence[torch.Tensor]) -> None:
        self._length = squared_length([parameter.detach() for parameter in parameters])

    def state(self) -> list[float]:
        return [self._length]

    def load(self, state: Sequence[float]) -> None:
        (self._length,) = state
