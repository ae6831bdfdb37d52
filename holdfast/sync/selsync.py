"""SelSync: replicas synchronise when their updates matter (Tyagi & Swany, CLUSTER'23, arXiv 2307.07950)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from holdfast.checks import between, by_name, one_of, whole
from holdfast.errors import UsageError
from holdfast.sync.gradient_change import SMOOTHING, GradientChange
from holdfast.sync.policy import Context, Decision, Policy
from holdfast.sync.replica_variance import ReplicaVariance
from holdfast.sync.threshold import Threshold


@by_name
@dataclass(frozen=True, kw_only=True)
class SelSync(Policy):
    """Policy that synchronises when a signal reaches a threshold: ``delta``, or one that finds itself for a ``target``.

    Give one of the two:

    - ``delta``: the threshold, as published. One replica that reaches it is enough. 0 makes every step together,
      ``math.inf`` synchronises never.
    - ``target``: the share of steps after which replicas synchronise, above 0 and up to 1. The mean of the signal over
      replicas is compared with a threshold that follows it. This needs no tuning when the model or the number of
      workers changes.

    Settings:

    - ``signal``: "gradient-change", how much the size of the gradient changed (the paper's), or "replica-variance",
      how far replicas are from each other.
    - ``aggregate``: what is averaged, "parameters" after the update or "gradients" before it.
    - ``max_local_steps``: replicas are never apart for longer. ``min_gap``: they never synchronise sooner (steps).
      ``overlap`` comes on top of both.
    - ``wait``: True acts on the numbers of the same step, and waits for them (default with ``delta``, as published);
      False acts on those of the step before, which had time to arrive (default with ``target``).
    - ``window`` (steps) and ``smoothing`` (0 to 1) are those of the mean gradient size. The paper's smoothing is the
      number of workers / 100, which is the default with ``delta``.

    Raises ``UsageError`` for settings that are out of range or cannot be kept together.

    >>> SelSync(target=0.1, max_local_steps=50).delay
    1
    >>> SelSync(delta=0).together(1000)
    True
    >>> SelSync(delta=-1)
    Traceback (most recent call last):
    holdfast.errors.UsageError: delta=-1 is no threshold (0: every step, math.inf: never, or a number between)
    """

    delta: float | None = None
    target: float | None = None
    signal: Literal["gradient-change", "replica-variance"] = "gradient-change"
    aggregate: Literal["parameters", "gradients"] = "parameters"
    max_local_steps: int | None = None
    min_gap: int = 1
    wait: bool | None = None
    window: int = 25
    smoothing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.delta is None) == (self.target is None):
            raise UsageError(
                "SelSync needs to know when", hint="give delta= (a threshold) or target= (a share of steps)"
            )
        if self.delta is not None and not _is_threshold(self.delta):
            hint = "0: every step, math.inf: never, or a number between"
            raise UsageError(f"delta={self.delta!r} is no threshold", hint=hint)
        if self.target is not None:
            between("target", self.target, 0, 1)
        one_of("signal", self.signal, ("gradient-change", "replica-variance"))
        one_of("aggregate", self.aggregate, ("parameters", "gradients"))
        whole("min_gap", self.min_gap, least=1)
        if self.max_local_steps is not None:
            whole("max_local_steps", self.max_local_steps, least=1)
        if self.wait is not None and not isinstance(self.wait, bool):
            raise UsageError(f"wait={self.wait!r} is not known", hint="True | False | None")
        whole("window", self.window, least=2)
        if self.smoothing is not None:
            between("smoothing", self.smoothing, 0, 1)
        self._check_aggregate()
        self._check_spacing()

    def _check_aggregate(self) -> None:
        if self.aggregate == "parameters":
            return
        if self.overlap:
            raise UsageError('aggregate="gradients" cannot overlap: the update waits for them', hint="overlap=0")
        if self.wait is False:
            raise UsageError('aggregate="gradients" is decided before the update', hint="wait=True")
        if self.signal == "replica-variance":
            hint = 'aggregate="parameters"'
            raise UsageError("averaging gradients never brings replicas back to each other", hint=hint)

    def _check_spacing(self) -> None:
        if self.always:
            if self.overlap or self.min_gap > 1:
                message = "every step is together: there is nothing to overlap, and no gap to keep"
                raise UsageError(message, hint="leave out overlap= and min_gap=, or another delta or target")
            return
        soonest = max(self.min_gap, 1 + self.delay + self.overlap)
        if self.target is not None and self.target * soonest > 1:
            message = f"target={self.target:g} cannot be reached: {soonest} steps lie between synchronisations at least"
            raise UsageError(message, hint="a smaller target or min_gap, no overlap, or wait=True")
        if self.max_local_steps is None:
            return
        if self.max_local_steps < soonest:
            message = f"max_local_steps={self.max_local_steps} cannot be kept: {soonest} steps lie between at least"
            raise UsageError(message, hint="a larger one, a smaller min_gap, no overlap, or wait=True")
        if self.target is not None and self.target * self.max_local_steps < 1:
            message = (
                f"max_local_steps={self.max_local_steps} alone makes more than target={self.target:g} of the steps"
            )
            raise UsageError(message, hint=f"at least {math.ceil(1 / self.target)}, or a larger target")

    @property
    def always(self) -> bool:
        """Whether every step is together, so that nothing is decided."""
        return self.delta == 0 or self.target == 1

    @property
    def delay(self) -> int:
        if self.wait is None:
            return 0 if self.delta is not None or self.aggregate == "gradients" else 1
        return 0 if self.wait else 1

    def together(self, step: int) -> bool:
        return self.always or super().together(step)

    def tracker(self, context: Context) -> Selective:
        return Selective(self)


def _is_threshold(delta: object) -> bool:
    return isinstance(delta, int | float) and not isinstance(delta, bool) and delta >= 0


class Signal(Protocol):
    """A number that is measured on each replica; all replicas read the same value from the sums of all ballots."""

    ballot: int  # how many numbers a ballot has

    def measure(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        """Return this replica's ballot, from its parameters and gradients."""

    def skip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take note of a step at which no ballot is cast."""

    def read(self, sums: Sequence[float], workers: int) -> float:
        """Return the signal, from the sums of all ballots; nan if something is not finite on a replica."""

    def over(self, sums: Sequence[float], workers: int) -> str | None:
        """Return the reason to synchronise if the signal has reached ``delta``, else None."""

    def synchronised(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that replicas are equal."""

    def state(self) -> list[float]:
        """Return what the signal remembers, always the same count of numbers."""

    def load(self, state: Sequence[float]) -> None:
        """Take over what ``state`` gave."""


class Selective:
    """Tracker of SelSync: one replica's side."""

    def __init__(self, policy: SelSync) -> None:
        self._policy = policy
        self._last = policy.warmup  # steps before it were together
        self._threshold = None if policy.target is None else Threshold(policy.target)
        self._signal = _signal(policy)
        # With an infinite delta the numbers would never be used.
        self.ballot = 0 if policy.delta == math.inf else self._signal.ballot

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        if self.ballot and self._apart(step) >= self._policy.min_gap:
            return self._signal.measure(parameters)
        if self.ballot:  # min_gap forbids to synchronise after this step: replicas need not wait for ballots
            self._signal.skip(parameters)
        return []

    def _apart(self, step: int) -> int:
        """Return how many steps replicas will have been apart when they act on the ballots of this step."""
        return step + 1 + (self._policy.delay if self.ballot else 0) - self._last

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        signal = self._signal.read(sums, workers) if self.ballot else None
        why = self._why(step, signal, sums, workers)
        level = self._policy.delta if self._threshold is None else self._threshold.value
        if self._threshold is not None:
            self._threshold.follow(step, signal or 0.0, hit=why is not None)
        if signal is not None and math.isnan(signal):
            signal = None
        return Decision(synchronise=why is not None, reason=why or "apart", signal=signal, threshold=level)

    def _why(self, step: int, signal: float | None, sums: Sequence[float], workers: int) -> str | None:
        """Return the reason to synchronise; None: replicas stay apart."""
        apart = self._apart(step)
        if apart < self._policy.min_gap:
            return None
        if signal is not None and math.isnan(signal):
            return "something is not finite on a replica"
        if signal is not None and self._threshold is None:
            over = self._signal.over(sums, workers)
            if over:
                return over
        if signal is not None and self._threshold is not None and self._threshold.reached(signal):
            return "the signal reached the threshold"
        longest = self._policy.max_local_steps
        return f"{apart} steps apart" if longest is not None and apart >= longest else None

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        self._last = max(self._policy.warmup, step)
        self._signal.synchronised(parameters)

    def state(self) -> list[float]:
        threshold = [] if self._threshold is None else self._threshold.state()
        return [float(self._last), *threshold, *self._signal.state()]

    def load(self, state: Sequence[float]) -> None:
        last, *rest = state
        self._last = round(last)
        if self._threshold is not None:
            self._threshold.load(rest[:4])
            rest = rest[4:]
        self._signal.load(rest)


def _signal(policy: SelSync) -> Signal:
    if policy.signal == "replica-variance":
        return ReplicaVariance(delta=policy.delta)
    smoothing = policy.smoothing
    if smoothing is None and policy.target is not None:
        smoothing = SMOOTHING
    return GradientChange(window=policy.window, smoothing=smoothing, delta=policy.delta)
