"""Synchronisation done wrong on purpose, in the worker's process: the judges must notice each of these."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from holdfast.cluster.group import Group
from holdfast.recovery.arrange import Arranger
from holdfast.sync import exchange
from holdfast.sync.replica import Replica


def sabotage(text: str) -> None:
    """As in "deaf 0.1": that flaw, at that worker; without a worker, at all of them."""
    flaw, *workers = text.split()
    if not workers or os.environ.get("HOLDFAST_WORKER") in workers:
        FLAWS[flaw]()


def _deaf() -> None:
    """It takes part in averages, and keeps its own weights."""
    adopt = Replica.adopt

    def wrong(self: Replica, step: int, mean: list[torch.Tensor], **how: Any) -> None:
        kept = [p.detach().clone() for p in self.parameters]
        adopt(self, step, mean, **how)
        with torch.no_grad():
            for p, old in zip(self.parameters, kept, strict=True):
                p.copy_(old)

    Replica.adopt = wrong  # type: ignore[assignment]


def _greedy() -> None:
    """The first one's weights are everybody's."""

    def wrong(rows: list[torch.Tensor], shares: list[float], out: torch.Tensor) -> None:
        out.copy_(rows[0])

    exchange._mean = wrong  # type: ignore[assignment]


def _forgetful() -> None:
    """Only every second element is averaged: the rest of what it did since is lost."""
    contribution = Replica.contribution

    def wrong(self: Replica, **how: Any) -> list[torch.Tensor]:
        found = contribution(self, **how)
        found[0][: len(self.parameters[0]) : 2] = 0
        return found

    Replica.contribution = wrong  # type: ignore[assignment]


def _interrupted() -> None:
    """No flaw, but bad luck: the generation ends just when this worker has got the state that it came for."""
    provide = Arranger.provide

    def once(self: Arranger, group: Group, *rest: Any) -> Any:
        Arranger.provide = provide  # type: ignore[method-assign]
        provide(self, group, *rest)
        group.abort("the generation ends while the state comes in")
        group.check()

    Arranger.provide = once  # type: ignore[method-assign]


FLAWS: dict[str, Callable[[], None]] = {
    "deaf": _deaf,
    "greedy": _greedy,
    "forgetful": _forgetful,
    "interrupted": _interrupted,
}
