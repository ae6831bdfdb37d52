"""A training step as an operation: attempted, voted on, applied or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from holdfast.cluster.group import Group
from holdfast.engine.attempt import Attempt
from holdfast.engine.engine import Engine
from holdfast.engine.progress import Progress
from holdfast.errors import Broken


class TrainingStep:
    """The next step of a run. ``traced`` is told the samples that this worker has used, for tests that count them."""

    kind: Literal["step"] = "step"
    step: int | None = None
    asked = ""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        *,
        traced: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self._engine, self._progress, self._traced = engine, progress, traced
        self.number = progress.update

    def attempt(self, group: Group) -> list[float]:
        self._engine.feed.set_state(self._progress.data)  # a joiner was told it, a resumed run has read it
        losses = self._engine.attempt(self.number, group)
        if self._traced is not None:
            self._traced(self._engine.used)
        return losses

    @property
    def shares(self) -> Sequence[range]:
        assert self._engine.current is not None
        return self._engine.current.loss_shares

    def apply(self, value: float) -> None:
        self._engine.apply(self.number)
        self._progress.data = self._engine.feed.state()
        self._progress.made(value, self._engine.facts)

    def drop(self) -> None:
        self._engine.drop()


class PreparedStep(TrainingStep):
    """A step whose passes the script has computed: what is left to attempt is to sum its gradients.

    ``attempt``: None if it could not begin, or broke. ``asked``: what the script commits, so that the vote fails if
    workers mean different things: the part of the step, its optimizers, the norm that gradients are clipped to.
    """

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        attempt: Attempt | None,
        *,
        asked: str = "",
        traced: Callable[[list[Any]], None] | None = None,
    ) -> None:
        super().__init__(engine, progress, traced=traced)
        self.asked = asked
        self._attempt = attempt

    def attempt(self, group: Group) -> list[float]:
        group.check()  # the script may have been told already
        if self._attempt is None:
            raise Broken("the step broke before its commit")
        losses = self._engine.finish(self._attempt)
        if self._traced is not None:
            self._traced(self._engine.used)
        return losses

    def apply(self, value: float) -> None:
        self._engine.update.forget_others()
        self._engine.apply(self.number)
        self._progress.data = self._engine.feed.state()
        noted = None if self._attempt is None else self._attempt.notes
        facts = self._engine.facts if noted is None else {**self._engine.facts, "notes": noted}
        self._progress.made(value, facts, in_parts=True)
