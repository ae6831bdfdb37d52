"""Policies that do not look at the training: they synchronise after a number of steps, or at random."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.checks import between, by_name, whole
from holdfast.errors import UsageError
from holdfast.rng import seed_of
from holdfast.sync.policy import Context, Decision, Policy


class Periodic:
    """Tracker that synchronises when the last synchronisation, for whatever reason, is ``every`` steps ago."""

    ballot = 0

    def __init__(self, every: int, *, warmup: int = 0) -> None:
        self._every = every
        self._warmup = warmup
        self._last = warmup  # steps before it were together

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        return []

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        apart = step + 1 - self._last
        due = apart >= self._every
        return Decision(synchronise=due, reason=f"{apart} of {self._every} steps apart")

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        self._last = max(self._warmup, step)

    def state(self) -> list[float]:
        return [float(self._last)]

    def load(self, state: Sequence[float]) -> None:
        (last,) = state
        self._last = round(last)


@by_name
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Policy):
    """Policy that averages parameters every ``every`` steps. With ``warmup`` it is post-local SGD.

    Steps are counted from the last synchronisation, also if that had another reason, such as an evaluation; with
    ``overlap``, from the step after which the average was added. Raises ``UsageError`` if ``every`` is below 1.

    >>> tracker = LocalSGD(every=2).tracker(Context())
    >>> [tracker.decide(step, [], 4).synchronise for step in range(2)]
    [False, True]
    """

    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("every", self.every, least=1)

    def tracker(self, context: Context) -> Periodic:
        return Periodic(self.every, warmup=self.warmup)


@by_name
@dataclass(frozen=True, kw_only=True)
class FedAvg(Policy):
    """Policy that averages the parameters of a random ``fraction`` of the replicas, and gives the mean to all.

    It does so every ``period`` epochs (0.25: four times an epoch) or every ``every`` steps; give one of the two. The
    replicas that count are a pure function of the seed and the step. Raises ``UsageError`` for a setting that is out
    of its range, and for ``period`` in a loop that has not given ``steps_per_epoch``.

    >>> FedAvg(fraction=0.5, every=10).shares(10, 4, Context())
    [0.5, 0.5, 0.0, 0.0]
    """

    fraction: float = 1.0
    period: float | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        between("fraction", self.fraction, 0, 1)
        if (self.period is None) == (self.every is None):
            raise UsageError("FedAvg needs to know how often", hint="give period= (epochs) or every= (steps), not both")
        if self.every is not None:
            whole("every", self.every, least=1)
        if self.period is not None:
            between("period", self.period, 0, 1e9)

    def tracker(self, context: Context) -> Periodic:
        return Periodic(self._steps(context), warmup=self.warmup)

    def shares(self, step: int, workers: int, context: Context) -> list[float] | None:
        # Without the subtraction 0.7 · 10 would be 8 of 10: the product is 7.000000000000001.
        count = max(1, math.ceil(self.fraction * workers - 1e-9))
        if count >= workers:
            return None
        chosen = random.Random(seed_of("fedavg", context.seed, step)).sample(range(workers), count)
        return [1 / count if rank in chosen else 0.0 for rank in range(workers)]

    def _steps(self, context: Context) -> int:
        if self.every is not None:
            return self.every
        assert self.period is not None
        if context.steps_per_epoch is None:
            raise UsageError(
                f"period={self.period:g} is in epochs, and nobody said how many steps an epoch has",
                hint="give steps_per_epoch=, or FedAvg(every=…) in steps",
            )
        return max(1, round(self.period * context.steps_per_epoch))


class Chance:
    """Tracker that throws a coin at every step. It depends on the seed and the step alone, so all throw the same."""

    ballot = 0

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._seed = seed

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        return []

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        coin = random.Random(seed_of("chance", self._seed, step)).random()
        return Decision(synchronise=coin < self._share, reason="by chance", signal=coin, threshold=self._share)

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        pass

    def state(self) -> list[float]:
        return []

    def load(self, state: Sequence[float]) -> None:
        assert not state


@dataclass(frozen=True, kw_only=True)
class RandomSync(Policy):
    """Policy that synchronises after a random ``share`` of the steps: a baseline for policies that look at training.

    >>> tracker = RandomSync(share=0.25).tracker(Context(seed=1))
    >>> sum(tracker.decide(step, [], 4).synchronise for step in range(4000))
    1011
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        between("share", self.share, 0, 1)

    def tracker(self, context: Context) -> Chance:
        return Chance(self.share, context.seed)
