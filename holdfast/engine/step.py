"""A training step as an operation: attempted, voted on, applied or dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from holdfast.cluster.group import Group
from holdfast.engine.engine import Engine
from holdfast.engine.progress import Progress


class TrainingStep:
    """The next step of a run. ``traced`` is told the samples that this worker has used, for tests that count them."""

    kind: Literal["step"] = "step"
    step: int | None = None

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        *,
        traced: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._engine, self._progress, self._traced = engine, progress, traced
        self.number = progress.step

    def attempt(self, group: Group) -> list[float]:
        losses = self._engine.attempt(self.number, group)
        if self._traced is not None:
            self._traced(self._engine.used)
        return losses

    def apply(self, value: float) -> None:
        self._engine.apply(self.number)
        self._progress.step = self.number + 1

    def drop(self) -> None:
        self._engine.drop()
