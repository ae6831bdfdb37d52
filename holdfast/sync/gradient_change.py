"""SelSync's signal: the relative change of the smoothed size of the gradient (Tyagi & Swany, arXiv 2307.07950)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

SMOOTHING = 0.16  # weight of the newest value: the paper's N/100 with its 16 workers. Used until N is known.


def squared_norm(parameters: Sequence[torch.Tensor]) -> float:
    """Return the squared norm of all gradients as one vector. Parameters without a gradient count as zeros.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
    >>> squared_norm([weight])
    25.0
    """
    return squared_length([_dense(parameter.grad) for parameter in parameters if parameter.grad is not None])


def squared_length(tensors: list[torch.Tensor]) -> float:
    """Return the squared norm of all tensors as one vector.

    Squares are of Python floats: in single precision a large gradient would become infinite.
    """
    if not tensors:
        return 0.0
    half = any(tensor.element_size() < 4 for tensor in tensors)
    norms = torch._foreach_norm(tensors, 2, torch.float32 if half else None)  # half precision would hide a change
    if norms[0].is_cuda:  # one wait for the device, not one for each
        return float(torch.stack([norm.to(norms[0].device).double() for norm in norms]).square().sum())
    return sum(norm.item() ** 2 for norm in norms)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def smoothed(values: Sequence[float], smoothing: float) -> float:
    """Return the exponentially weighted mean of values, newest first: weights 1, (1-s), (1-s)²… scaled to sum to one.

    >>> smoothed([4.0, 1.0], 0.5)
    3.0
    """
    weight, total, weights = 1.0, 0.0, 0.0
    for value in values:
        total += weight * value
        weights += weight
        weight *= 1 - smoothing
    return total / weights


class SmoothedChange:
    """The relative change |E_i - E_{i-1}| / E_{i-1}, where E is the smoothed mean of the last ``window`` values.

    The first value has nothing to be compared with and counts as no change: replicas are equal then. (The authors'
    program synchronises until its window is full. ``warmup=25`` does that too, but steps together are not measured, so
    the window is empty after them.) A change from zero to something is infinite.

    >>> change = SmoothedChange(window=25)
    >>> [round(change.next(value, smoothing=0.5), 3) for value in (1.0, 4.0, 4.0)]
    [0.0, 2.0, 0.19]
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: list[float] = []  # the newest first

    def next(self, value: float, smoothing: float) -> float:
        """Return the change that this value makes. A value that is not finite gives nan, and is not kept."""
        if not math.isfinite(value):
            return math.nan
        known = self._values
        self._values = [value, *known][: self._window]
        if not known:
            return 0.0
        before, now = smoothed(known, smoothing), smoothed(self._values, smoothing)
        if before == 0:
            return math.inf if now > 0 else 0.0
        return abs(now - before) / before

    def state(self) -> list[float]:
        missing = self._window - len(self._values)
        return [float(len(self._values)), *self._values, *[0.0] * missing]

    def load(self, state: Sequence[float]) -> None:
        count, *values = state
        self._values = values[: math.floor(count)]


class GradientChange:
    """Signal: a ballot is a replica's own change, and a flag if that reaches ``delta``. One flag is enough.

    ``smoothing``: None is the paper's, the number of workers / 100.
    """

    ballot = 2

    def __init__(self, *, window: int, smoothing: float | None, delta: float | None) -> None:
        self._change = SmoothedChange(window)
        self._smoothing = smoothing
        self._delta = delta
        self._workers = 0

    def measure(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        change = self._change.next(squared_norm(parameters), self.smoothing)
        return [change, float(self._delta is not None and change >= self._delta)]

    def skip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep this step's gradient size: the next change is measured against it."""
        self.measure(parameters)

    @property
    def smoothing(self) -> float:
        if self._smoothing is not None:
            return self._smoothing
        return min(1.0, self._workers / 100) if self._workers else SMOOTHING

    def read(self, sums: Sequence[float], workers: int) -> float:
        """Return the mean change; nan if a replica's gradient is not finite."""
        self._workers = workers
        return sums[0] / workers

    def over(self, sums: Sequence[float], workers: int) -> str | None:
        """Return the reason to synchronise if a replica has raised its flag, else None."""
        flags = round(sums[1])
        return f"the gradient changed on {flags} of {workers}" if flags else None

    def synchronised(self, parameters: Sequence[torch.Tensor]) -> None:
        pass

    def state(self) -> list[float]:
        return [float(self._workers), *self._change.state()]

    def load(self, state: Sequence[float]) -> None:
        workers, *change = state
        self._workers = round(workers)
        self._change.load(change)
