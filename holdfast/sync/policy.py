"""What a policy is: settings that a user writes, and for each replica a tracker that decides step by step.

A step is either *together* (gradients are averaged before the update, so replicas stay equal) or *apart* (each
replica updates itself with its own gradient). After a step apart replicas may *synchronise*: their parameters are
averaged. Trackers decide that from numbers that every replica tells the others, so all decide alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import nn

from holdfast.checks import one_of, whole
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.sync.loop_host import LoopHost

OptimizerState = Literal["local", "average", "reset"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether replicas synchronise, and why; with the number that was looked at, and what it was compared with."""

    synchronise: bool
    reason: str
    signal: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a tracker may depend on beside what it sees: the same on every replica."""

    seed: int = 0
    steps_per_epoch: int | None = None  # None: a hand-written loop has not said


class Tracker(Protocol):
    """One replica's side of a policy. ``step`` is the number of the step in hand, from 0."""

    ballot: int  # how many numbers it tells the others at each step apart; 0: nothing is exchanged

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        """Before the update, with unclipped gradients in ``grad``: this replica's ballot.

        Empty if nothing is to be told after this step, which must be so on all replicas.
        """

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        """From the ballots of all, added up: whether to synchronise. Called once a step apart, in order."""

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Replicas are equal now, after ``step`` steps. Also called once at the begin."""

    def state(self) -> list[float]:
        """Always as many numbers; they are averaged when all is made equal, and kept in checkpoints."""

    def load(self, state: Sequence[float]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """The settings that all policies have.

    The first ``warmup`` steps are together. ``optimizer_state``: what becomes of the optimizer's moments when
    parameters are averaged. With ``overlap``, the exchange runs beside the next so many steps and what it found is
    added then.
    """

    warmup: int = 0
    optimizer_state: OptimizerState = "local"
    overlap: int = 0

    def __post_init__(self) -> None:
        whole("warmup", self.warmup, least=0)
        whole("overlap", self.overlap, least=0)
        one_of("optimizer_state", self.optimizer_state, ("local", "average", "reset"))

    @abstractmethod
    def tracker(self, context: Context) -> Tracker:
        """A fresh one, for one replica."""

    @property
    def delay(self) -> int:
        """How many steps after a ballot it is acted on: 0 waits for it, 1 lets it travel beside the next step."""
        return 0

    @property
    def aggregate(self) -> Literal["parameters", "gradients"]:
        return "parameters"

    def together(self, step: int) -> bool:
        """Whether gradients are averaged at this step, before the update."""
        return step < self.warmup

    def shares(self, step: int, workers: int, context: Context) -> list[float] | None:
        """How much each replica counts in the average after ``step`` steps; None: all the same."""
        return None

    def around(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        seed: int = 0,
        steps_per_epoch: int | None = None,
    ) -> LoopHost:
        """Puts the policy around a training loop of your own, in a process group of your own: a context manager."""
        from holdfast.sync.loop_host import around  # only who has such a loop needs it

        return around(self, model, optimizer, group=group, seed=seed, steps_per_epoch=steps_per_epoch)


def refuse_talking_layers(model: nn.Module) -> None:
    """Layers that wait for other replicas in every forward pass have no place where replicas train apart."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"layer '{name}': SyncBatchNorm exchanges in every forward pass",
                hint="use BatchNorm (its statistics are averaged when replicas synchronise), or GroupNorm",
            )
