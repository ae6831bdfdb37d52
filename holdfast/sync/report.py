"""Reports to the user: what became of one step under a policy, and totals over all steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.sync.policy import Decision


@dataclass(frozen=True, kw_only=True)
class Report:
    """Whether replicas synchronised after a step, and why. ``step.sync`` in a run, ``replicas.last`` in a loop.

    ``signal`` was compared with ``threshold``, by policies that look at a number. ``distance`` is how far replicas
    were from their mean: the root of the mean square over replicas. ``sent``: bytes of the average, or of the pushed
    update, that this replica sent, without ballots and votes.

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
    """Return the report of a decision; ``reason`` replaces the decision's own."""
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
    """Totals over all steps so far, of one replica. ``run.sync_totals`` in a run, ``replicas.totals`` in a loop.

    A second synchronisation after the same step is not counted, but its bytes are. ``sent`` counts all bytes, also
    those of ballots.

    >>> totals = Totals()
    >>> totals.count(EVERY_STEP, sent=100); totals.count(EVERY_STEP, sent=110, step=False)
    >>> totals.count(Report(synchronised=False, reason=""), sent=110)
    >>> totals.lssr, totals.synchronised, totals.sent
    (0.5, 1, 110)
    """

    steps: int = 0
    synchronised: int = 0
    exchanged: int = 0  # steps after which replicas synchronised or pushed
    sent: int = 0  # bytes, by this replica, for whatever reason
    distance: float | None = None  # at the last synchronisation
    _met: bool = field(default=False, repr=False)  # whether replicas synchronised since the last step
    _talked: bool = field(default=True, repr=False)  # or exchanged; before the first step nothing counts

    @property
    def lssr(self) -> float:
        """The share of steps after which replicas neither synchronised nor pushed updates."""
        return 1 - self.exchanged / self.steps if self.steps else 0.0

    def count(self, report: Report, *, sent: int, step: bool = True) -> None:
        """Count a step, or with ``step=False`` a synchronisation without one. ``sent``: all bytes so far."""
        if step:
            self.steps += 1
            self._met = self._talked = False
        talked = report.synchronised or report.sent > 0
        self.exchanged += talked and not self._talked
        self.synchronised += report.synchronised and not self._met
        if report.distance is not None and (report.distance > 0 or not self._met):  # a second one finds equal replicas
            self.distance = report.distance
        self._met |= report.synchronised
        self._talked |= talked
        self.sent = sent
