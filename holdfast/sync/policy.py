"""The contract of a policy: settings that a user writes, and a tracker for each replica that decides step by step.

A step is either *together* (gradients are averaged before the update, so replicas stay equal) or *apart* (each
replica updates itself with its own gradient). After a step apart replicas may *synchronise*: their parameters are
averaged. A tracker decides that from numbers that every replica sends to all others, so all decide alike.
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
    from holdfast.sync.loop_training import LoopTraining

OptimizerState = Literal["local", "average", "reset"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A tracker's decision whether replicas synchronise, with its reason.

    ``signal`` was compared with ``threshold``, by policies that look at a number.
    """

    synchronise: bool
    reason: str
    signal: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """Facts that a tracker may use beside what it observes. They are the same on every replica."""

    seed: int = 0
    steps_per_epoch: int | None = None  # None: the user's loop has not given it


class Tracker(Protocol):
    """One replica's side of a policy. ``step`` is the number of the present step, from 0."""

    ballot: int  # how many numbers it sends to the others at each step apart; 0: nothing is sent

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        """Return this replica's ballot. It is called before the update, with unclipped gradients in ``grad``.

        An empty ballot means that nothing is decided after this step. It must then be empty on all replicas.
        """

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        """Decide whether to synchronise, from the sums of all ballots. It is called once a step apart, in order."""

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Note that replicas are equal after ``step`` steps. It is also called once at the begin."""

    def state(self) -> list[float]:
        """Return what the tracker knows, always the same count of numbers.

        They are averaged in a full synchronisation, and kept in checkpoints.
        """

    def load(self, state: Sequence[float]) -> None:
        """Take over what ``state`` gave."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """The settings that all policies have. Give one to ``Run(sync=…)``, or put it ``around`` a loop of your own.

    ``warmup``: this many steps at the begin are together. ``optimizer_state``: when parameters are averaged, the
    optimizer's moments stay as they are ("local"), are averaged too ("average"), or start anew ("reset").
    ``overlap``: an exchange runs beside the next so many steps, and its result is added then; 0 waits for it.

    A setting that is out of its range raises ``UsageError``.
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
        """Return a new tracker for one replica."""

    @property
    def delay(self) -> int:
        """Steps from a ballot to the decision on it: 0 waits for ballots, 1 lets them travel beside the next step."""
        return 0

    @property
    def aggregate(self) -> Literal["parameters", "gradients"]:
        """The tensors that a synchronisation averages: parameters after the update, or gradients before it."""
        return "parameters"

    def together(self, step: int) -> bool:
        """Whether this step is together: gradients are averaged before the update."""
        return step < self.warmup

    def shares(self, step: int, workers: int, context: Context) -> list[float] | None:
        """The weight of each replica in the average after ``step`` steps. They add up to one; None: all the same."""
        return None

    def around(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        seed: int = 0,
        steps_per_epoch: int | None = None,
    ) -> LoopTraining:
        """Put the policy around a training loop of your own. Return a context manager.

        Inside its ``with`` block each ``optimizer.step()`` follows the policy. ``group``: the processes that hold a
        replica each, a Gloo group of ``torch.distributed`` (None: the default group). ``seed`` and
        ``steps_per_epoch`` are for policies that choose at random or count epochs; give the same everywhere.

        The object has ``last`` and ``totals``, and the methods ``average()`` and ``clip(norm)``. Raises
        ``UsageError`` for a model or a group that cannot be used so; ``PeerLost`` is raised inside the block when
        another process has gone.

        Example, in each of several processes::

            with holdfast.LocalSGD(every=50).around(model, optimizer) as replicas:
                for inputs, targets in loader:
                    loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            print(replicas.totals.lssr)  # the share of steps without an exchange
        """
        from holdfast.sync.loop_training import around  # a Run does not need it

        return around(self, model, optimizer, group=group, seed=seed, steps_per_epoch=steps_per_epoch)


WRAPPERS: dict[type[nn.Module], str] = {
    nn.parallel.DistributedDataParallel: "averages gradients by itself",  # in a group that a loss would leave hanging
    nn.DataParallel: "cuts each micro-batch for several devices of one process",  # which draw other random numbers
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model, or a part of one, in a wrapper that shares the work out by itself."""
    for name, module in model.named_modules():
        for wrapper, does in WRAPPERS.items():
            if isinstance(module, wrapper):
                what = f"layer '{name}'" if name else "the model"
                raise UsageError(
                    f"{what} is wrapped in {wrapper.__name__}, which {does}", hint="give what it wraps: model.module"
                )


def refuse_talking_layers(model: nn.Module) -> None:
    """Raise ``UsageError`` for layers that exchange in every forward pass.

    Replicas that train apart do not meet there, and in exact mode the result would depend on who computes what.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"layer '{name}': SyncBatchNorm exchanges in every forward pass",
                hint="use BatchNorm (its statistics are those of each micro-batch), or GroupNorm",
            )
