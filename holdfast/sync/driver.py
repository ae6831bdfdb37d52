"""The driver of one replica under a policy: it decides, step by step, when this replica exchanges what with whom.

Two owners use it. ``run_training`` is a ``Run``: workers come and go, and what all do together is voted on.
``loop_training`` is a user's own loop over a ``torch.distributed`` group: a lost peer ends it.

Between two steps a replica is in one of three states:

- *in touch*: nothing is under way but ballots, and with ``SSP`` pushed updates.
- *exchanging*: ``pending`` is an exchange that runs beside the next steps (``overlap``). No ballots are cast.
- *catching up*: the peers have changed. Replicas may have made different numbers of steps, so each trains alone,
  without ballots or pushes, up to the step ``meet_at`` of the one furthest ahead. There all meet.

One step apart is these calls of the owner, in this order::

    decision = driver.before_update()     # gradients are there: observe, cast the ballot, decide about gradients
    driver.average_gradients(decision)    # only if the policy averages gradients and has decided to
    (the owner makes the update, and counts the step)
    decision = driver.after_update()      # push the update, decide, perhaps begin an exchange beside the next steps
    report = driver.act(decision)         # meet, if that was decided and is due; report what became of the step
    driver.count(report)

and the state changes like this::

    in touch    --decided, no overlap-------> meet --> in touch
    in touch    --decided, overlap----------> exchanging --due, or asked to meet--> meet --> in touch
    any         --enter(peers, meet_at)-----> catching up --step == meet_at-------> meet --> in touch
    any         --meet(full=True)-----------> meet --> in touch       (an evaluation, a checkpoint, the end)

A meeting is an operation: ``attempt`` finds the mean and changes nothing that lasts, ``apply`` adopts it. An owner that
survives losses calls ``attempt`` again with new peers if the first one broke.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from holdfast.cluster import faults
from holdfast.sync.exchange import Averaging, Ballots
from holdfast.sync.meeting import GradientAverage, Meeting
from holdfast.sync.owner import Owner
from holdfast.sync.peers import Peers
from holdfast.sync.policy import Decision, Policy
from holdfast.sync.replica import Replica
from holdfast.sync.report import Report, Totals, report_of
from holdfast.sync.ssp import SSP, Pushes

CHANGED = Decision(synchronise=True, reason="the workers have changed")
BESIDE = "the exchange runs beside the next steps"


@dataclass(frozen=True, kw_only=True)
class PendingExchange:
    """An exchange that runs beside the training: what it is of, and after which step its result is added."""

    averaging: Averaging
    snapshot: list[torch.Tensor]
    due: int
    decision: Decision


class Driver:
    """One replica's side of a policy. The module's docstring describes its states and the order of calls.

    An error of the peers (``Broken`` in a run) flies through ``before_update`` and ``after_update``; the owner then
    finds new peers and tells the driver with ``enter``.
    """

    def __init__(self, policy: Policy, replica: Replica, owner: Owner, peers: Peers) -> None:
        self.policy, self.replica = policy, replica
        self.totals = Totals()
        self.sent = 0  # bytes of averages and pushed updates, without ballots
        self.ballots = Ballots(peers)
        self.pending: PendingExchange | None = None
        self.pushes: Pushes | None = None
        self._pushed_among: Peers | None = None  # the peers of ``pushes``, which may be those of a past generation
        self._owner, self._peers = owner, peers
        self._meet_at: int | None = None
        self._about_gradients: Decision | None = None  # the decision of ``before_update`` at this step
        self._pushed = 0  # bytes, after this step

    @property
    def step(self) -> int:
        return self._owner.step

    # --- peers -----------------------------------------------------------------------------------

    def enter(self, peers: Peers, *, meet_at: int | None) -> None:
        """Go on with other peers. Everything under way with the old ones is given up.

        ``meet_at``: the step at which all meet; None: replicas are equal. Pushed updates stay until then: of a lost
        replica they may be the only ones.
        """
        if self.pending is not None:
            self.pending.averaging.abandon()
        if self.pushes is not None:
            self.pushes.abandon()
        self.ballots.abandon()
        self.pending = None
        self._peers, self.ballots, self._meet_at = peers, Ballots(peers), meet_at

    @property
    def catching_up(self) -> bool:
        """Whether the peers have changed since the last meeting. Others may be at any step until the next one."""
        return self._meet_at is not None

    @property
    def is_due(self) -> bool:
        """Whether this replica has caught up, so that all meet before anything else."""
        return self._meet_at == self.step

    # --- a step apart ----------------------------------------------------------------------------

    def before_update(self) -> Decision | None:
        """Cast this replica's ballot. The owner calls it when the replica's own gradients are there.

        Returns the decision if the policy averages gradients, which comes before the update; None: it is made after.
        """
        ballot = self.replica.observe(self.step)
        self._about_gradients = None
        if not self.catching_up and self.pending is None:
            if ballot:
                self.ballots.cast(self.step, ballot)
            faults.point("ballot")
            if self.policy.aggregate == "gradients":
                self._about_gradients = self.replica.decision(self.step, self.ballots)
        self._begin_pushing()
        return self._about_gradients

    def after_update(self) -> Decision | None:
        """Push this replica's update, and decide. Starts an exchange that is to run beside the next steps."""
        self._pushed = self._push()
        if self.catching_up:
            return None
        if self.pending is not None:
            return self.pending.decision
        if self.policy.aggregate == "gradients":
            return self._about_gradients
        decision = self.replica.decision(self.step - 1, self.ballots)
        if decision is not None and decision.synchronise and self.policy.overlap:
            self._begin_exchange(decision)
        return decision

    def act(self, decision: Decision | None) -> Report:
        """Do what ``after_update`` has decided; return the report of the step."""
        if self.is_due:
            return self.meet(CHANGED)
        if decision is None:
            reason = "catching up with the others" if self.catching_up else "nothing to decide on yet"
            return Report(synchronised=False, reason=reason)
        under_way = self.pending is not None and self.pending.due > self.step
        if decision.synchronise and not under_way:
            return self.meet(decision)
        return report_of(decision, False, BESIDE if under_way else None, sent=self._pushed)

    def made_together(self) -> None:
        """Note that all have made a step with the mean of their gradients: replicas are equal."""
        self._meet_at = None
        self.replica.begin(self.step)

    def count(self, report: Report, *, step: bool = True) -> None:
        """Add a step to the totals, or a meeting without one."""
        self.totals.count(report, sent=self._owner.sent, step=step)

    # --- meetings --------------------------------------------------------------------------------

    def meet(self, decision: Decision, *, full: bool = False) -> Report:
        """Replace all replicas by their mean, now. ``full``: also optimizer state and the tracker's state."""
        meeting = Meeting(self, self._owner, full=full)
        spread = self._owner.commit(meeting)
        return report_of(decision, True, distance=math.sqrt(max(spread, 0.0)), sent=meeting.sent)

    def average_gradients(self, decision: Decision) -> Report | None:
        """Replace the gradients of all replicas by their mean; parameters stay different.

        Returns None if the peers have changed and all have met instead. Then the step is still to be made.
        """
        average = GradientAverage(self, self._owner)
        self._owner.commit(average)
        return report_of(decision, True, sent=average.sent) if average.meeting is None else None

    def averaging(
        self, peers: Peers, contribution: list[torch.Tensor], *, full: bool = False, beside: bool = False
    ) -> Averaging:
        """Start an average of contributions. In a full one every replica counts the same."""
        shares = None if full else self.policy.shares(self.step, peers.size, self.replica.context)
        return Averaging(peers, contribution, shares, beside=beside)

    def adopt(self, mean: list[torch.Tensor], *, full: bool, since: list[torch.Tensor] | None) -> None:
        """Take over the mean of a meeting. The replica is in touch again."""
        self.replica.adopt(self.step, mean, full=full, since=since)
        self.pending = self.pushes = self._pushed_among = self._meet_at = None
        self._owner.adopted(full=full, equal=since is None)

    def _begin_exchange(self, decision: Decision) -> None:
        if self.policy.optimizer_state == "average":  # an optimizer may not have made its state on all replicas
            self._owner.agree(self._peers, full=False)
        snapshot = self.replica.contribution(full=False)
        averaging = self.averaging(self._peers, snapshot, beside=True)
        due = self.step + self.policy.overlap
        self.pending = PendingExchange(averaging=averaging, snapshot=snapshot, due=due, decision=decision)

    # --- pushed updates: SSP ---------------------------------------------------------------------

    def _begin_pushing(self) -> None:
        """Start to add up updates and to send them to the others, with the next update."""
        if isinstance(self.policy, SSP) and self.pushes is None and self._peers.size > 1:
            self.pushes = Pushes(self._peers, self.replica.parameters, staleness=self.policy.staleness)
            self._pushed_among = self._peers
            if self.catching_up:
                self.pushes.abandon()  # nobody listens until all have met

    def _push(self) -> int:
        """Send this replica's update; return the number of bytes sent. While catching up, only add it up."""
        pushed = 0
        if self.pushes is not None and self.catching_up:
            self.pushes.fold()
        elif self.pushes is not None:
            pushed = self.pushes.exchange()
            self.sent += pushed
        return pushed

    def gather_pushes(self, peers: Peers) -> None:
        """Set this replica's parameters to its contribution to a meeting.

        That is the sum of its own updates, and of those of lost replicas of which it has heard most.
        """
        if self.pushes is not None:
            self.pushes.close()
        lost: list[int] = []
        if self.catching_up:
            heard = {} if self.pushes is None else self.pushes.heard
            lost = self._owner.inherited(peers, self._pushed_among, heard)
        if self.pushes is not None:
            self.pushes.gather(peers.size, lost)
