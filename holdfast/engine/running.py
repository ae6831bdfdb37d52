"""Running averages of statistics, as torch's normalisations make them: the rule, for many buffers at once.

A normalisation mixes the statistics of a batch into its running ones: ``momentum * batch + (1 - momentum) * running``.
Here that is done after the step, for all its micro-batches in order. The bits are those of torch's own loop on a CPU,
which takes some care: torch computes means in the type of the buffer, and variances in a wider one. (If the input of a
normalisation is neither contiguous nor channels-last, torch rounds later than it tells, and the last bit may differ.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.engine.measured import Measurement

CUMULATIVE = -1.0  # stands for the momentum of a plain mean over all batches: one over their number


@dataclass(eq=False)
class Averages:
    """Running statistics of one normalisation on their way through a step. ``count`` is None where none is kept."""

    mean: Tensor
    var: Tensor
    count: int | None


def mix(averages: Sequence[Averages], measured: Sequence[Measurement]) -> None:
    """Mix one measurement into each of several running statistics. All have the same dtype and device.

    >>> one = Averages(mean=torch.zeros(1), var=torch.ones(1), count=0)
    >>> mix([one], [Measurement([torch.ones(1), torch.zeros(1)], momentum=0.25, counted=1)])
    >>> one
    Averages(mean=tensor([0.2500]), var=tensor([0.7500]), count=1)
    """
    weights = [_count(each, one) for each, one in zip(averages, measured, strict=True)]
    sizes = [each.mean.numel() for each in averages]
    first = averages[0].mean
    new = _per_element(weights, sizes, torch.float64, first.device).to(first.dtype)
    old = 1 - new
    mean = new * _flat(one.values[0] for one in measured) + old * _flat(each.mean for each in averages)
    fresh, kept = _flat(one.values[1] for one in measured), old * _flat(each.var for each in averages)
    var = _sum_of_variances(new, fresh, kept, sizes, [one.is_narrow for one in measured])
    means, variances = mean.split_with_sizes(sizes), var.split_with_sizes(sizes)
    for each, its_mean, its_var in zip(averages, means, variances, strict=True):
        each.mean, each.var = its_mean, its_var


def _count(averages: Averages, measured: Measurement) -> float:
    """Count a batch; return the weight of its statistics."""
    if averages.count is not None:
        averages.count += measured.counted
    if measured.momentum != CUMULATIVE:
        return measured.momentum
    return 1.0 / float(averages.count) if averages.count else 0.0


def _sum_of_variances(new: Tensor, fresh: Tensor, kept: Tensor, sizes: Sequence[int], narrow: Sequence[bool]) -> Tensor:
    """Return ``new * fresh + kept`` as torch adds it: in 64 bits, or in 32 if the input had 16."""

    def added(dtype: torch.dtype) -> Tensor:
        return (new.to(dtype) * fresh.to(dtype) + kept.to(dtype)).to(fresh.dtype)

    if fresh.dtype == torch.float64 or not any(narrow):
        return added(torch.float64)
    if all(narrow):
        return added(torch.float32)
    is_narrow = _per_element(narrow, sizes, torch.bool, fresh.device)
    return torch.where(is_narrow, added(torch.float32), added(torch.float64))


def _per_element(values: Sequence[float], sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a value for each element. If all are the same, one: that is the usual case."""
    if len(set(values)) == 1:
        return torch.tensor(values[0], dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(sizes)).to(device)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(tensors))
