"""A replica of a ``Run`` under a policy: the owner of a ``Driver`` that survives the loss of workers.

A step apart is not voted on: a replica makes it, counts it, and goes on. Everything that all must do at the same point
of the script (a meeting, an evaluation, a checkpoint, the end) is an operation that the cohort commits. After a change
of generation survivors may have made different numbers of steps. Those behind catch up, by themselves, with the one
furthest ahead, and there all meet. No replica can have passed an operation that another has not, so only steps lie
between them. docs/sync.md explains it for users.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch

from holdfast.cluster import tags
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group, alone, aside
from holdfast.cluster.membership import Generation
from holdfast.cluster.pulse import PULSE
from holdfast.cluster.texts import Texts
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import Begin, refuse_to_differ
from holdfast.commit.settle import Settlement, account_of
from holdfast.data.order import BatchedOrder, Batches, Share
from holdfast.engine.attempt import Attempt
from holdfast.engine.engine import Engine
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.step import PreparedStep
from holdfast.errors import Broken
from holdfast.plan.layout import Layout, side_by_side
from holdfast.plan.tree import tree_sum
from holdfast.sync.driver import CHANGED, Driver
from holdfast.sync.owner import SyncOperation
from holdfast.sync.packed import mark_of, refuse_other_forms
from holdfast.sync.peers import Peers
from holdfast.sync.policy import Context, Decision, Policy
from holdfast.sync.replica import Replica
from holdfast.sync.report import Report, Totals
from holdfast.sync.ssp import heirs


class StepTogether(PreparedStep):
    """A step that all replicas of a run make together: they are equal after it."""

    def __init__(self, training: RunTraining, engine: Engine, progress: Progress, attempt: Attempt | None) -> None:
        super().__init__(engine, progress, attempt)
        self._training = training

    def apply(self, value: float) -> None:
        super().apply(value)
        self._training.made_together()


class RunTraining:
    """One worker's replica, when the workers of a run train apart."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        state: State,
        cohort: Cohort,
        events: Events,
        *,
        between: Callable[[], None],
    ) -> None:
        """``between`` does what there is to be done between two steps: saves, lets workers in and out."""
        self.policy = policy
        self._engine, self._state, self._cohort, self._events, self._between = engine, state, cohort, events, between
        self._order: Batches = engine.order
        model = engine.model
        self._replica = Replica(
            policy,
            parameters=model.trainable,
            buffers=lambda: (buffer for unit in model.units for buffer in unit.buffers),
            optimizer=engine.update.optimizer,
            context=Context(seed=engine.order.seed, steps_per_epoch=engine.order.steps_per_epoch),
        )
        self._driver = Driver(policy, self._replica, self, alone())
        self._layout: Layout = engine.layout
        self._aside: Group | None = None  # while the engine computes as if this replica were the only one
        self._begun = False  # this replica has got a state to train from
        self._has_stepped = False  # it has made a step apart in this generation: the first one may take long
        self._loss = 0.0
        cohort.on_enter(self._enter)

    @property
    def totals(self) -> Totals:
        """Steps, synchronisations and bytes of this worker so far."""
        return self._driver.totals

    # --- the contract with the driver ------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._state.progress.step

    @property
    def sent(self) -> int:
        return self._cohort.sent

    def commit(self, operation: SyncOperation) -> float:
        return self._cohort.commit(operation)

    def agree(self, peers: Peers, *, full: bool) -> None:
        """Raise ``UsageError`` if replicas are at different points of the script, or would send different tensors.

        Also, before they become equal in everything, if their optimizers' groups differ: these are not averaged.
        """
        if full:
            # All meet instead of making the step under way. What it has changed in buffers must not be averaged, and
            # must not be undone after the mean was adopted.
            self._engine.drop()
        update = self._engine.update
        told = [2 * self.step + full, mark_of(self._replica.form(full=full)), update.mark() if full else 0]
        marks = torch.tensor(told, dtype=torch.float64, device=self._engine.model.device)
        both = torch.cat([marks, marks**2])
        cast(Group, peers).sum(both, tag=tags.MEET)
        total, forms, groups, squares, form_squares, group_squares = both.tolist()
        refuse_to_differ(total, squares, peers.size)
        refuse_other_forms(forms, form_squares, peers.size)
        if groups**2 != group_squares * peers.size:
            raise update.other_groups()

    def adopted(self, *, full: bool, equal: bool) -> None:
        self._note_met(self.step if equal else None, full=full)

    def gradients_averaged(self) -> None:
        self._apply(self.step)

    def inherited(self, peers: Peers, pushed_among: Peers | None, heard: Mapping[int, int]) -> list[int]:
        """Return the lost ranks whose updates this worker adds: of all survivors it has heard most of them."""
        group = cast(Group, peers)
        workers = group.generation.workers
        before = [] if pushed_among is None else cast(Group, pushed_among).generation.workers
        text = json.dumps({before[rank]: number for rank, number in heard.items()}).encode()
        told = Texts(group, self._engine.model.device).exchange(text)
        found = heirs({worker: json.loads(text) for worker, text in zip(workers, told, strict=True)}, workers)
        return [before.index(lost) for lost, heir in found.items() if heir == workers[group.rank]]

    # --- generations -----------------------------------------------------------------------------

    def _enter(self, generation: Generation, settlement: Settlement) -> None:
        group = self._cohort.group
        assert group is not None
        self._has_stepped = False
        begins = settlement.begins is not None
        # A worker that got the state in a generation which broke before this call is no newcomer in the next one.
        if begins or generation.workers[group.rank] in settlement.newcomers or not self._begun:
            self._begun = True
            self._replica.begin(self.step, (self._state.progress.sync or {}).get("state"))
            self._note_met(self.step, full=True)
        if isinstance(self._order, BatchedOrder):
            self._order = self._order.for_workers(group.size)
        self._layout = self._engine.layout
        self._compute_with(group)
        trained = [standing for standing in generation.standings.values() if standing.operation is not None]
        ahead = max((account_of(standing).step for standing in trained), default=0)
        equal = self.step >= ahead and self._is_met(full=True)
        if self.policy.aggregate == "gradients" and not self.policy.together(self.step):
            equal = False  # another may be in the middle of averaging them, and would be alone with it
        self._driver.enter(group, meet_at=None if begins or equal else max(ahead, self.step))

    def _compute_aside(self, group: Group) -> Group:
        """The engine computes this replica's share of the batch alone, as steps apart need it."""
        if self._aside is None:
            layout, rank = self._layout, group.rank
            role = layout.role(rank)
            assert role is not None

            def part(count: int) -> range:
                return layout.shares(count)[role.pipeline]

            self._aside = aside(group)
            alone_with_share = side_by_side(len(self._engine.model.layers), 1)
            self._engine.enter(alone_with_share, self._aside, order=Share(order=self._order, rank=rank, part=part))
        return self._aside

    def compute_together(self) -> None:
        """The engine shares the work with the others again, as steps together and evaluations need it."""
        if self._aside is not None and self._cohort.group is not None:
            self._compute_with(self._cohort.group)

    def _compute_with(self, group: Group) -> None:
        self._aside = None
        self._engine.enter(self._layout, group, order=self._order)

    # --- a step ----------------------------------------------------------------------------------

    def next_step(self) -> tuple[float, Report]:
        """Make the next step; return its loss and what became of the policy's decision."""
        while True:
            attempt = None
            try:
                attempt = self.open()
                with self.computing():
                    self._engine.compute(attempt)
            except Broken:
                pass  # ``close`` finds it out, outside of the except clause: its frames would keep memory
            made = self.close(attempt)
            if made is not None:
                return made

    def computing(self) -> AbstractContextManager[None]:
        """Return a context that tells those who look for hung workers that this replica computes a step."""
        return PULSE.at("step" if self._has_stepped else "operation")

    def open(self) -> Attempt:
        """Begin an attempt at the next step, once all that is due before it is done. Raises ``Broken``."""
        number = self.step
        if self.policy.together(number):
            while self._driver.catching_up:
                self._meet_between()
            self.compute_together()
            assert self._cohort.group is not None
            return self._engine.begin(number, self._cohort.group)
        if not self._cohort.begun:
            self._cohort.commit(Begin())
        while self._driver.is_due:
            self._meet_between()  # others may have come or gone meanwhile: then all meet once more
        group = self._cohort.group
        assert group is not None
        if not self._driver.catching_up:  # else all are about to meet
            self._cohort.call_if_wished()
        group.check()
        return self._engine.begin(number, self._compute_aside(group))

    def close(self, attempt: Attempt | None) -> tuple[float, Report] | None:
        """Make the step that was computed; return its loss and what became of the policy's decision.

        ``attempt``: None if it could not begin. Returns None if the step is to be computed again.
        """
        if self.policy.together(self.step):
            return self._close_together(attempt)
        number, report, is_broken = self.step, None, False
        try:
            decision = self._try(attempt)
            self._has_stepped = True
        except Broken:
            is_broken, decision = True, None
        if is_broken:
            self._engine.drop()
            self._cohort.rejoin()
        elif decision is not None:
            report = self._average_gradients(decision)
        if self.step == number:
            return None
        report = report or self._afterwards()
        self._count(report)
        return self._loss, report

    def _close_together(self, attempt: Attempt | None) -> tuple[float, Report] | None:
        before = self._cohort.sent
        loss = self._cohort.try_commit(StepTogether(self, self._engine, self._state.progress, attempt))
        if loss is None:
            return None
        report = Report(synchronised=True, reason="all make this step together", sent=self._cohort.sent - before)
        self._driver.count(report)
        return loss, report

    def made_together(self) -> None:
        """Note that a step together is committed: replicas are equal."""
        self._driver.made_together()
        self._note_met(self.step, full=True)

    def _count(self, report: Report, *, step: bool = True) -> None:
        """Count a step apart, or a meeting without one. Meetings are written to the event log."""
        self._driver.count(report, step=step)
        if report.synchronised:
            self._write_event(report)

    def _meet_between(self) -> None:
        """Meet before a step; then save, and let workers in and out, as others do after their last step."""
        self._count(self._driver.meet(CHANGED), step=False)
        self._between()

    def _try(self, attempt: Attempt | None) -> Decision | None:
        """Sum and update; if gradients are to be averaged first, return that decision instead. Raises ``Broken``."""
        assert self._cohort.group is not None
        self._cohort.group.check()
        if attempt is None:
            raise Broken("the step broke before its commit")
        self._loss = tree_sum(self._engine.finish(attempt))
        decision = self._driver.before_update()
        if decision is not None and decision.synchronise:
            return decision
        self._apply(self.step)
        return None

    def _apply(self, number: int) -> None:
        self._engine.apply(number)
        self._state.progress.made(self._loss, self._engine.facts)

    def _average_gradients(self, decision: Decision) -> Report | None:
        report = self._driver.average_gradients(decision)
        if report is None:
            self._between()
            return None
        self._replica.tracker.synchronised(self.step, self._replica.parameters)
        return report

    def _afterwards(self) -> Report:
        try:
            decision = self._driver.after_update()
        except Broken:
            self._cohort.rejoin()
            decision = None
        return self._driver.act(decision)

    # --- meetings --------------------------------------------------------------------------------

    def _is_met(self, *, full: bool) -> bool:
        """Whether replicas have met, and are equal, after the step that this one is at."""
        met = self._state.progress.sync
        assert met is not None
        return bool(met["step"] == self.step and (met["full"] or not full))

    def _note_met(self, step: int | None, *, full: bool) -> None:
        """Note a meeting. ``step``: replicas are equal after it; None: each has gone on since the mean was begun."""
        self._state.progress.sync = {"step": step, "full": full, "state": self._replica.tracker.state()}

    def settle(self, why: str, *, full: bool = True) -> None:
        """Make replicas equal for something that needs it (``why``), unless they have met after the same step."""
        if self._cohort.group is None or not self._cohort.begun or self._is_met(full=full):
            return
        self._count(self._driver.meet(Decision(synchronise=True, reason=why), full=full), step=False)

    def _write_event(self, report: Report) -> None:
        cohort = self._cohort
        self._events.write(
            "sync",
            worker=cohort.membership.worker,
            generation=cohort.generation,
            step=self.step,
            full=(self._state.progress.sync or {}).get("full"),
            sent=report.sent,
            total=cohort.sent,
            number=self.totals.synchronised,
            lssr=self.totals.lssr,
            reason=report.reason,
            signal=report.signal,
            threshold=report.threshold,
            distance=report.distance,
        )
