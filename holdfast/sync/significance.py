"""SelSync's signal: by how much the size of the gradient changed, smoothed (Tyagi & Swany, arXiv 2307.07950)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# The paper's N/100 with its 16 workers. Also what is taken for N/100 until the number of workers is known.
SMOOTHING = 0.16


def squared_norm(parameters: Sequence[torch.Tensor]) -> float:
    """Of all gradients as one vector. Parameters without one count as zeros.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
    >>> squared_norm([weight])
    25.0
    """
    return squared_length([_dense(parameter.grad) for parameter in parameters if parameter.grad is not None])


def squared_length(tensors: list[torch.Tensor]) -> float:
    """Of all tensors as one vector. Squares are of doubles: a large gradient must not become infinite by that."""
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
    """The exponentially weighted mean, newest value first: weights 1, (1-s), (1-s)²… scaled to add up to one.

    >>> smoothed([4.0, 1.0], 0.5)
    3.0
    """
    weight, total, weights = 1.0, 0.0, 0.0
    for value in values:
        total += weight * value
        weights += weight
        weight *= 1 - smoothing
    return total / weights


class Change:
    """|E_i - E_{i-1}| / E_{i-1}, where E is the smoothed mean of the last ``window`` values.

    The first value has nothing to be compared with and counts as no change: replicas are equal then, and what a
    first step does is the business of ``warmup``. (The authors' program synchronises until its window is full.
    ``warmup=25`` does that too, but steps together are not measured: the window is empty after them.) From nothing to
    something is an infinite change.

    >>> change = Change(window=25)
    >>> [round(change.next(value, smoothing=0.5), 3) for value in (1.0, 4.0, 4.0)]
    [0.0, 2.0, 0.19]
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: list[float] = []  # the newest first

    def next(self, value: float, smoothing: float) -> float:
        """The change that this value makes; nan if it is not finite, and then it is not kept."""
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
    """Each replica tells its own change, and whether that reaches ``delta``; any flag is enough.

    ``smoothing`` None is the paper's: the number of workers / 100.
    """

    ballot = 2

    def __init__(self, *, window: int, smoothing: float | None, delta: float | None) -> None:
        self._change = Change(window)
        self._smoothing = smoothing
        self._delta = delta
        self._workers = 0

    def measure(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        change = self._change.next(squared_norm(parameters), self.smoothing)
        return [change, float(self._delta is not None and change >= self._delta)]

    def pass_by(self, parameters: Sequence[torch.Tensor]) -> None:
        """What comes next is compared with this one too."""
        self.measure(parameters)

    @property
    def smoothing(self) -> float:
        if self._smoothing is not None:
            return self._smoothing
        return min(1.0, self._workers / 100) if self._workers else SMOOTHING

    def read(self, sums: Sequence[float], workers: int) -> float:
        """The mean change; nan if a replica's gradient is not finite."""
        self._workers = workers
        return sums[0] / workers

    def over(self, sums: Sequence[float], workers: int) -> str | None:
        """Why replicas should synchronise, if they should."""
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
