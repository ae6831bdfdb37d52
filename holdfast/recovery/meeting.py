"""What replicas exchange when they meet, and what is under way between two meetings."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.run.reports import GroupRanks
from holdfast.sync.exchange import Averaging
from holdfast.sync.policy import Decision, Policy
from holdfast.sync.replica import Pending, Replica
from holdfast.sync.ssp import SSP, Pushes, heirs


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What an exchange has found, complete before anybody votes on it. ``gradients``: it is of these."""

    mean: list[torch.Tensor]
    full: bool = False
    since: list[torch.Tensor] | None = None
    gradients: bool = False


class Meetings:
    """One replica's part in them. ``Broken`` may fly through ``begin``, ``exchange`` and ``push``."""

    def __init__(self, policy: Policy, replica: Replica, device: torch.device) -> None:
        self.pending: Pending | None = None
        self.staged: Staged | None = None
        self._policy, self._replica, self._device = policy, replica, device
        self._pushes: Pushes | None = None
        self._pushing: list[str] = []  # the workers among whom updates are pushed

    def forget(self) -> None:
        """The generation is over, and with it what was under way. What was pushed is still needed when all meet."""
        if self.pending is not None:
            self.pending.averaging.abandon()
        if self._pushes is not None:
            self._pushes.abandon()
        self.pending = None

    # --- the mean of all replicas ----------------------------------------------------------------

    def begin(self, group: Group, step: int, decision: Decision) -> None:
        """Starts an exchange that runs beside the next steps."""
        snapshot = self._replica.contribution(full=False)
        averaging = self._averaging(group, step, snapshot, full=False, beside=True)
        due = step + self._policy.overlap
        self.pending = Pending(averaging=averaging, snapshot=snapshot, due=due, decision=decision)

    def exchange(self, group: Group, step: int, *, full: bool, changed: bool) -> float:
        """Finds the mean, and returns this replica's part of the mean squared distance from it.

        ``changed``: some that have trained since the last meeting may be lost.
        """
        pending, since = self.pending, None
        if pending is not None:
            mean = pending.averaging.finish()
            contribution = since = pending.snapshot
        if pending is None or full or pending.due != step:  # asked for at another time: what was found is old
            contribution, since = self._replica.contribution(full=full), None
            if isinstance(self._policy, SSP):
                self._gather_pushes(group, changed=changed)
            averaging = self._averaging(group, step, self._replica.contribution(full=full), full=full)
            faults.point("average")
            mean = averaging.finish()
        faults.point("averaged")
        self.staged = Staged(mean=mean, full=full, since=since)
        return self._replica.distance(mean, contribution) / group.size

    def _averaging(
        self, group: Group, step: int, contribution: list[torch.Tensor], *, full: bool, beside: bool = False
    ) -> Averaging:
        shares = None if full else self._policy.shares(step, group.size, self._replica.context)
        return Averaging(group, contribution, shares, beside=beside)

    def exchange_gradients(self, group: Group) -> None:
        averaging = Averaging(group, self._replica.gradients(), beside=False)
        faults.point("average")
        mean = averaging.finish()
        faults.point("averaged")
        self.staged = Staged(mean=mean, gradients=True)

    def adopt(self, step: int) -> Staged:
        """All have voted: the mean is this replica's."""
        staged, self.staged = self.staged, None
        assert staged is not None
        if staged.gradients:
            self._replica.set_gradients(staged.mean)
        else:
            self._replica.adopt(step, staged.mean, full=staged.full, since=staged.since)
            self.pending = self._pushes = None
        return staged

    # --- pushed updates --------------------------------------------------------------------------

    def before_update(self, group: Group, *, changed: bool) -> None:
        """Where updates are pushed: from here on they are added up."""
        if isinstance(self._policy, SSP) and self._pushes is None and group.size > 1:
            self._pushes = Pushes(group, self._replica.parameters, staleness=self._policy.staleness)
            self._pushing = group.generation.workers
            if changed:
                self._pushes.abandon()  # nobody listens until all have met

    def push(self, *, changed: bool) -> int:
        """After an update; returns how many bytes were sent."""
        if self._pushes is not None and not changed:
            return self._pushes.exchange()
        if self._pushes is not None:
            self._pushes.fold()
        return 0

    def _gather_pushes(self, group: Group, *, changed: bool) -> None:
        """What each replica has pushed itself is whole; of lost ones, who has heard most of their updates adds them."""
        pushes, lost = self._pushes, []
        if pushes is not None:
            pushes.close()
        if changed:
            heard = {} if pushes is None else {self._pushing[rank]: n for rank, n in pushes.heard.items()}
            workers = group.generation.workers
            said = GroupRanks(group, self._device).exchange(json.dumps(heard).encode())
            found = heirs({worker: json.loads(text) for worker, text in zip(workers, said, strict=True)}, workers)
            lost = [self._pushing.index(of) for of, heir in found.items() if heir == workers[group.rank]]
        if pushes is not None:
            pushes.gather(group.size, lost)
