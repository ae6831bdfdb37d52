"""Small runs to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast import Run
from holdfast.engine.profile.measure import measure
from holdfast.engine.profile.round_trips import MeasuredLink
from holdfast.plan.profile import LayerCost, Link, Profile

FLOAT, INT, BATCH, WIDTH = 4, 8, 4, 16  # bytes of a float and of an integer; samples; features
ACTIVATION = BATCH * WIDTH * FLOAT
LINEAR = (WIDTH * WIDTH + WIDTH) * FLOAT  # bytes of its weights


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def make_run(
    *layers: nn.Module,
    loss: Callable[[Any, Any], Tensor] = mse_loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    data: Any = None,
    micro_batch: int = BATCH,
    **settings: Any,
) -> Run:
    data = data or TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))
    return Run(
        layers=list(layers),
        loss=loss,
        optimizer=optimizer,
        data=data,
        global_batch=8,
        micro_batch=micro_batch,
        **settings,
    )


def costs(*layers: nn.Module, rounds: int = 3, **settings: Any) -> tuple[LayerCost, ...]:
    return measure(make_run(*layers, **settings).engine, rounds=rounds).costs


def profile_of(run: Run) -> Profile:
    inside = MeasuredLink(link=Link(bandwidth=1e9), seconds={}, error=0.0)
    return measure(run.engine, rounds=3).profile("test", inside)


class Masked(nn.Module):
    """Gives floats, integers, a mask and a number, as a dict or in a tuple."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner = linear()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        values = {"x": self.inner(x), "places": torch.arange(WIDTH), "mask": x > 0, "scale": 0.5}
        return values if self.kind is dict else tuple(values.values())


class Unmask(nn.Module):
    def forward(self, given: Any) -> Tensor:
        x, places, mask, scale = given.values() if isinstance(given, dict) else given
        return x * mask * scale + places


class Clock:
    """A clock that moves only when told to, in the place of the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
