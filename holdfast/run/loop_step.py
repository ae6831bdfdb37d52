"""A step of a ``Loop``: what the body of the user's loop computes and commits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.checks import to_norm
from holdfast.cluster import faults
from holdfast.engine.attempt import Attempt
from holdfast.errors import Broken, UsageError
from holdfast.rng import seed_everything, seed_of
from holdfast.run.script import Step

if TYPE_CHECKING:
    from holdfast.run.loop import Loop


class LoopStep:
    """A step of a ``Loop``, for the body of the loop to compute and commit.

    If the generation ends, the rest of the body passes quickly: there are no more batches, and ``commit`` gives None.
    Then the body runs again from its top. Updates of the step that are committed are passed over: they have no batches,
    and ``commit`` gives what it gave. What the body has changed in ``loop.state``, or in the settings of optimizers, is
    taken back before.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._progress = loop, loop._progress
        self.number: int = self._progress.step - (self._progress.commits > 0)  # the first step is 0
        self.made: Step | None = None  # the step as it was committed last
        self.is_broken = False  # somebody was lost: the step comes again
        self.contexts = ExitStack()  # of the attempt under way
        self._regrouped = False  # this worker has entered the next generation since
        self._part = 0  # updates that the body has come to
        self._attempt: Attempt | None = None
        self._batches: Iterator[Any] = iter(())
        self._begun = loop._begun()
        self._first_update: int = self._progress.update - self._progress.commits
        if not self._progress.commits:
            loop.body.begin()
            loop._results.begin_step()
        loop._script.begin_again(f"in {self.number}")
        self._seed("body", 0)

    @property
    def is_first_worker(self) -> bool:
        """Whether this worker is the first of those that train: print and write files there."""
        return self._loop.is_first_worker

    def _seed(self, place: str, part: int) -> None:
        """Seed the random numbers of the script: they are the same on all workers, and if the body runs again."""
        engine = self._loop.engine
        seed_everything(seed_of(engine.order.seed, self._first_update + part, place), engine.model.device)

    @property
    def left(self) -> int:
        """Number of this worker's micro-batches that have had no backward pass, once there are any."""
        return 0 if self._attempt is None else self._attempt.left

    def seed_again(self) -> None:
        """Seed the random numbers as at the top of the body, for code that only some workers have run since."""
        self._seed("body", 0)

    # --- computing -------------------------------------------------------------------------------

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's share of the step's batches, on the device. Each needs one ``backward``."""
        if self._attempt is not None:
            raise UsageError(f"step {self.number} has its micro-batches already", hint="step.commit() comes first")
        if self._loop._apart is not None and self._part:
            raise UsageError("with a policy a step has one commit", hint="sync='every-step'")
        faults.at_step(self.number, part=self._part)
        self._loop._script.is_computing = True
        self._batches = self._compute()
        return self._batches

    def _compute(self) -> Iterator[Any]:
        if self.is_broken or self._part < self._progress.commits:  # nothing to do, or it is committed already
            return
        try:
            self._attempt = self._loop.begin(self)
            yield from self._attempt.micro_batches(met=True)
        except Broken:
            self._broke()
        self._seed("computed", self._part)

    def _broke(self) -> None:
        """Note that somebody was lost: what is left of the body is passed over."""
        if self._attempt is not None:
            self._attempt.broken()
        self.is_broken = True

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the batch that ``micro_batches`` has given last.

        ``loss``: the mean over the batch, one number. Raises ``UsageError`` if there is no such batch, and
        ``LossNotFinite`` if the loss is NaN or infinite.
        """
        if self.is_broken:
            return
        if self._attempt is None:
            raise UsageError("backward without a batch", hint="for batch in step.micro_batches(): step.backward(…)")
        try:
            self._attempt.backward(loss)
        except Broken:
            self._broke()

    # --- committing ------------------------------------------------------------------------------

    def commit(self, *names: str, clip_norm: float | None = None, notes: Sequence[Any] | None = None) -> Step | None:
        """Sum the gradients of all workers, vote, and update. Returns the committed step.

        Returns None if somebody was lost: the step comes again, with the workers that are left. ``names``: the
        optimizers that step, of several; none: all. ``clip_norm``: the norm that their gradients are clipped to.
        ``notes``: a small value of each of this worker's micro-batches, such as its accuracy; the step's ``notes`` are
        those of all workers, in the order of the micro-batches. Raises ``UsageError`` if not all micro-batches had
        their backward pass, or workers do not commit the same.
        """
        clip = to_norm("clip_norm", clip_norm)
        known = self._loop._names
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"there is no optimizer {unknown[0]!r}", hint=f"one of {', '.join(known) or 'none'}")
        self._loop._script.is_computing = False
        self._close_batches()
        if self.is_broken and self._regrouped:
            return None
        if self._part < self._progress.commits:
            return self._pass_over()
        chosen = tuple(name for name in known if name in names)
        if not self.is_broken:
            self._check(chosen, notes)
        return self._commit(chosen, clip)

    def _close_batches(self) -> None:
        """End the contexts of the last batch, if the script has not asked for another one."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _pass_over(self) -> Step:
        """Return an update of this step that was committed before the body ran again."""
        self._part += 1
        self._loop.body.passed(self._part)
        self._seed("after", self._part - 1)
        self._name_place()
        self.made = self._loop._step_of(self._progress.parts[self._part - 1])
        return self.made

    def _check(self, names: tuple[str, ...], notes: Sequence[Any] | None) -> None:
        attempt = self._attempt
        if attempt is None:
            raise UsageError(
                f"step {self.number} is committed without a backward pass",
                hint="for batch in step.micro_batches(): step.backward(loss), then step.commit()",
            )
        if attempt.left:
            raise UsageError(
                f"step {self.number} is committed before all of its micro-batches were computed",
                hint="do not leave the loop over step.micro_batches() early",
            )
        if notes is not None:
            attempt.notes = self._checked(notes, len(attempt.reduction.share))
        self._loop.look_for_gradients(attempt, names)
        if self.number.bit_count() <= 1:  # what is wrong is so at once, and looking costs time
            self._loop.body.refuse_changes()

    def _checked(self, notes: Sequence[Any], count: int) -> list[Any]:
        if self._loop._apart is not None:
            raise UsageError("replicas that train apart share no notes", hint="sync='every-step'")
        if len(notes) != count:
            raise UsageError(f"there are {len(notes)} notes of {count} micro-batches", hint="one for each of them")
        try:
            return json.loads(json.dumps(list(notes)))  # as the others get them
        except (TypeError, ValueError) as e:
            raise UsageError(f"notes cannot be sent: {e}", hint="numbers, texts, lists and dicts of them") from e

    def _commit(self, names: tuple[str, ...], clip_norm: float | None) -> Step | None:
        loop, attempt = self._loop, None if self.is_broken else self._attempt
        self.contexts.close()
        self._attempt = None
        made = loop.close(attempt, names, clip_norm)
        if made is None:
            self.is_broken, self._regrouped, self.made = True, True, None
            loop.body.stop()
            return None
        self.is_broken = False
        self._part += 1
        loss, report = made
        self.made = loop._committed(loss, report, self._begun)
        loop.body.committed()
        self._name_place()
        self._begun = loop._begun()
        return self.made

    def _name_place(self) -> None:
        """Name the place after a commit: what the script asks for there has the same name on every worker."""
        self._loop._script.begin_again(f"in {self.number + 1}, part {self._part}")

    @property
    def is_computing(self) -> bool:
        """Whether passes were computed that are not committed."""
        return self._attempt is not None and not self.is_broken

    def leave(self, *, early: bool = False) -> None:
        """End the body. ``early``: the script has left the loop, perhaps because of an error."""
        script = self._loop._script
        self._close_batches()
        self.contexts.close()
        script.is_computing = False
        if early and self._attempt is not None and not self.is_broken:
            self._attempt.abandon()
            script.left_in = self.number  # parts of its sums are with other workers, and nobody waits for the rest
        if self.is_broken:
            if not self._regrouped and not early:
                self._commit((), None)
            self._loop.body.take_back()
