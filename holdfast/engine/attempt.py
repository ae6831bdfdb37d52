"""An attempt at one training step: from its begin until the sums of its gradients are there.

A worker that holds the whole model goes through its micro-batches with ``micro_batches`` and ``backward``: those of a
``Run`` with its loss, those of a ``holdfast.Loop`` in the user's own code. Stages of pipelines run a schedule instead.
Both begin and finish alike. Nothing that lasts is changed: the engine applies the attempt, or drops it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from holdfast.cluster import faults, tags
from holdfast.cluster.group import Group
from holdfast.cluster.talk import Shared, add_up
from holdfast.cluster.texts import Texts
from holdfast.engine.agreement import digest_of
from holdfast.engine.names import Names
from holdfast.engine.reduce import Reduction
from holdfast.errors import UsageError
from holdfast.rng import seed_of, seed_torch
from holdfast.words import a_kind

if TYPE_CHECKING:
    from holdfast.engine.engine import Engine


class Attempt:
    """One attempt at a step, with the workers of ``group``. Its methods may raise ``Broken`` at any time.

    ``losses``: the weighted losses of the step's micro-batches, zero where others compute them. ``notes``: what a
    ``Loop``'s script notes of its micro-batches, one plain value each; once finished, those of all. None: nothing.
    """

    def __init__(self, engine: Engine, step: int, group: Group) -> None:
        self._engine, self.step, self._group = engine, step, group
        self._ranks = Texts(group, engine.model.device)
        engine.feed.prepare(step, self._ranks)
        self.count = engine.order.micro_batches(step)
        self.losses = [0.0] * self.count
        self.notes: list[Any] | None = None
        self.loss_shares: Sequence[range] = engine.layout.shares_of_losses(self.count)
        engine.used, engine.weights = [], {}
        self._index: int | None = None  # the micro-batch under way that has had no backward pass
        self._marks: list[tuple[Any, int]] = []  # gradients as the last backward pass of a ``Loop`` has left them
        self._left = 0  # micro-batches of this worker's share that are to come
        engine.model.train()
        self.reduction = self._begin_reduction()
        self._contexts = ExitStack()
        if engine.stage is not None:
            if engine.stage.post.is_first or engine.stage.post.is_last:
                engine.feed.begin(step, self.reduction.share)
            self._left = len(self.reduction.share)
            if engine.takes_model:
                engine.collector.between()
            self._contexts.enter_context(engine.guarding("the forward pass"))
            self._contexts.enter_context(engine.statistics.taking_aside())

    def _begin_reduction(self) -> Reduction:
        engine, summed = self._engine, None
        if engine.eager is not None:
            engine.eager.begin(self.step)
            summed = engine.eager.summed
        shares = engine.shares(self.count)
        reduction = Reduction(engine.buckets, self._group, shares, exact=engine.exact, summed=summed)
        engine.collector.begin(reduction)
        if engine.log is not None and engine.recorder is not None:
            engine.log.begin(self.step)
            engine.recorder.at(self.step, reduction.share)
        return reduction

    # --- micro-batches of a whole model ----------------------------------------------------------

    def micro_batches(self, *, met: bool = False) -> Iterator[Any]:
        """Yield the batches of this worker's share. Each is to have a backward pass before the next one.

        While a batch is out, random numbers are those of its place, and training calls of modules with statistics
        count for it. ``met``: the ranks of the team have just agreed that all of them have begun. Raises ``UsageError``
        if a batch had no backward pass.
        """
        engine = self._engine
        for index in self.reduction.share:
            batch = engine.read(self.step, index)
            faults.point("forward")
            if not (met and self._group.team.size > 1):
                self._group.gate()
            met = False
            engine.model.seed_layer(0, step=self.step, index=engine.order.number(self.step, index))
            self._index = index
            with engine.statistics.micro_batch(index), engine.autocasting():
                yield batch
            if self._index is not None:
                raise UsageError(
                    f"micro-batch {index} of step {self.step} had no backward pass",
                    hint="call step.backward(loss) once for each batch of step.micro_batches()",
                )

    def seed_part(self, part: int) -> None:
        """Seed the random numbers of a part of the micro-batch under way, which a rank of a team computes."""
        if self._index is not None:
            place = self._engine.order.number(self.step, self._index)
            seed_torch(seed_of(self._engine.model.seed, self.step, place, 0, "part", part), self._engine.model.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the micro-batch under way. ``loss``: the mean over it.

        Raises ``UsageError`` if there is none, or ``loss`` is not one number that depends on parameters, and
        ``LossNotFinite`` if it is NaN or infinite.
        """
        index, engine, reduction = self._index, self._engine, self.reduction
        if index is None:
            raise UsageError(
                "backward was called without a micro-batch, or twice for one",
                hint="once for each batch of step.micro_batches()",
            )
        loss = checked(loss)
        self._refuse_changed_gradients()
        self._index = None
        self._left -= 1
        self.losses[index] = engine.weigh(self.step, index, loss)
        reduction.before(index)
        last = index == reduction.share[-1]
        engine.collector.micro_batch(last=last)
        faults.point("backward")
        weight = engine.factor(self.step, index)
        if weight != 0.0 and not faults.sabotaged("skip-gradient"):
            # A user's batch is out, with its autocast, and its micro-batch is the one that counts.
            with engine.statistics.repeating(), torch.autocast(engine.model.device.type, enabled=False):
                torch.autograd.backward([loss], [torch.full_like(loss, weight)])
        if not last:
            reduction.after(index)
        engine.collector.between()
        if engine.loss is None:
            self._marks = _marks(engine.model.trainable)

    def _refuse_changed_gradients(self) -> None:
        """Raise ``UsageError`` if a ``Loop``'s script has touched gradients that are about to be summed."""
        if self._marks and self._marks != _marks(self._engine.model.trainable):
            raise UsageError(
                "gradients were changed between a backward pass and the commit",
                hint="leave out optimizer.zero_grad(), and clip with step.commit(clip_norm=…)",
            )

    # --- the end ---------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Number of this worker's micro-batches that are still to come."""
        return self._left

    def finish(self) -> float:
        """Sum gradients, weights and statistics with the group; return what gradients are divided by.

        Raises ``UsageError`` for a forward pass that has changed what it must not.
        """
        engine, group = self._engine, self._group
        self._contexts.close()
        self._refuse_changed_gradients()
        self.reduction.flush()
        self.reduction.finish()
        engine.ties.add_up(group, engine.layout, engine.recorder)
        engine.sum_norms(group)
        engine.statistics.exchange(group, engine.layers_of, engine.shares(self.count))
        if engine.buffers is not None:
            engine.buffers.agree(group, engine.layout, engine.shares(self.count))
        if engine.eager is not None:
            engine.eager.added_up()
        engine.feed.agree(self._ranks.exchange)
        if self.notes is not None:
            self.notes = self._all_notes(self.notes)
        total = self._total()
        if group.team.size > 1:
            self._agree_in_team()
        return total

    def _agree_in_team(self) -> None:
        """Take the mean of the ranks' losses: each has that of its part of the batch, or all have the same.

        The norms of the gradients are told in the same message.

        In the first steps, and in fewer and fewer later on, ranks compare the gradients that all of them have whole.
        Raises ``UsageError`` if these differ, and ``Broken``.
        """
        team, names = self._group.team, Names(self._engine.model).trained()
        common = {name: p.grad for name, p in names.items() if p.grad is not None and not isinstance(p, DTensor)}
        looks = self.step.bit_count() <= 1
        digests = {name: digest_of(grad, xxhash.xxh3_128) for name, grad in common.items()} if looks else {}
        norms = self._engine.norms_here(team)
        said = team.exchange("the losses", [self.losses, digests, norms, self._engine.update.mark()])
        if len({mark for *_, mark in said}) > 1:
            raise UsageError(
                "the ranks of a team have different values in the optimizer's param_groups",
                hint="change the learning rate, or whatever it is, on every rank alike",
            )
        for name in digests:
            if len({found[name] for _, found, *_ in said}) > 1:
                raise UsageError(
                    f"the ranks of a team have different gradients of {name}, which each of them holds whole",
                    hint="split it with the others (fully_shard, parallelize_module), or give all ranks the same batch",
                )
        self.losses = [sum(each) / team.size for each in zip(*(losses for losses, *_ in said), strict=True)]
        self._engine.take_norms([parts for *_, parts, _ in said])

    def _all_notes(self, mine: list[Any]) -> list[Any]:
        """Return what all workers have noted, in the order of the micro-batches."""
        texts = self._ranks.exchange(json.dumps(list(zip(self.reduction.share, mine, strict=True))).encode())
        return [note for _, note in sorted((pair for text in texts for pair in json.loads(text)), key=lambda p: p[0])]

    def _total(self) -> float:
        """Return the weights of all micro-batches together. Raises ``UsageError`` if that is zero."""
        engine = self._engine
        if engine.weight is None:
            return float(engine.order.batch_size(self.step))
        found = [engine.weights.get(index, 0.0) for index in range(self.count)]
        nothing = torch.zeros(0, dtype=torch.float64, device=engine.model.device)
        (total,) = add_up(self._group, Shared(rows=[found], shares=self.loss_shares), nothing, tag=tags.SUM)
        if total == 0.0:
            raise UsageError(
                f"all weights of step {self.step} are 0: nothing in it counts", hint="check weight=, and these samples"
            )
        return total

    def broken(self) -> None:
        """End the attempt after ``Broken``: what it has wrapped is as before."""
        self._contexts.close()

    def abandon(self) -> None:
        """End the attempt as ``broken`` does, but do not look at what it has written: the training is over."""
        with suppress(_Abandoned), self._contexts.pop_all():
            raise _Abandoned


class _Abandoned(Exception):
    """Nobody wants the result of an attempt."""


def _marks(parameters: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
    """Return what tells a gradient from another one, or from itself after a change, for each parameter."""
    return [(id(grad), grad._version) if (grad := p.grad) is not None else (None, 0) for p in parameters]


def checked(loss: Any) -> torch.Tensor:
    """Return a loss as a tensor to begin a backward pass at. Raises ``UsageError`` if it is none."""
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"loss gave {a_kind(loss)}, and must give a tensor of one number", hint="as in model(**batch).loss"
        )
    if loss.numel() != 1 or loss.is_complex():
        raise UsageError("loss must give one number, the mean over the samples", hint="reduction='mean'")
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on any parameter", hint="check requires_grad, and detach()")
    return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
