"""The cohort: this worker's view of the workers it trains with. It commits operations and enters generations.

An operation is committed in three parts. Each worker *attempts* it: it computes a result and changes nothing that
lasts. Then all *vote*: the vote succeeds for a worker only when it has heard from every other, so it proves that all
hold the result. Each worker that sees it succeed *applies* the result.

A worker may be lost at any point of this. Then the others regroup: each shows its standing (how many operations it has
committed, and whether it has voted for the next one), and ``settle`` decides. If anybody has applied the operation, the
vote had succeeded, so all who voted hold the result and *roll forward*: they apply it now, without computing. If nobody
has, all *drop* their attempts, and do the operation again. So each operation is applied exactly once by everybody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.cluster import faults
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Generation, Membership, Standing
from holdfast.cluster.pulse import PULSE, Where
from holdfast.cluster.talk import Shared
from holdfast.cluster.team import ALONE, Team
from holdfast.commit.operation import Operation, mark_of, name_of, refuse_to_differ
from holdfast.commit.settle import Account, Settlement, account_of, settle
from holdfast.errors import Broken
from holdfast.plan.tree import tree_sum

Entered = Callable[[Generation, Settlement], None]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of state that one worker was sent, and has sent."""

    received: int = 0
    sent: int = 0


class StateKeeper(Protocol):
    """The keeper of this worker's state, which gets it ready for a generation (``recovery.arrange.Arranger``)."""

    @property
    def minimum(self) -> int:
        """The smallest number of workers that can hold the model."""

    def account(self) -> Account:
        """Return a description of the state that this worker holds."""

    def holds(self, units: Collection[int]) -> bool:
        """Whether all of these units are here."""

    def hold_nothing(self) -> None:
        """Note that the values in this worker's memory are not the run's state."""

    def inform(self, group: Group, generation: Generation, settlement: Settlement) -> None:
        """Tell newcomers where the run is: step, settings, costs of the layers."""

    def bring_back(self, group: Group, generation: Generation, settlement: Settlement) -> Settlement:
        """Compute lost units again; return the settlement with their new holders."""

    def provide(self, group: Group, generation: Generation, settlement: Settlement) -> Traffic:
        """Give every worker a place in the layout, and the state that it lacks there."""

    def let_go(self) -> None:
        """Free the layers that are not of this worker's place. Called after the first vote of a generation."""


class Cohort:
    """This worker's view of the workers it trains with, and of the operations they have committed together."""

    def __init__(
        self,
        membership: Membership,
        keeper: StateKeeper,
        device: torch.device,
        events: Events,
        *,
        team: Team = ALONE,
    ) -> None:
        self.membership = membership
        self._team = team
        self.group: Group | None = None
        self.everybody_leaves = False  # result of the last vote
        self._keeper = keeper
        self._device = device
        self._events = events
        self._leaves = False  # this worker has said in its last vote that it was asked to leave
        self._operation: int | None = None  # number of committed operations; None until this worker has the state
        self._voted: Operation | None = None  # operation that it has voted for and not yet applied or dropped
        self._doing = ""  # kind of the operation in hand
        self._result: float | None = None  # value of the last operation
        self._ended = 0  # the newest generation known to be over
        self._stop_at_boundary = False  # somebody joins or leaves at the next boundary
        self._first_of_generation = False  # the next commit is the first of its generation
        self._has_stepped = False  # a step was committed in this generation
        self._unreached: tuple[str, ...] = ()  # members whose machines did not answer in the last generation
        self._refused: tuple[str, ...] = ()  # those whose machines refused this worker
        self._sent = 0  # bytes sent in past generations
        self._joined: set[str] = set()  # workers that came after the begin, as far as this one knows
        self._called = False  # the generation was ended for somebody who wants to join or leave
        self._entered: list[Entered] = []
        membership.on_break(self._broken)

    def on_enter(self, callback: Entered) -> None:
        """Call ``callback`` in each new generation, once everybody has what it needs."""
        self._entered.append(callback)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of its generation, and this process the first of its team."""
        return self.group is not None and self.group.is_first

    @property
    def size(self) -> int:
        """The number of workers that train."""
        return 1 if self.group is None else self.group.size

    @property
    def workers(self) -> list[str]:
        """The names of the workers that train, as far as this worker knows."""
        return [] if self.group is None else self.group.generation.workers

    @property
    def sent(self) -> int:
        """Bytes that this worker has sent to others."""
        return self._sent + (0 if self.group is None else self.group.bytes)

    @property
    def begun(self) -> bool:
        """Whether anything was committed. From then on the survivors' state is the run's state."""
        return bool(self._operation)

    @property
    def stops(self) -> bool:
        """Whether somebody joins or leaves at the next boundary. All workers agree on it: they have voted on it."""
        return self._stop_at_boundary

    @property
    def joiners(self) -> Collection[str]:
        """The workers of this generation that came after the begin, as far as this one knows."""
        return self._joined.intersection(self.workers)

    @property
    def generation(self) -> int:
        """The number of the generation; 0 before the first."""
        return 0 if self.group is None else self.group.generation.number

    def _broken(self, number: int) -> None:
        """Abort the group of a generation that is over. Called from the membership's thread."""
        self._ended = max(self._ended, number)
        group = self.group
        if group is not None and group.generation.number <= number:
            group.abort("the coordinator ended the generation")

    # --- operations ------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Regroup between two steps if this worker has no group yet, or somebody joins or leaves here."""
        if self.group is None or self._stop_at_boundary:
            self._called = False
            self._regroup(boundary=True, broken=False)

    def call_if_wished(self) -> None:
        """End the generation if somebody wants to join or leave. For replicas that vote seldom: so they meet soon.

        The wish is remembered for the next vote, because the coordinator may tell the next generation of it later.
        """
        assert self.group is not None
        if not self._called and any(self.membership.wishes()):
            self._called = True
            self.group.abort("somebody wants to join or leave")

    def rejoin(self) -> None:
        """Enter the next generation after ``Broken``, where there was nothing to vote on."""
        self._regroup(boundary=False, broken=True)

    def commit(self, operation: Operation) -> float:
        """Attempt an operation until it is committed; return the sum of all workers' values.

        Raises ``UsageError`` if workers vote on different operations, and whatever the operation's methods raise.
        """
        while (result := self.try_commit(operation)) is None:
            pass
        return result

    def try_commit(self, operation: Operation) -> float | None:
        """Attempt an operation once; return the sum of all workers' values, or None if nobody has committed it.

        After None this worker is in another generation, in which all attempt it again. Raises as ``commit`` does.
        """
        before = self._operation
        with self.doing(operation):
            succeeded = self._succeeds(operation)
            if succeeded:
                self._apply(operation)
        if not succeeded:
            # Outside of the except clause: the exception's frames would keep the broken attempt's memory.
            if self._voted is None:
                operation.drop()
            # Once it has voted it must keep the result: another worker may have seen the vote succeed.
            self._regroup(boundary=False, broken=True)
        if self._operation == before:
            return None
        self._doing = ""
        return self._result

    @contextmanager
    def doing(self, operation: Operation) -> Iterator[None]:
        """Say, while this context lasts, that this worker computes what it is going to attempt."""
        assert self.group is not None
        assert self._operation is not None
        self._doing = operation.kind
        self.membership.doing(self._operation, name_of(operation))
        with PULSE.at(self._where(operation)):
            yield

    def _where(self, operation: Operation) -> Where:
        """Say what the operation is to those who look for hung workers: a generation's first step may take long."""
        return "step" if operation.kind == "step" and self._has_stepped else "operation"

    def _succeeds(self, operation: Operation) -> bool:
        """Attempt and vote; return whether the vote succeeded."""
        assert self.group is not None
        try:
            if operation.kind != "step":  # those of a step have met when it began
                self._team.exchange(f"the begin of {name_of(operation)}")
            with self._team.together(" ".join(filter(None, (name_of(operation), operation.asked)))):
                values = operation.attempt(self.group)
            self._result = self._vote(operation, values)
        except Broken:
            return False
        return True

    def _vote(self, operation: Operation, values: list[float]) -> float:
        """Vote for an operation; return the sum of all values. Raises ``Broken`` if somebody is not heard.

        A worker that returns from here knows that every member holds the operation's complete result.
        """
        assert self.group is not None
        joiners, self._leaves = self.membership.wishes()
        joiners = joiners or self._called
        faults.point("vote")
        mark = mark_of(operation)
        shares = operation.shares
        few = values if shares is None else []
        ballot = torch.tensor([mark, mark**2, joiners, self._leaves, *few], dtype=torch.float64, device=self._device)
        self._voted = operation
        shared = None if shares is None else Shared(rows=[values], shares=shares)
        told, sums = self._team.led(lambda: self._cast(ballot, shared))
        if not self._team.leads:
            self.group.voted()
        marks, squares, joining, leaving, *heard = told
        refuse_to_differ(marks, squares, self.group.size, self.joiners)
        faults.point("voted")
        self._stop_at_boundary = self._stop_at_boundary or joining + leaving > 0
        # If the workers that stay cannot hold the model, all save and end together.
        too_few = self.group.size - leaving < self._keeper.minimum and not joining
        self.everybody_leaves = leaving > 0 and (leaving == self.group.size or too_few)
        return sums[0] if sums else tree_sum(heard)

    def _cast(self, ballot: torch.Tensor, shared: Shared | None) -> tuple[list[float], list[float]]:
        """Cast this worker's ballot; return the sums of all ballots, and of the shared values. Raises ``Broken``.

        The leader of a team votes when all of its ranks hold the result. So if a vote succeeds, all ranks of all teams
        do; and a team whose leader has seen it succeed applies it on all ranks, or is lost as a whole.
        """
        assert self.group is not None
        sums = self.group.vote(ballot, shared)
        return ballot.tolist(), sums

    def _apply(self, operation: Operation) -> None:
        """Apply an operation whose vote has succeeded. After a generation's first one, recovery is over."""
        assert self._operation is not None
        assert self._result is not None
        assert self.group is not None
        operation.apply(self._result)
        self._voted = None
        self._operation += 1
        self._has_stepped = self._has_stepped or operation.kind == "step"
        if self._first_of_generation:
            self._first_of_generation = False
            self._keeper.let_go()
            self.membership.progressed(self.group.generation, self._operation)

    # --- generations -----------------------------------------------------------------------------

    def _regroup(self, *, boundary: bool, broken: bool) -> None:
        """Leave the current generation, and try generations until one can be entered.

        ``boundary``: this worker is between two steps. ``broken``: the current generation failed.
        """
        while True:
            if self.group is not None:
                self._unreached = self._unreached or self.group.unreached
                self.group.close()
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
                broken, self._unreached, self._refused = True, reason.unreached, reason.refused

    def _standing(self, boundary: bool, broken: bool) -> Standing:
        """Return what this worker shows to get into the next generation."""
        account = self._keeper.account()
        ranks = self._team.exchange("what is held", [account.held, account.next])
        account = dataclasses.replace(
            account,
            held=common([held for held, _ in ranks]),
            next=common([coming for _, coming in ranks]),
            doing=self._doing,
            result=self._result,
            everybody_leaves=self.everybody_leaves,
        )
        return Standing(
            operation=self._operation,
            voted=self._voted is not None,
            boundary=boundary,
            broken=broken,
            unreached=self._unreached,
            refused=self._refused,
            # A wish that came after the last vote waits: workers that leave together must have voted on it.
            leaving=self._leaves or self.everybody_leaves,
            payload=account.to_json(),
        )

    def _enter(self, generation: Generation) -> None:
        """Connect, settle, and get the state that this worker's place needs. May raise ``Broken`` at any point.

        The order matters. Sides are taken first, so that state counts as the settlement says even if a later part
        breaks. Newcomers are told where the run is before layers are computed again or copied, since both depend
        on it. The ranks of a team meet after each part that talks to others: so they stay together.
        """
        with self._team.together("the begin of a generation"):
            self.group = group = self._join(generation)
        settlement = settle(generation.standings)
        self._take_sides(generation, settlement)
        with self._team.together("where the run is"):
            self._keeper.inform(group, generation, settlement)
        if settlement.begins is None:
            self._operation = settlement.operation  # units that arrive from here on count, even if a later part breaks
        with self._team.together("the state of its place"):
            settlement = self._keeper.bring_back(group, generation, settlement)
            traffic = self._keeper.provide(group, generation, settlement)
        self._operation = settlement.operation
        self._joined |= set() if settlement.begins is not None else set(settlement.newcomers)
        self._stop_at_boundary = False
        self._first_of_generation = True
        self._has_stepped = False
        self._unreached = self._refused = ()
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
        """Meet the members of a generation. Raises ``Broken`` if it ends meanwhile."""
        faults.point("enter")
        group = self.membership.connect(generation, self._device)
        self.group = group  # from here on ``_broken`` can abort it
        if self._ended >= generation.number:  # ``_broken`` was called before there was a group to abort
            group.abort("the generation ended while it formed")
        group.gather()
        self.membership.formed()
        return group

    def _take_sides(self, generation: Generation, settlement: Settlement) -> None:
        """Roll forward or drop the operation that this worker has voted for, as the settlement says.

        Raises ``Broken`` if the drop has lost units that this worker had said it holds: an eager update that could
        not be undone. The next standing then shows what is left.
        """
        worker = self.membership.worker
        if worker in settlement.forward:
            self._roll_forward(generation, settlement)
        elif self._voted is not None:
            self._voted.drop()
            self._voted = None
        # Somebody who came since that vote has not heard of it: all have to vote on it again.
        newest = [account_of(s) for s in generation.standings.values() if s.operation == settlement.operation]
        known = bool(newest) and all(account.everybody_leaves for account in newest)
        self.everybody_leaves = known and not settlement.newcomers
        if not self._keeper.holds(settlement.held[worker]):
            raise Broken("this worker does not hold what it had said")
        if settlement.begins is not None or worker in settlement.newcomers:
            self._operation = None  # until it was told where the run is
            self._keeper.hold_nothing()

    def _roll_forward(self, generation: Generation, settlement: Settlement) -> None:
        """Apply the operation that this worker has voted for: another member saw the vote succeed.

        This worker may not have heard all ballots, so it takes the sum from a member that has.
        """
        operation = self._voted
        assert operation is not None, "only a worker that has voted can roll forward"
        newest = next(s for s in generation.standings.values() if s.operation == settlement.operation)
        account = account_of(newest)
        assert account.result is not None
        self._result = account.result
        operation.apply(account.result)
        self._keeper.let_go()  # the vote succeeded, so every member had all that it needed
        self._voted = None
        self._doing = ""  # else the next generation, if this one breaks, takes it for the next operation
        self._operation = settlement.operation


def common(ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the units that all ranks of a team hold: a copy may have broken off on some of them only.

    >>> common([(0, 1, 2), (0, 2)])
    (0, 2)
    """
    return tuple(sorted(set(ranks[0]).intersection(*ranks[1:])))
