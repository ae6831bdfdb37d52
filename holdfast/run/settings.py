"""``Settings``: the arguments of a ``Run``, checked against each other before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from holdfast.checks import function, to_whole, whole
from holdfast.data.order import Order
from holdfast.data.source import Data
from holdfast.engine.engine import Loss
from holdfast.engine.layers_of import CutModel
from holdfast.engine.model import Layers
from holdfast.engine.numerics import Numerics
from holdfast.engine.update import Schedule
from holdfast.errors import UsageError
from holdfast.log.log import LogSettings
from holdfast.plan.placement import Placement
from holdfast.recovery.resume import Checkpoints
from holdfast.sync.policy import Policy

SEEDS = 2**64  # a seed is below this number, as one for torch.manual_seed is


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The arguments of a ``Run``, with short forms written out. ``Run`` says what each is.

    A group of settings checks its own fields; what they demand of each other is checked here. Raises ``UsageError``.
    """

    layers: Layers
    loss: Loss
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer]
    data: Data
    global_batch: int
    micro_batch: int
    seed: int
    collate: Callable[[list[Any]], Any]
    schedule: Schedule | None
    clip_norm: float | None
    numerics: Numerics
    tolerate: int | None
    placement: Placement
    checkpoint: Checkpoints | None
    log: bool | int | str | LogSettings  # as it was given: workers show it to each other
    sync: Literal["every-step"] | Policy

    def __post_init__(self) -> None:
        self._check_functions()
        self._check_numbers()
        if self.sync != "every-step" and not isinstance(self.sync, Policy):
            raise UsageError(
                f"sync={self.sync!r} is not known", hint="'every-step', or a policy: SelSync(target=0.1), LocalSGD …"
            )
        self._check_batches()
        self._check_policy()
        if self.numerics.is_eager and self.clip_norm is not None:
            raise UsageError(
                "clip_norm needs all gradients before the first update", hint="leave it out, or update='commit'"
            )
        if LogSettings.of(self.log) is not None and self.checkpoint is None:
            raise UsageError(
                "a log is of no use without a checkpoint to begin from", hint="give the run checkpoint= too"
            )

    @property
    def policy(self) -> Policy | None:
        """The rule of when replicas talk; None: at every step."""
        return self.sync if isinstance(self.sync, Policy) else None

    @property
    def stages(self) -> int | Sequence[int] | None:
        """How pipelines are cut. Under a policy every worker holds the whole model."""
        return self.placement.stages if self.policy is None else 1

    @property
    def order(self) -> Order:
        """The order of the run's samples."""
        return self.data.order(global_batch=self.global_batch, micro_batch=self.micro_batch, seed=self.seed)

    def _check_functions(self) -> None:
        if not isinstance(self.layers, nn.Module | Iterable | CutModel):
            raise UsageError("layers must be torch modules", hint="a module, nn.Sequential or a list of modules")
        function("loss", self.loss, hint="as in nn.functional.mse_loss")
        function("optimizer", self.optimizer, hint="as in lambda params: torch.optim.AdamW(params, lr=3e-4)")
        function("collate", self.collate, hint="leave it out, or a function of a list of samples")
        if self.schedule is not None:
            function("schedule", self.schedule, hint="None, or as in lambda step: 0.1 * 0.9**step")

    def _check_numbers(self) -> None:
        for name, least in {"global_batch": 1, "micro_batch": 1, "seed": 0}.items():
            # As ints: random numbers depend on the text of the seed, and that of a NumPy number is another.
            object.__setattr__(self, name, to_whole(name, getattr(self, name), least=least))
        if self.seed >= SEEDS:
            raise UsageError(f"seed={self.seed} is too large", hint="below 2**64")
        if self.tolerate is not None:
            whole("tolerate", self.tolerate, least=0)
        norm = self.clip_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, Real) or not 0 < norm < math.inf):
            raise UsageError(f"clip_norm={norm!r} is no norm to clip to", hint="a number above 0, or None")

    def _check_batches(self) -> None:
        samples, batch, micro = len(self.data.dataset), self.global_batch, self.micro_batch
        if batch % micro:
            nearest = max(1, round(batch / micro)) * micro
            raise UsageError(
                f"global_batch={batch} is not a multiple of micro_batch={micro}",
                hint=f"global_batch={nearest} would be",
            )
        if samples < batch:
            possible = f"global_batch={samples // micro * micro}" if samples >= micro else f"micro_batch={samples}"
            raise UsageError(
                f"the data set has {samples} samples, fewer than global_batch={batch}", hint=f"{possible} or less"
            )

    def _check_policy(self) -> None:
        """Refuse what a policy's replicas, which hold the whole model and train apart, cannot do."""
        policy, placement = self.policy, self.placement
        if policy is None:
            if self.data.partition is not None:
                raise UsageError(
                    "a partition says what each replica reads, and with sync='every-step' all read one batch",
                    hint="give a policy: sync=SelSync(target=0.1), or SelSync(delta=0) for every step",
                )
            return
        if placement.stages not in (None, 1) or placement.memory is not None or placement.profile is not None:
            raise UsageError(
                f"{type(policy).__name__} is a policy for workers that hold the whole model",
                hint="leave out placement=, or sync='every-step'",
            )
        if self.numerics.is_eager or self.log:
            raise UsageError(
                f"{type(policy).__name__} cannot serve update='eager' or a log: replicas update themselves",
                hint="leave them out, or sync='every-step'",
            )
