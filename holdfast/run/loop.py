"""``holdfast.Loop``: training in a loop of the user's own, which survives as a ``Run`` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from holdfast.checks import in_words
from holdfast.data.fetch import Dataset
from holdfast.data.source import Data
from holdfast.data.stream import Stream
from holdfast.engine.attempt import Attempt
from holdfast.engine.engine import Weight
from holdfast.engine.names import Names
from holdfast.engine.numerics import Numerics
from holdfast.engine.shards import local
from holdfast.engine.step import PreparedStep
from holdfast.engine.update import MakeOptimizer, Schedule
from holdfast.errors import UsageError
from holdfast.plan.placement import Placement
from holdfast.recovery.resume import Checkpoints
from holdfast.run.body import Body
from holdfast.run.loop_step import LoopStep
from holdfast.run.named_models import (
    ByHand,
    check_names,
    one_maker,
    one_module,
    parameters_of,
    refuse_lost_schedulers,
)
from holdfast.run.settings import Settings, place_in_loop
from holdfast.run.showing import Showing
from holdfast.run.surroundings import Surroundings
from holdfast.sync.policy import Policy
from holdfast.sync.report import EVERY_STEP, Report

logger = logging.getLogger(__name__)


class Loop(Surroundings):
    """Training whose forward passes, losses and optimizers stay in the script's own loop.

    - ``model``: the module that is trained; several, by name, if they train in turns.
    - ``optimizer``: an optimizer of its parameters, or a function of the parameters that makes one; several, by the
      names of the models.
    - ``data``, ``global_batch``, ``micro_batch``, ``weight``, ``seed``, ``schedule``, ``numerics``, ``checkpoint``,
      ``state``, ``sync``: as for ``Run``. With several optimizers a schedule is theirs: a torch scheduler in ``state``,
      or the script sets ``group["lr"]``.

    A step is computed by the script, micro-batch by micro-batch, and committed by all workers together. If somebody is
    lost before that, ``commit`` gives None, and the same step comes again. So what the body of the loop does
    before the commit must depend on nothing but the model, the batch and ``loop.state``. Everything that a ``Run`` has
    around its steps is here as well: ``evaluate``, ``predict``, ``log``, ``ema``, ``save_model``, ``sha256``.

    Raises ``UsageError`` for settings that make no sense.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> model, data = nn.Linear(2, 1), TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    >>> loop = Loop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=data,
    ...             global_batch=4, micro_batch=2)
    >>> for step in loop.steps(3):
    ...     for x, y in step.micro_batches():
    ...         step.backward(nn.functional.mse_loss(model(x), y))
    ...     if step.commit(clip_norm=1.0):
    ...         print(step.number)
    0
    1
    2
    """

    @in_words(hint=place_in_loop)
    def __init__(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | MakeOptimizer | Mapping[str, Optimizer | MakeOptimizer],
        data: Dataset | Stream | IterableDataset[Any] | Data,
        global_batch: int,
        micro_batch: int,
        weight: Weight | None = None,
        seed: int = 0,
        schedule: Schedule | None = None,
        numerics: Literal["exact", "fast"] | Numerics = "exact",
        checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
        state: Mapping[str, Any] | None = None,
        sync: Literal["every-step"] | Policy = "every-step",
    ) -> None:
        self._names = check_names(model, optimizer, schedule, sync)
        settings = Settings(
            model=one_module(model),
            layers=None,
            loss=None,
            weight=weight,
            optimizer=one_maker(model, optimizer),
            data=Data.of(data),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            schedule=schedule,
            clip_norm=None,
            numerics=Numerics.of(numerics),
            placement=Placement.of(None),
            checkpoint=Checkpoints.of(checkpoint),
            state={} if state is None else state,
            sync=sync,
        )
        if settings.numerics.is_eager or settings.log is not None:
            raise UsageError(
                "a Loop has no layers that could be updated, or computed again, one by one",
                hint="leave out update='eager' and log=, or write it as a Run",
            )
        super().__init__(settings)
        self.by_hand = ByHand(self.engine.update.optimizer)
        self.body = Body(self._state.script, self.engine.update)
        self._under_way: LoopStep | None = None
        self._looked: set[tuple[str, ...]] = set()  # optimizers whose parameters were looked at for a gradient

    def steps(self, total: int | None = None, *, progress: bool | None = None) -> Iterator[LoopStep]:
        """Yield the step to be computed next, until ``total`` steps are committed.

        A step that could not be committed, because somebody was lost, comes again. The arguments are those of
        ``Run.steps``, and so are the errors; also raises ``UsageError`` if the body does not commit its step.
        """
        self._script.refuse_left()
        update = self.engine.update
        refuse_lost_schedulers(update.optimizer, update.scheduler, self.state)
        return self._steps(total, progress=progress)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values for the step that was committed in this body, or the last one of a loop, as ``Run.log`` does.

        In a step that was not committed nothing is logged: it comes again. Raises ``UsageError`` before the commit.
        """
        step = self._under_way
        if step is not None and step.is_broken:
            return
        if step is not None and step.made is None:
            raise UsageError("there is nothing to log for before the commit", hint="if step.commit(): loop.log(…)")
        super().log(values)

    def _turn(self, showing: Showing) -> Iterator[LoopStep]:
        step = self._under_way = LoopStep(self)
        try:
            yield step
        except GeneratorExit:  # the script has left the loop: what is committed of this step is all of it
            step.leave(early=True)
            self._progress.parts = []
            raise
        finally:
            self._under_way = None
        step.leave()
        if step.is_broken:
            return
        if step.made is None or step.is_computing:
            raise UsageError(
                f"step {step.number} was not committed",
                hint="call step.commit() once after each loop over step.micro_batches(); it may give None",
            )
        showing.step(step.made)
        self._between_steps()

    def finish(self) -> None:
        """End the training. Raises ``UsageError`` if the loop was left in the middle of a step."""
        self._script.refuse_left()
        super().finish()

    # --- what a step of the loop asks ------------------------------------------------------------

    def begin(self, step: LoopStep) -> Attempt:
        """Begin an attempt at the next update. Raises ``Broken``."""
        if any(p.grad is not None and bool(local(p.grad).any()) for p in self.engine.model.trainable):
            raise UsageError(
                "there are gradients before the first backward pass of the step, which nobody would sum",
                hint="step.backward(loss) for each batch of step.micro_batches(), or optimizer.zero_grad() before",
            )
        self._books.begin()
        if self._apart is not None:
            attempt = self._apart.open()
            step.contexts.enter_context(self._apart.computing())
            return attempt
        assert self._cohort.group is not None
        step.contexts.enter_context(self._cohort.doing(PreparedStep(self.engine, self._progress, None)))
        with self._cohort.group.team.together("the begin of a step"):
            self.engine.feed.set_state(self._progress.data)  # a joiner was told it, a resumed run has read it
            return self.engine.begin(self._progress.update, self._cohort.group)

    def close(
        self, attempt: Attempt | None, names: Sequence[str], clip_norm: float | None
    ) -> tuple[float, Report] | None:
        """Commit an attempt; return its loss and what replicas have done after it. None: it is to be made again.

        ``attempt``: None if it could not begin, or broke. ``names``: of the optimizers that step; none: all.
        """
        update = self.engine.update
        update.choose(parameters_of(update.optimizer, names), clip_norm=clip_norm)
        with self.by_hand.allowed():
            if self._apart is not None:
                return self._apart.close(attempt)
            asked = f"{self._progress.commits} {', '.join(names)} clip_norm={clip_norm}"
            step = PreparedStep(self.engine, self._progress, attempt, asked=asked, traced=self._traced)
            loss = self._cohort.try_commit(step)
        return None if loss is None else (loss, EVERY_STEP)

    def look_for_gradients(self, attempt: Attempt, names: tuple[str, ...]) -> None:
        """Warn of parameters that have got no gradient: once for each set of optimizers that step together."""
        if names in self._looked or not attempt.reduction.share or not self.is_first_worker:
            return
        self._looked.add(names)
        chosen = parameters_of(self.engine.update.optimizer, names)
        wanted = None if chosen is None else {id(p) for p in chosen}
        without = [
            name
            for name, p in Names(self.engine.model).trained().items()
            if id(p) not in self.engine.collector.seen and (wanted is None or id(p) in wanted)
        ]
        if without:
            more = "" if len(without) == 1 else f" and {len(without) - 1} more parameters"
            logger.warning(
                "%s%s got no gradient: it counts as zero, and the optimizer may still change them, by momentum or "
                "weight decay (freeze them with requires_grad_(False), or leave them out of the optimizer)",
                without[0],
                more,
            )
