"""This worker's view of the workers it trains with: carries operations through, and gets into the next generation."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.cluster import faults
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group, form
from holdfast.cluster.membership import Generation, Membership, Standing, Store
from holdfast.commit.operation import Operation, mark_of, name_of, refuse_to_differ
from holdfast.commit.settle import Account, Settlement, account_of, settle
from holdfast.errors import Broken
from holdfast.plan.tree import tree_sum

Connect = Callable[[Generation, str, Store | None, torch.device], Group]
Entered = Callable[[Generation, Settlement], None]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of state that one worker was sent, and has sent."""

    received: int = 0
    sent: int = 0


class StateKeeper(Protocol):
    """Whoever keeps this worker's state, and gets it ready for a generation (``recovery.arrange``)."""

    @property
    def minimum(self) -> int:
        """How many workers it takes to hold the model."""

    def account(self) -> Account:
        """Return what this worker holds."""

    def holds(self, units: Collection[int]) -> bool:
        """Whether all of these units are here."""

    def hold_nothing(self) -> None:
        """Note that what is here is not the run's state."""

    def inform(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        """Afterwards everybody knows where the run is."""

    def bring_back(self, group: Group, generation: Generation, settlement: Settlement) -> Settlement:
        """Compute again what nobody holds any more; return who holds it then."""

    def provide(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Give everybody a place, and what it needs there."""

    def let_go(self) -> None:
        """After the first vote of a generation: free what is not of this worker's place."""


class Cohort:
    """This worker's view of the workers it trains with, and of what they have committed together.

    ``connect`` forms the group of a generation; tests have groups of their own.
    """

    def __init__(
        self,
        membership: Membership,
        keeper: StateKeeper,
        device: torch.device,
        events: Events,
        *,
        connect: Connect = form,
    ) -> None:
        self.membership = membership
        self.group: Group | None = None
        self.everybody_leaves = False  # as the last vote said
        self._keeper = keeper
        self._device = device
        self._events = events
        self._connect = connect
        self._leaves = False  # as this worker has told the others
        self._operation: int | None = None  # None until the state is the cohort's
        self._voted: Operation | None = None
        self._doing = ""
        self._result: float | None = None
        self._ended = 0  # the newest generation known to be over
        self._stop_at_boundary = False
        self._first_of_generation = False
        self._closed: list[Group] = []  # groups of past generations, freed once training goes on
        self._sent = 0  # bytes, in past generations
        self._called = False  # a meeting, for somebody who wants to join or leave
        self._entered: list[Entered] = []
        membership.on_break(self._broken)

    def on_enter(self, callback: Entered) -> None:
        """Call ``callback`` in each new generation, once everybody has what it needs."""
        self._entered.append(callback)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of its generation."""
        return self.group is not None and self.group.rank == 0

    @property
    def size(self) -> int:
        """How many workers train."""
        return 1 if self.group is None else self.group.size

    @property
    def workers(self) -> list[str]:
        """Who trains, as far as this worker knows."""
        return [] if self.group is None else self.group.generation.workers

    @property
    def sent(self) -> int:
        """Bytes that this worker has sent to others."""
        return self._sent + (0 if self.group is None else self.group.bytes)

    @property
    def begun(self) -> bool:
        """Whether anything was committed: from then on what survivors hold is the run's state."""
        return bool(self._operation)

    @property
    def stops(self) -> bool:
        """Whether somebody joins or leaves at the next boundary, as all have voted."""
        return self._stop_at_boundary

    @property
    def generation(self) -> int:
        """The number of the generation; 0 before the first."""
        return 0 if self.group is None else self.group.generation.number

    def _broken(self, number: int) -> None:
        """Called from another thread: the generation is over, whatever we are doing in it."""
        self._ended = max(self._ended, number)
        group = self.group
        if group is not None and group.generation.number <= number:
            group.abort("the coordinator ended the generation")

    # --- operations ------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Between two steps: take part for the first time, let joiners in and leavers out."""
        if self.group is None or self._stop_at_boundary:
            self._called = False
            self._regroup(boundary=True, broken=False)

    def call_if_wished(self) -> None:
        """Where votes are far apart: if somebody wants to join or leave, end the generation, so that all meet soon.

        The wish is remembered for that vote: the coordinator may tell the next generation of it later.
        """
        assert self.group is not None
        if not self._called and any(self.membership.wishes()):
            self._called = True
            self.group.abort("somebody wants to join or leave")

    def rejoin(self) -> None:
        """After ``Broken`` where there was nothing to vote on: get into the next generation."""
        self._regroup(boundary=False, broken=True)

    def commit(self, operation: Operation) -> float:
        """Carry an operation through, however often it takes; return the sum of all workers' values."""
        before = self._operation
        assert self.group is not None
        assert before is not None
        self._doing = operation.kind
        self.membership.doing(before, name_of(operation))
        while self._operation == before:
            if self._succeeds(operation):
                self._apply(operation)
            else:  # not where the exception is: its frames would keep the broken attempt's memory
                if self._voted is None:
                    operation.drop()
                self._regroup(boundary=False, broken=True)
        self._doing = ""
        assert self._result is not None
        return self._result

    def _succeeds(self, operation: Operation) -> bool:
        assert self.group is not None
        try:
            self._result = self._vote(operation, operation.attempt(self.group))
        except Broken:
            return False
        return True

    def _vote(self, operation: Operation, values: list[float]) -> float:
        """Whoever gets through here knows that every member holds the operation's complete result."""
        assert self.group is not None
        joiners, self._leaves = self.membership.wishes()
        joiners = joiners or self._called
        faults.point("vote")
        mark = mark_of(operation)
        ballot = torch.tensor([mark, mark**2, joiners, self._leaves, *values], dtype=torch.float64)
        ballot = ballot.to(self._device)
        self._voted = operation
        self.group.vote(ballot)
        marks, squares, joining, leaving, *sums = ballot.tolist()
        refuse_to_differ(marks, squares, self.group.size)
        faults.point("voted")
        self._stop_at_boundary = self._stop_at_boundary or joining + leaving > 0
        # Those who would stay cannot hold the model: better all save and end than some for nothing.
        too_few = self.group.size - leaving < self._keeper.minimum and not joining
        self.everybody_leaves = leaving > 0 and (leaving == self.group.size or too_few)
        return tree_sum(sums)

    def _apply(self, operation: Operation) -> None:
        assert self._operation is not None
        assert self._result is not None
        assert self.group is not None
        operation.apply(self._result)
        self._voted = None
        self._operation += 1
        if self._first_of_generation:
            self._first_of_generation = False
            self._keeper.let_go()
            self._free_closed_groups()
            self.membership.progressed(self.group.generation, self._operation)

    def _free_closed_groups(self) -> None:
        """Ten milliseconds each, under the interpreter's lock: not while survivors recover."""
        closed, self._closed = self._closed, []
        threading.Thread(target=closed.clear, daemon=True).start()

    # --- generations -----------------------------------------------------------------------------

    def _regroup(self, *, boundary: bool, broken: bool) -> None:
        """Give up the current generation and get into the next one that becomes whole."""
        while True:
            if self.group is not None:
                self.group.close()
                self._closed.append(self.group)
                self._sent += self.group.bytes
                self.group.bytes = 0  # counted once, if this has to be tried again
            faults.point("regroup")
            generation = self.membership.regroup(self._standing(boundary, broken))
            try:
                self._enter(generation)
                return
            except Broken as reason:
                self._events.write(
                    "broken", worker=self.membership.worker, generation=generation.number, reason=str(reason)
                )
                broken = True

    def _standing(self, boundary: bool, broken: bool) -> Standing:
        account = dataclasses.replace(
            self._keeper.account(),
            doing=self._doing,
            result=self._result,
            everybody_leaves=self.everybody_leaves,
        )
        return Standing(
            operation=self._operation,
            voted=self._voted is not None,
            boundary=boundary,
            broken=broken,
            # Not a wish since then: those who leave together must have voted on it.
            leaving=self._leaves or self.everybody_leaves,
            payload=account.to_json(),
        )

    def _enter(self, generation: Generation) -> None:
        """Connect, settle, and get what this worker's place needs. ``Broken`` may fly through it."""
        self.group = group = self._join(generation)
        settlement = settle(generation.standings)
        self._take_sides(generation, settlement)
        self._keeper.inform(group, generation, settlement)
        if settlement.begins is None:
            self._operation = settlement.operation  # what is held from here on counts, even if this breaks
        settlement = self._keeper.bring_back(group, generation, settlement)
        traffic = self._keeper.provide(group, generation, settlement)
        self._operation = settlement.operation
        self._stop_at_boundary = False
        self._first_of_generation = True
        for callback in self._entered:
            callback(generation, settlement)
        self._events.write(
            "entered",
            worker=self.membership.worker,
            generation=generation.number,
            operation=self._operation,
            reason=settlement.reason,
            received=traffic.received,
            sent=traffic.sent,
            undone=settlement.undone,
            inexact=settlement.inexact,
        )

    def _join(self, generation: Generation) -> Group:
        store = None if len(generation.members) == 1 else self.membership.store(generation)
        group = self._connect(generation, self.membership.worker, store, self._device)
        self.group = group  # from here on it can be aborted
        self.membership.formed()
        if self._ended >= generation.number:  # it ended before there was a group to abort
            group.abort("the generation ended while it formed")
        group.check()
        return group

    def _take_sides(self, generation: Generation, settlement: Settlement) -> None:
        """Roll forward or drop, as the settlement says."""
        worker = self.membership.worker
        if worker in settlement.forward:
            self._roll_forward(generation, settlement)
        elif self._voted is not None:
            self._voted.drop()
            self._voted = None
        if not self._keeper.holds(settlement.held[worker]):  # it was to be taken back, and could not be
            raise Broken("this worker does not hold what it had said")
        if settlement.begins is not None or worker in settlement.newcomers:
            self._operation = None  # until it knows where the run is
            self._keeper.hold_nothing()

    def _roll_forward(self, generation: Generation, settlement: Settlement) -> None:
        operation = self._voted
        assert operation is not None, "only a worker that has voted can roll forward"
        newest = next(s for s in generation.standings.values() if s.operation == settlement.operation)
        account = account_of(newest)
        assert account.result is not None
        self._result, self.everybody_leaves = account.result, account.everybody_leaves
        operation.apply(account.result)
        self._keeper.let_go()  # others saw the vote succeed: everybody had what it needed
        self._voted = None
        self._operation = settlement.operation
