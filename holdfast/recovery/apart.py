"""Replicas of a run that do not talk at every step: each trains by itself, and sometimes all meet.

A step apart is nobody else's business, so it is not voted on: a replica makes it, counts it, and goes on. What all
must do at the same point of the script (a synchronisation, an evaluation, a checkpoint, the end) is an operation as
ever. After a change of generation survivors may have made different numbers of steps; those behind catch up, by
themselves, with the one furthest ahead, and there all meet. Nobody can have passed an operation that another has
not, so what lies between are steps alone. docs/sync.md tells the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from holdfast.cluster import faults
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group, alone, aside
from holdfast.cluster.membership import Generation
from holdfast.commit.cohort import Cohort, Kind, Operation, refuse_to_differ
from holdfast.commit.settle import Settlement, account_of
from holdfast.data.order import BatchedOrder, Batches, Share
from holdfast.engine.engine import Engine
from holdfast.engine.state import State
from holdfast.errors import Broken
from holdfast.plan.layout import Layout, side_by_side
from holdfast.plan.tree import tree_sum
from holdfast.recovery.meeting import Meetings
from holdfast.sync.begin import mark_of, refuse_other_forms
from holdfast.sync.exchange import Ballots
from holdfast.sync.policy import Context, Decision, Policy
from holdfast.sync.replica import Replica
from holdfast.sync.report import Report, Totals, report_of

CHANGED = Decision(synchronise=True, reason="the workers have changed")


class Apart:
    """One replica of a run under a policy."""

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
        self.totals = Totals()
        self._engine, self._state, self._cohort, self._events, self._between = engine, state, cohort, events, between
        self._order: Batches = engine.order
        model = engine.model
        self.replica = Replica(
            policy,
            parameters=model.trainable,
            buffers=lambda: (buffer for unit in model.units for buffer in unit.buffers),
            optimizer=engine.update.optimizer,
            context=Context(seed=engine.order.seed, steps_per_epoch=engine.order.steps_per_epoch),
        )
        self._layout: Layout = engine.layout
        self._aside: Group | None = None  # while the engine computes as if this replica were the only one
        self._ballots = Ballots(alone())
        self._meetings = Meetings(policy, self.replica, model.device)
        self._meet_at: int | None = None  # after a change of generation: the step of who is furthest ahead
        self._begun = False  # this replica has got a state to train from
        self._loss = 0.0
        cohort.on_enter = self._enter

    @property
    def step(self) -> int:
        return int(self._state.progress["step"])

    # --- generations -----------------------------------------------------------------------------

    def _enter(self, generation: Generation, settlement: Settlement) -> None:
        progress, group = self._state.progress, self._cohort.group
        assert group is not None
        begins = settlement.begins is not None
        # Who got the state in a generation that broke before this was called is no newcomer in the next one.
        if begins or generation.workers[group.rank] in settlement.newcomers or not self._begun:
            self._begun = True
            known = progress.get("sync", {}).get("state")
            self.replica.begin(self.step, known)
            progress["sync"] = {"step": self.step, "full": True, "state": self.replica.tracker.state()}
        self._meetings.forget()
        self._ballots.abandon()
        if isinstance(self._order, BatchedOrder):
            self._order = self._order.for_workers(group.size)
        self._layout, self._aside = self._engine.layout, None
        self._engine.order = self._order
        self._ballots = Ballots(group)
        ahead = max(
            (account_of(m.standing).step for m in generation.members if m.standing.operation is not None), default=0
        )
        equal = self.step >= ahead and self._is_met(full=True)
        if self.policy.aggregate == "gradients" and not self.policy.together(self.step):
            equal = False  # somebody may be in the middle of averaging them, and it would be alone with it
        self._meet_at = None if begins or equal else max(ahead, self.step)

    @property
    def _changed(self) -> bool:
        """Whether the workers have changed since the last meeting: others may be anywhere, until the next one."""
        return self._meet_at is not None

    def _compute_aside(self, group: Group) -> Group:
        if self._aside is None:
            layout, rank = self._layout, group.rank
            role = layout.role(rank)
            assert role is not None

            def part(count: int) -> range:
                return layout.shares(count)[role.pipeline]

            self._aside = aside(group)
            self._engine.order = Share(order=self._order, rank=rank, part=part)
            self._engine.enter(side_by_side(len(self._engine.model.layers), 1), self._aside)
        return self._aside

    def compute_together(self) -> None:
        """The engine shares the work with the others again: for steps together, and evaluations."""
        if self._aside is not None and self._cohort.group is not None:
            self._aside = None
            self._engine.order = self._order
            self._engine.enter(self._layout, self._cohort.group)

    # --- a step ----------------------------------------------------------------------------------

    def next_step(self, together: Operation, number: int) -> tuple[float, Report]:
        """The loss, and what all did after it; ``together`` is this step for all, if it is to be made so."""
        if not self.policy.together(number):
            return self._advance(number)
        while self._changed:
            self._meet_between()
        self.compute_together()
        before = self._cohort.sent
        loss = self._cohort.commit(together)
        report = Report(synchronised=True, reason="all make this step together", sent=self._cohort.sent - before)
        self.totals.count(report, sent=self._cohort.sent)
        return loss, report

    def made_together(self) -> None:
        """A step together is committed: replicas are equal."""
        self.replica.begin(self.step, None)
        self._note_met(full=True)

    def _advance(self, number: int) -> tuple[float, Report]:
        """This replica's own step, and whatever all do after it: the loss, and what became of it."""
        if not self._cohort.begun:
            self._cohort.commit(Operation(kind=Kind.SYNC, attempt=lambda group: []))  # what survivors hold counts now
        report = self._update(number)
        if report is None:
            report = self._afterwards(number)
        self._count(report)
        return self._loss, report

    def _count(self, report: Report, *, step: bool = True) -> None:
        """One more step apart, or a meeting without one; meetings are told of when they are counted."""
        self.totals.count(report, sent=self._cohort.sent, step=step)
        if report.synchronised:
            self._tell(report)

    def _update(self, number: int) -> Report | None:
        """Returns once this replica has made the step; a report if that was by a synchronisation of gradients."""
        report = None
        while self.step == number:
            if self._meet_at == number:
                self._meet_between()
                continue  # others may have come or gone: all meet once more
            try:
                decision = self._try(number)
            except Broken:
                self._engine.drop()
                self._cohort.rejoin()
                continue
            if decision is not None:
                report = self._average_gradients(number, decision)
        return report

    def _meet_between(self) -> None:
        """Before a step: what the vote has decided is done here, as those do it who have only just made the last."""
        self._count(self.meet(CHANGED), step=False)
        self._between()

    def _try(self, number: int) -> Decision | None:
        """Computes and updates; or, where gradients are to be averaged first, returns the decision to do so."""
        group = self._cohort.group
        assert group is not None
        if not self._changed:  # else all are about to meet
            self._cohort.call_if_wished()
        group.check()
        self._loss = tree_sum(self._engine.attempt(number, self._compute_aside(group)))
        ballot = self.replica.observe(number)
        if not self._changed and self._meetings.pending is None:
            self._cast_ballot(number, ballot)
            if self.policy.aggregate == "gradients":
                decision = self.replica.decision(number, self._ballots)
                if decision is not None and decision.synchronise:
                    return decision
        self._meetings.before_update(group, changed=self._changed)
        self._apply(number)
        return None

    def _apply(self, number: int) -> None:
        self._engine.apply(number)
        self._state.progress["step"] = number + 1

    # --- ballots ---------------------------------------------------------------------------------

    def _cast_ballot(self, number: int, ballot: list[float]) -> None:
        if ballot:
            self._ballots.cast(number, ballot)
        faults.point("ballot")

    def _afterwards(self, number: int) -> Report:
        """After this replica's update: act on what has been decided."""
        pushed = 0
        try:
            pushed = self._meetings.push(changed=self._changed)
            decision = self._decided(number)
        except Broken:
            self._cohort.rejoin()
            decision = None
        if self._meet_at == self.step:
            return self.meet(CHANGED)
        if decision is None:
            reason = "catching up with the others" if self._changed else "nothing to decide on yet"
            return Report(synchronised=False, reason=reason)
        if decision.synchronise and not self._is_under_way:
            return self.meet(decision)
        beside = "the exchange runs beside the next steps" if self._is_under_way else None
        return report_of(decision, False, beside, sent=pushed)

    def _decided(self, number: int) -> Decision | None:
        """What is to be done now. Where the exchange runs beside the training, it is started."""
        meetings, group = self._meetings, self._cohort.group
        assert group is not None
        if self._changed:
            return None
        if meetings.pending is not None:
            return meetings.pending.decision
        decision = self.replica.decision(number, self._ballots) if self.policy.aggregate == "parameters" else None
        if decision is not None and decision.synchronise and self.policy.overlap:
            meetings.begin(group, self.step, decision)
        return decision

    @property
    def _is_under_way(self) -> bool:
        pending = self._meetings.pending
        return pending is not None and pending.due > self.step

    # --- meetings --------------------------------------------------------------------------------

    def _is_met(self, *, full: bool) -> bool:
        met = self._state.progress["sync"]
        return bool(met["step"] == self.step and (met["full"] or not full))

    def _note_met(self, *, full: bool) -> None:
        state = self.replica.tracker.state()
        self._state.progress["sync"] = {"step": self.step, "full": full, "state": state}
        self._meet_at = None

    def settle(self, why: str, *, full: bool = True) -> None:
        """Before something that needs equal replicas: an average, unless there was one after the same step."""
        if self._cohort.group is None or not self._cohort.begun or self._is_met(full=full):
            return
        self._count(self.meet(Decision(synchronise=True, reason=why), full=full), step=False)

    def meet(self, decision: Decision, *, full: bool = False) -> Report:
        """All replicas synchronise, here and now."""
        pending = self._meetings.pending
        before = self._cohort.sent - (0 if pending is None else pending.averaging.sent)

        def attempt(group: Group) -> list[float]:
            return self._exchange(group, full=full)

        spread = self._cohort.commit(Operation(kind=Kind.SYNC, attempt=attempt, apply=self._adopt, step=self.step))
        distance = math.sqrt(max(spread, 0.0))
        return report_of(decision, True, distance=distance, sent=self._cohort.sent - before)

    def _exchange(self, group: Group, *, full: bool) -> list[float]:
        self._ballots.drop()  # what is under way is of before
        # Whoever has come from another generation must do the same as who was in the middle of a meeting.
        everything = full or self._changed
        self._agree(group, 2 * self.step + everything, mark_of(self.replica.form(full=everything)))
        return [self._meetings.exchange(group, self.step, full=everything, changed=self._changed)]

    def _agree(self, group: Group, mark: int, form: int) -> None:
        """Before tensors travel: if sizes differ, Gloo ends the process."""
        device = self._engine.model.device
        marks = torch.tensor([mark, mark**2, form, form**2], dtype=torch.float64, device=device)
        group.sum(marks)
        total, squares, forms, form_squares = marks.tolist()
        refuse_to_differ(total, squares, group.size)
        refuse_other_forms(forms, form_squares, group.size)

    def _adopt(self) -> None:
        staged = self._meetings.adopt(self.step)
        self._note_met(full=staged.full)
        if staged.since is not None:
            self._state.progress["sync"]["step"] = None  # each has gone on since: they are not equal

    def _average_gradients(self, number: int, decision: Decision) -> Report | None:
        """For comparison: gradients are averaged, and replicas stay as far apart as they are.

        None if the workers have changed, and so all have met instead: then the step is still to be made.
        """

        def attempt(group: Group) -> list[float]:
            if self._changed:
                return self._exchange(group, full=True)
            self._meetings.exchange_gradients(group)
            return [0.0]

        def apply() -> None:
            if self._meetings.staged is not None and not self._meetings.staged.gradients:
                self._adopt()
                return
            self._meetings.adopt(number)
            self._apply(number)

        before = self._cohort.sent
        self._cohort.commit(Operation(kind=Kind.SYNC, attempt=attempt, apply=apply, step=number))
        if self.step == number:
            self._between()
            return None
        self.replica.tracker.synchronised(self.step, self.replica.parameters)
        return report_of(decision, True, sent=self._cohort.sent - before)

    def _tell(self, report: Report) -> None:
        cohort = self._cohort
        facts: dict[str, Any] = {"signal": report.signal, "threshold": report.threshold, "distance": report.distance}
        self._events.write(
            "sync",
            worker=cohort.membership.worker,
            generation=cohort.generation,
            step=self.step,
            full=self._state.progress["sync"]["full"],
            sent=report.sent,
            total=cohort.sent,
            number=self.totals.synchronised,
            lssr=self.totals.lssr,
            reason=report.reason,
            **facts,
        )
