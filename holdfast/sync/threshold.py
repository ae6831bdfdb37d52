"""The threshold of ``SelSync(target=…)``. It follows a signal so that a given share of the steps reaches it."""

from __future__ import annotations

import math
from collections.abc import Sequence

FEW = 8  # signals that the first threshold is made from, at least: fewer are too noisy
GAIN = 0.5  # change of log(threshold) at a synchronisation. More follows the signal faster; less picks higher signals.
PULL = 0.125  # change of log(threshold) for each missed synchronisation; with more the threshold swings
MOST = 4.0  # missed synchronisations that are made up for, at most: more would come as a burst
LOWEST, HIGHEST = 1e-30, 1e30  # bounds of the threshold, so that products stay finite and above zero


class Threshold:
    """A running quantile: it goes up by a factor with every synchronisation, and down a little with every step.

    Each step adds ``GAIN * (hit - target)`` to the logarithm of the threshold. That alone gives too few hits while a
    signal falls, and too many while it rises, because the threshold lags behind. So missed hits are counted, and pull
    the threshold too. The share is one of *steps*: those at which nothing could be decided count too.

    Only sums, products and comparisons are used, which give the same bits on all machines; ``exp`` does not.

    >>> threshold = Threshold(0.25)
    >>> signals = [1.0, 2.0, 3.0, 4.0] * 100
    >>> hits = 0
    >>> for step, signal in enumerate(signals):
    ...     hit = threshold.reached(signal)
    ...     threshold.follow(step, signal, hit=hit)
    ...     hits += hit
    >>> 95 <= hits <= 105
    True
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._value = LOWEST
        self._missed = 0.0  # synchronisations that there should have been and were not
        self._seen = 0  # how many signals, up to FEW
        self._step = -1  # the last one that was decided; -1: none yet

    @property
    def value(self) -> float:
        """The present threshold."""
        return self._value

    def reached(self, signal: float) -> bool:
        """Whether the signal is high enough to synchronise. It never is before the first threshold was found."""
        return self._seen >= FEW and signal >= self._value

    def follow(self, step: int, signal: float, *, hit: bool) -> None:
        """Move the threshold after a step. ``hit``: replicas synchronise, for whatever reason."""
        if self._seen < FEW:
            self._begin(step, signal)
            return
        if math.isnan(signal) or (signal <= 0 and not hit):
            return  # no information: to follow it would end in a burst or a long silence
        due = min(self._target * (step - self._step), 1.0)  # one at most, however long the silence was
        self._step = step
        self._missed = min(max(self._missed + due - hit, -MOST), MOST)
        self._value *= _exp(GAIN * (hit - due) - PULL * due * self._missed)
        self._value = min(max(self._value, LOWEST), HIGHEST)

    def _begin(self, step: int, signal: float) -> None:
        """Find the first threshold: near the highest of the first signals, but at most doubled by one spike."""
        if 0 < signal < math.inf:
            highest = 2 * self._value if self._seen else signal
            self._value = min(max(signal, 0.8 * self._value, LOWEST), highest, HIGHEST)
            # A signal may rise from one synchronisation to the next, so it is watched for 1/target steps at least.
            self._seen += self._seen < FEW - 1 or (step + 1) * self._target >= 1
            self._step = step

    def state(self) -> list[float]:
        return [self._value, self._missed, float(self._seen), float(self._step)]

    def load(self, state: Sequence[float]) -> None:
        self._value, self._missed, seen, step = state
        self._seen, self._step = round(seen), round(step)


def _exp(exponent: float) -> float:
    """Return e to the power of a number between -2 and 2, as a series: ``math.exp`` rounds differently elsewhere.

    >>> abs(_exp(0.5) - 1.6487212707) < 1e-9
    True
    """
    term = total = 1.0
    for n in range(1, 24):
        term *= exponent / n
        total += term
    return total
