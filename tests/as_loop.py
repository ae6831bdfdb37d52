"""A program that is written as a ``Run``, and trained as a ``Loop``: what differs is who computes the passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

import holdfast


class AsLoop:
    """A ``Loop`` with the settings and the methods of a ``Run`` that has ``layers`` and a loss of output and target."""

    def __init__(self, *, layers: Any, loss: Any, clip_norm: float | None = None, **given: Any) -> None:
        self._loss, self._clip = loss, clip_norm
        model = layers if isinstance(layers, nn.Module) else nn.Sequential(*layers)
        given.pop("placement", None)
        self.loop = holdfast.Loop(model=model, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)

    def steps(self, total: int) -> Iterator[holdfast.Step]:
        model = self.loop.engine.model.module
        for step in self.loop.steps(total):
            for inputs, targets in step.micro_batches():
                step.backward(self._loss(model(inputs), targets))
            if made := step.commit(clip_norm=self._clip):
                yield made

    def evaluate(self, data: Any, **given: Any) -> Any:
        return self.loop.evaluate(data, lambda model, batch: self._loss(model(batch[0]), batch[1]), **given)
