"""What a user is told about a step's synchronisation, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.sync.policy import Decision


@dataclass(frozen=True, kw_only=True)
class Report:
    """Whether replicas synchronised after a step, and why.

    ``signal`` was compared with ``threshold``, where the policy looks at one. ``distance`` is how far replicas were
    from their mean, as the root of the mean square over replicas; ``sent`` are bytes that this replica sent for it.

    >>> Report(synchronised=False, reason="3 of 10 steps since the last").synchronised
    False
    """

    synchronised: bool
    reason: str
    signal: float | None = None
    threshold: float | None = None
    distance: float | None = None
    sent: int = 0


def report_of(
    decision: Decision, synchronised: bool, reason: str | None = None, *, distance: float | None = None, sent: int = 0
) -> Report:
    """What became of a decision."""
    return Report(
        synchronised=synchronised,
        reason=reason or decision.reason,
        signal=decision.signal,
        threshold=decision.threshold,
        distance=distance,
        sent=sent,
    )


EVERY_STEP = Report(synchronised=True, reason="every step")


@dataclass
class Totals:
    """Over all steps so far. ``lssr`` is the share of steps after which nothing was exchanged.

    >>> totals = Totals()
    >>> totals.count(EVERY_STEP, sent=100); totals.count(Report(synchronised=False, reason=""), sent=100)
    >>> totals.lssr, totals.sent
    (0.5, 100)
    """

    steps: int = 0
    synchronised: int = 0
    sent: int = 0  # bytes, by this replica
    distance: float | None = None  # at the last synchronisation

    @property
    def lssr(self) -> float:
        return 1 - min(self.synchronised, self.steps) / self.steps if self.steps else 0.0

    def count(self, report: Report, *, sent: int, step: bool = True) -> None:
        """One more step, or one more synchronisation without a step; ``sent`` is the sum so far."""
        self.steps += step
        self.synchronised += report.synchronised
        self.sent = sent
        if report.distance is not None:
            self.distance = report.distance
