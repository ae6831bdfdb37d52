"""Data injection (SelSync): at each step some workers share a part of their batches, so that data are less skewed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.checks import whole
from holdfast.data.partition import Partition, check_place
from holdfast.errors import UsageError
from holdfast.rng import seed_of


class Amounts(NamedTuple):
    """The parts of a batch: ``own`` samples of the worker, and ``each`` samples from each of ``sharers`` workers."""

    own: int
    sharers: int
    each: int


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A partition where at each step a random fraction ``alpha`` of the workers shares ``beta`` of its batch with all.

    ``base`` is the partition that workers read their own samples by. A batch keeps its size b: of N workers m = αN
    share, a worker reads b' = b / (1 + βm) samples of its own, and the βb' of each sharer fill the batch up. In whole
    numbers: m is rounded, at least 1, and less than b; the number that each shares is rounded, at least 1, and at most
    b / (m + 1); b' is what is left of the batch. A sharer does not receive its own samples: its gap is filled with
    samples of its next step, which it reads again then.

    Where every worker can read all data, as in a ``Run``, nothing has to be sent: each worker computes what the others
    share and reads it itself. Programs that keep data apart ask ``shared`` for what has to be sent.

    Raises ``UsageError`` unless ``alpha`` and ``beta`` are above 0 and at most 1.

    >>> from holdfast.data.partition import DefDP
    >>> data = Injection(base=DefDP(size=100), alpha=0.5, beta=0.5)
    >>> data.amounts(workers=4, batch=16)
    Amounts(own=8, sharers=2, each=4)
    """

    base: Partition
    alpha: float
    beta: float
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise UsageError(f"{name}={value!r} is not above 0 and at most 1")
        whole("seed", self.seed, least=0)

    @property
    def size(self) -> int:
        """Samples of the data set."""
        return self.base.size

    def amounts(self, *, workers: int, batch: int) -> Amounts:
        """Return the parts of every worker's batch. A worker that is alone reads only its own samples."""
        if workers == 1:
            return Amounts(batch, 0, 0)
        if batch < 2:
            raise UsageError("a batch of one sample has no room for what others share", hint="at least 2 a worker")
        sharers = min(max(1, _rounded(self.alpha * workers)), workers, batch - 1)
        each = min(max(1, _rounded(self.beta * batch / (1 + self.beta * sharers))), batch // (sharers + 1))
        return Amounts(batch - sharers * each, sharers, each)

    def shared(self, step: int, *, workers: int, batch: int) -> dict[int, list[int]]:
        """Return the samples that are shared at a step, by the worker that has them."""
        check_place(self.size, step, 0, workers, batch)
        return self._shared(step, workers, self.amounts(workers=workers, batch=batch), {})

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        """Return the ``batch`` sample numbers that this worker reads at this step: its own first."""
        check_place(self.size, step, worker, workers, batch)
        amounts = self.amounts(workers=workers, batch=batch)
        mine = self.base.samples(step, worker, workers=workers, batch=amounts.own)
        shared = self._shared(step, workers, amounts, {worker: mine})
        received = [sample for one, samples in shared.items() if one != worker for sample in samples]
        if worker in shared:
            ahead = self.base.samples(step + 1, worker, workers=workers, batch=amounts.own)
            there = {*mine, *received}
            fresh = [sample for sample in ahead if sample not in there]
            mine = mine + (fresh + ahead)[: amounts.each]
        return mine + received

    def _shared(self, step: int, workers: int, amounts: Amounts, read: dict[int, list[int]]) -> dict[int, list[int]]:
        """Return what ``shared`` does. ``read`` has the batches, by worker, that are known already."""
        drawn = sorted(range(workers), key=lambda worker: seed_of(self.seed, "sharer", step, worker))
        return {
            one: (read.get(one) or self.base.samples(step, one, workers=workers, batch=amounts.own))[: amounts.each]
            for one in sorted(drawn[: amounts.sharers])
        }


def _rounded(value: float) -> int:
    """Round to the nearest whole number, halves up. (Python's ``round`` takes halves to the even number.)"""
    return int(value + 0.5)
