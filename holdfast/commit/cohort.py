"""Operations that all workers commit exactly once, whoever is lost on the way.

An operation is a training step, an evaluation, or the end of training. It is *attempted* (computed and
reduced, changing nothing that lasts), *voted* on in one small exchange, and *applied* by whoever sees
the vote succeed. docs/recovery.md argues why that commits each operation exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from holdfast.cluster import faults
from holdfast.cluster.events import Events
from holdfast.cluster.group import Group, form
from holdfast.cluster.membership import Generation, Membership, Standing
from holdfast.commit.settle import Account, Settlement, account_of, settle
from holdfast.errors import Broken, UsageError
from holdfast.plan.tree import tree_sum
from holdfast.recovery.arrange import Arranger


class Kind(IntEnum):
    """What an operation is; all workers must mean the same."""

    STEP = 1
    EVALUATION = 2
    SAVE = 3
    END = 4
    CHECKPOINT = 5
    HASH = 6
    SYNC = 7


@dataclass(frozen=True, kw_only=True)
class Operation:
    """``attempt`` returns this worker's values, zero where others compute them; ``apply`` makes it last.

    ``step`` is after which step it comes, where workers may have made different numbers of them.
    """

    kind: Kind
    attempt: Callable[[Group], list[float]]
    apply: Callable[[], None] = lambda: None
    drop: Callable[[], None] = lambda: None
    step: int | None = None

    @property
    def name(self) -> str:
        """What all workers must mean, in words."""
        kind = self.kind.name.lower()
        return kind if self.step is None else f"{kind} after step {self.step}"

    @property
    def mark(self) -> int:
        """The same as a number. Its square is exact, and so is the sum of thousands of them."""
        return self.kind + 16 * ((self.step or 0) % 2**16)


def refuse_to_differ(marks: float, squares: float, size: int) -> None:
    """From the sum of everybody's mark and the sum of their squares: whether some differ. If so, all see it.

    >>> refuse_to_differ(7 + 7, 49 + 49, 2)
    >>> refuse_to_differ(6 + 8, 36 + 64, 2)
    Traceback (most recent call last):
    holdfast.errors.UsageError: workers disagree on what comes next (call run.steps, evaluate, save_model and sha256 \
on every worker, not only on the first)
    """
    if marks**2 != squares * size:
        raise UsageError(
            "workers disagree on what comes next",
            hint="call run.steps, evaluate, save_model and sha256 on every worker, not only on the first",
        )


class Cohort:
    """This worker's view of the workers it trains with, and of what they have committed together."""

    def __init__(
        self, membership: Membership, arranger: Arranger, device: torch.device, events: Events, *, resumable: bool
    ) -> None:
        """``resumable``: if nobody holds the state any more, a checkpoint may."""
        self.membership = membership
        self.group: Group | None = None
        self.everybody_leaves = False  # as the last vote said
        self._arranger = arranger
        self._resumable = resumable
        self._leaves = False  # as this worker has told the others
        self._device = device
        self._events = events
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
        self.on_enter: Callable[[Generation, Settlement], None] = lambda generation, settlement: None
        membership.on_break(self._broken)

    @property
    def is_first(self) -> bool:
        return self.group is not None and self.group.rank == 0

    @property
    def size(self) -> int:
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
    def result(self) -> float:
        """The value of the operation that was committed last."""
        assert self._result is not None
        return self._result

    @property
    def generation(self) -> int:
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
        """Where votes are far apart: if somebody wants to join or leave, ends the generation, so that all meet soon.

        The wish is remembered for that vote: the coordinator may tell the next generation of it later.
        """
        assert self.group is not None
        if not self._called and any(self.membership.wishes()):
            self._called = True
            self.group.abort("somebody wants to join or leave")

    def rejoin(self) -> None:
        """After ``Broken`` where there was nothing to vote on: gets into the next generation."""
        self._regroup(boundary=False, broken=True)

    def commit(self, operation: Operation) -> float:
        """Carries an operation through, and returns the sum of all workers' values."""
        before = self._operation
        assert self.group is not None
        assert before is not None
        self._doing = operation.kind.name.lower()
        self.membership.doing(before, operation.name)
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
        mark = operation.mark
        ballot = torch.tensor([mark, mark**2, joiners, self._leaves, *values], dtype=torch.float64)
        ballot = ballot.to(self._device)
        self._voted = operation
        self.group.vote(ballot)
        marks, squares, joining, leaving, *sums = ballot.tolist()
        refuse_to_differ(marks, squares, self.group.size)
        faults.point("voted")
        self._stop_at_boundary = self._stop_at_boundary or joining + leaving > 0
        # Those who would stay cannot hold the model: better all save and end than some for nothing.
        too_few = self.group.size - leaving < self._arranger.layout.minimum and not joining
        self.everybody_leaves = leaving > 0 and (leaving == self.group.size or too_few)
        return tree_sum(sums)

    def _apply(self, operation: Operation) -> None:
        assert self._operation is not None
        assert self.group is not None
        operation.apply()
        self._voted = None
        self._operation += 1
        if self._first_of_generation:
            self._first_of_generation = False
            self._arranger.let_go()
            self._free_closed_groups()
            self.membership.progressed(self.group.generation, self._operation)

    def _free_closed_groups(self) -> None:
        """Ten milliseconds each, under the interpreter's lock: not while survivors recover."""
        closed, self._closed = self._closed, []
        threading.Thread(target=closed.clear, daemon=True).start()

    # --- generations -----------------------------------------------------------------------------

    def _regroup(self, *, boundary: bool, broken: bool) -> None:
        """Gives up the current generation and gets into the next one that becomes whole."""
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
        return Standing(
            operation=self._operation,
            voted=self._voted is not None,
            boundary=boundary,
            broken=broken,
            # Not a wish since then: those who leave together must have voted on it.
            leaving=self._leaves or self.everybody_leaves,
            payload=self._account().to_json(),
        )

    def _account(self) -> Account:
        return Account(
            doing=self._doing,
            result=self._result,
            resumable=self._resumable,
            held=tuple(sorted(self._arranger.held)),
            next=tuple(sorted(self._arranger.kept)),
            units=self._arranger.units,
            profiled=self._arranger.profiled,
            everybody_leaves=self.everybody_leaves,
            logged=self._arranger.logged,
            undone=tuple(sorted(self._arranger.undone)),
            step=self._arranger.step,
        )

    def _enter(self, generation: Generation) -> None:
        worker = self.membership.worker
        alone = len(generation.members) == 1
        store = None if alone else self.membership.store(generation)
        self.group = form(generation, worker, store, self._device)
        self.membership.formed()
        if self._ended >= generation.number:  # it ended before there was a group to abort
            self.group.abort("the generation ended while it formed")
        self.group.check()
        settlement = settle(generation.standings)
        if worker in settlement.forward:
            self._roll_forward(generation, settlement)
        else:
            self._drop()
        if not settlement.held[worker] <= self._arranger.held:  # it was to be taken back, and could not be
            raise Broken("this worker does not hold what it had said")
        if settlement.begins is not None or worker in settlement.newcomers:
            self._operation = None  # until it knows where the run is
            self._arranger.held.clear()
        self._arranger.inform(self.group, generation, settlement)
        if settlement.begins is None:
            self._operation = settlement.operation  # what is held from here on counts, even if this breaks
        settlement = self._arranger.bring_back(self.group, generation, settlement)
        traffic = self._arranger.provide(self.group, generation, settlement)
        self._operation = settlement.operation
        self._stop_at_boundary = False
        self._first_of_generation = True
        self.on_enter(generation, settlement)
        self._events.write(
            "entered",
            worker=worker,
            generation=generation.number,
            operation=self._operation,
            reason=settlement.reason,
            received=traffic.received,
            sent=traffic.sent,
            undone=settlement.undone,
            inexact=settlement.inexact,
        )

    def _roll_forward(self, generation: Generation, settlement: Settlement) -> None:
        operation = self._voted
        assert operation is not None, "only a worker that has voted can roll forward"
        newest = next(m.standing for m in generation.members if m.standing.operation == settlement.operation)
        account = account_of(newest)
        self._result, self.everybody_leaves = account.result, account.everybody_leaves
        operation.apply()
        self._arranger.let_go()  # others saw the vote succeed: everybody had what it needed
        self._voted = None
        self._operation = settlement.operation

    def _drop(self) -> None:
        if self._voted is not None:
            self._voted.drop()
            self._voted = None
