"""Computing with an average of the weights in the place of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from holdfast.cluster.group import Group
from holdfast.commit.operation import Kind, Operation
from holdfast.engine.averages import Ema
from holdfast.engine.engine import Engine
from holdfast.errors import UsageError


def averages_here(engine: Engine, ema: Ema) -> dict[nn.Parameter, torch.Tensor]:
    """Return the average of each trained parameter that has memory here. Raises ``UsageError`` for another run's."""
    if not isinstance(ema, Ema):
        raise UsageError(f"weights={ema!r} is no average of weights", hint="weights=run.ema(decay=0.999)")
    here = [p for unit in engine.model.units if engine.model.is_held(unit) for p in unit.parameters if p.requires_grad]
    return engine.update.averages.weights(ema, here)


@contextmanager
def computing_with(engine: Engine, ema: Ema | None) -> Iterator[None]:
    """Let the model compute with an average for a while; None: with its weights, as ever."""
    if ema is None:
        yield
    else:
        with engine.model.weights(averages_here(engine, ema)):
            yield


class WithWeights(Operation):
    """An operation whose attempts compute with an average of the weights.

    The weights are back after each attempt, whatever breaks: between two attempts, others may get copies of them.
    """

    def __init__(self, operation: Operation, engine: Engine, ema: Ema | None) -> None:
        self._operation, self._engine, self._ema = operation, engine, ema

    @property
    def kind(self) -> Kind:
        return self._operation.kind

    def attempt(self, group: Group) -> list[float]:
        with computing_with(self._engine, self._ema):
            return self._operation.attempt(group)

    def apply(self, value: float) -> None:
        self._operation.apply(value)

    def drop(self) -> None:
        self._operation.drop()
