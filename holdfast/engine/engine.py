"""The engine: computes one worker's part of a training step, reduces the gradients, and makes the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from holdfast.cluster import faults
from holdfast.cluster.group import Group, alone
from holdfast.data.fetch import Dataset, fetch
from holdfast.data.order import Batches, Order
from holdfast.engine.collector import Collector
from holdfast.engine.gradients import Bucket, make_buckets
from holdfast.engine.guard import Guard, refusal
from holdfast.engine.holdings import Holdings
from holdfast.engine.model import LayeredModel, Unit
from holdfast.engine.reduce import Reduction
from holdfast.engine.stage import Stage, connect, post_of
from holdfast.engine.statistics import ChangingBuffers
from holdfast.engine.tied_gradients import Ties
from holdfast.engine.update import Update
from holdfast.errors import Broken, LossNotFinite, UsageError
from holdfast.log.record import Recorder, RecordKeeper
from holdfast.plan.layout import Layout, side_by_side
from holdfast.plan.timeline import one_forward_one_backward
from holdfast.rng import seed_everything, seed_of
from holdfast.undo.eager import Eager

Loss = Callable[[Any, Any], torch.Tensor]


class Engine:
    """Computes steps. Of failures it knows only that ``Broken`` may be raised at any time.

    ``loss(output, target)`` returns the mean over the samples. ``order`` says which samples each micro-batch has.
    ``exact``: results must not depend on the layout. ``autocast``: the dtype of the forward pass; None: as the model.
    ``log`` keeps what is sent across logged boundaries; None: no log.
    """

    def __init__(
        self,
        *,
        model: LayeredModel,
        update: Update,
        loss: Loss,
        data: Dataset,
        order: Batches,
        collate: Callable[[list[Any]], Any],
        exact: bool,
        autocast: torch.dtype | None,
        log: RecordKeeper | None = None,
    ) -> None:
        self.model = model
        self.update = update
        self.loss = loss
        self.data = data
        self.order = order
        self.collate = collate
        self.exact = exact
        self.autocast = autocast
        self.log = log
        self.layout = side_by_side(len(model.layers), 1)
        # An eager update changes parameters while passes still run.
        self.guard = Guard(model, trained=update.inverse is None, loss=loss)
        self.buffers = None if exact or log is not None else ChangingBuffers(self.guard)  # None: none may change
        self.used: list[int] = []  # samples of the current attempt, for tests that count them
        self.ties = Ties(model)
        self.eager = None if update.inverse is None else Eager(model, update)
        self.holdings = Holdings(unit.number for unit in model.units if model.is_held(unit))
        self._buckets: list[Bucket] = []
        self.collector = Collector(model)
        self._stage: Stage | None = None  # None: no place in the layout
        self._norms: torch.Tensor | None = None  # norms of all parameters' gradients, of the current attempt
        self._tells = torch.empty(0, dtype=torch.bool)  # by parameter: whether this worker tells the others its norm
        self.enter(self.layout, alone())

    def enter(
        self, layout: Layout, group: Group, *, logged: Collection[int] = (), order: Batches | None = None
    ) -> None:
        """Take this worker's place in a new layout.

        ``logged``: the boundaries whose records are kept. ``order``: the samples of the micro-batches from now on;
        None: as before.
        """
        self.order = self.order if order is None else order
        stage, self._stage = self._stage, None  # even if ``close`` raises, it is not closed a second time
        if stage is not None:
            stage.close()
        self.layout = layout
        post = post_of(layout, group.rank)
        self.recorder = None if self.log is None else Recorder(self.log, logged)
        if post is not None:
            self._stage = Stage(group, post, connect(group, post, self.model.device), self.recorder)
        self._buckets = self._buckets_of(layout, group.rank)
        tells = [layout.holders(layer)[0] == group.rank for layer in self._home]
        self._tells = torch.tensor(tells, device=self.model.device)

    def _buckets_of(self, layout: Layout, rank: int) -> list[Bucket]:
        """Return the buckets that a rank reduces: parameters of consecutive layers with the same holders."""
        groups: list[tuple[tuple[int, ...], list[nn.Parameter]]] = []
        places = [(r, layers) for line in layout.pipelines for r, layers in zip(line.ranks, line.layers, strict=True)]
        for number, layer in enumerate(self.model.layers):
            ranks = tuple(r for r, layers in places if number in layers)
            if not groups or groups[-1][0] != ranks:
                groups.append((ranks, []))
            groups[-1][1].extend(p for p in layer.parameters() if p.requires_grad)
        mine = [bucket for bucket in make_buckets(groups) if rank in bucket.ranks]
        known = {tuple(map(id, bucket.parameters)): bucket for bucket in self._buckets}
        for bucket in mine:  # a bucket of the last layout lends its memory to the same one of this layout
            before = known.get(tuple(map(id, bucket.parameters)))
            if before is not None:
                bucket.free, bucket.scratch = before.free, before.scratch
        return mine

    # --- one step --------------------------------------------------------------------------------

    def attempt(self, step: int, group: Group) -> list[float]:
        """Compute this worker's share of a step, and reduce the gradients with the group.

        Returns the weighted losses of the step's micro-batches, zero where others computed them. Raises ``Broken`` if
        a worker is lost, ``LossNotFinite`` for a loss that is NaN or infinite, and ``UsageError`` for a loss that is
        not one number, and for a forward pass that changes what it must not.
        """
        self.drop()
        count = self.order.micro_batches(step)
        losses = [0.0] * count
        self.model.train()
        self.used = []
        summed = None
        if self.eager is not None:
            self.eager.begin(step)
            summed = self.eager.summed
        reduction = Reduction(self._buckets, group, self._shares(count), exact=self.exact, summed=summed)
        self.collector.begin(reduction)
        if self.log is not None and self.recorder is not None:
            self.log.begin(step)
            self.recorder.at(step, reduction.share)
        if self._stage is not None:
            with self._guarding("the forward pass"):
                self._run_schedule(step, self._stage, reduction, losses)
                self._stage.finish()
        reduction.flush()
        reduction.finish()
        self.ties.add_up(group, self.layout, self.recorder)
        self._norms = self._all_norms(group)
        if self.buffers is not None:
            self.buffers.agree(group, self.layout, self._shares(count))
        if self.eager is not None:
            self.eager.added_up()
        return losses

    def _shares(self, count: int) -> list[range]:
        """Return the micro-batches of each rank: those of its pipeline."""
        by_line = self.layout.shares(count)
        roles = [self.layout.role(rank) for rank in range(self.layout.size)]
        return [range(0) if role is None else by_line[role.pipeline] for role in roles]

    def _run_schedule(self, step: int, stage: Stage, reduction: Reduction, losses: list[float]) -> None:
        """Run the forward and backward passes of this stage, in the order 1F1B; fill in its losses."""
        share, post = reduction.share, stage.post
        ops = one_forward_one_backward(stage=post.role.stage, stages=post.stages, micro_batches=len(share))
        for op in ops:
            index = share[op.micro_batch]
            if op.kind == "forward":
                losses[index] = self.forward_pass(step, index, op.micro_batch, stage, reduction.group)
                continue
            last = index == share[-1]
            reduction.before(index)
            self.collector.micro_batch(last=last)
            self.backward_pass(step, index, op.micro_batch, stage)
            if not last:
                reduction.after(index)

    def forward_pass(self, step: int, index: int, number: int, stage: Stage, group: Group) -> float:
        """Run one forward pass of a stage; return the weighted loss if it is the last stage, else 0.

        ``index``: the micro-batch's number in the step; ``number``: its number in the pipeline's share.
        """
        post = stage.post
        samples, place = self.order.samples(step, index), self.order.number(step, index)
        if faults.sabotaged("repeat-sample"):
            samples[0] = samples[-1] if len(samples) > 1 else (samples[0] + 1) % len(self.data)
        faults.point("data")
        inputs = targets = None
        if post.is_first or post.is_last:
            seed_everything(seed_of(self.order.seed, step, place, "data"), self.model.device)
            inputs, targets = fetch(self.data, samples, self.collate, self.model.device)
        if post.is_first:
            self.used += samples
        faults.point("forward")

        def compute(x: Any) -> Any:
            return self._through(post.role.layers, x, targets, step=step, index=place, between=group.check)

        result = stage.forward(number, inputs, compute)
        if not post.is_last:
            return 0.0
        value = float(result.detach())
        if not math.isfinite(value):
            raise LossNotFinite(
                f"the loss is {value} at step {step}, micro-batch {index} (samples {samples})",
                hint="lower the learning rate, clip_norm=1.0, or look at these samples",
            )
        return value * self._weight(step, samples)

    def backward_pass(self, step: int, index: int, number: int, stage: Stage) -> None:
        """Run one backward pass of a stage. The arguments are those of ``forward_pass``."""
        faults.point("backward")
        weight = self._weight(step, self.order.samples(step, index))
        stage.backward(number, weight, skip=faults.sabotaged("skip-gradient"))

    def _weight(self, step: int, samples: list[int]) -> float:
        """Return a micro-batch's share of the step's samples."""
        return len(samples) / self.order.batch_size(step)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None)

    def _through(
        self, layers: range, x: Any, targets: Any, *, step: int, index: int, between: Callable[[], None]
    ) -> Any:
        """Return the output of these layers for ``x``, or the loss if the last layer is among them."""
        with self._autocast():
            output = self.model.forward(x, layers, step=step, index=index, between=between, exact=self.exact)
            return self._loss_of(output, targets) if layers.stop == len(self.model.layers) else output

    def _loss_of(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the user's loss. Raises ``UsageError`` if it is not one number that depends on parameters."""
        loss = self.loss(output, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError("loss must give one number, the mean over the samples", hint="reduction='mean'")
        if not loss.requires_grad:
            raise UsageError("the loss does not depend on any parameter", hint="check requires_grad, and detach()")
        return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss

    @contextmanager
    def _guarding(self, during: str) -> Iterator[None]:
        """Guard the model's tensors while passes run. Raises ``UsageError`` for a change that would stay unknown."""
        renewed = self.guard.begin()
        if self.buffers is not None:
            self.buffers.begin(renewed)
        try:
            yield
        except Broken:
            self._look(during)  # the pass is dropped, but not what it has written
            raise
        self._look(during)

    def _look(self, during: str) -> None:
        changed = self.guard.changed()
        for each in changed:
            if each.kind != "buffer" or self.buffers is None:
                raise refusal(each, during=during)
        if self.buffers is not None:
            self.buffers.note(changed)

    def look_at(self, unit: Unit | None) -> None:
        """Raise ``UsageError`` if some byte that no pass may change has changed, in a unit or (None) anywhere."""
        self.guard.look_at_all(unit, buffers=self.buffers is None)

    def _all_norms(self, group: Group) -> torch.Tensor | None:
        """Return the norms of all parameters' gradients, if they are needed and some gradients are on other workers.

        The first holder of each parameter tells its norm; the others add zero. In the same exchange workers compare
        the values of the optimizer's groups: steps on different layers may have led to different ones. Raises
        ``UsageError`` if they have.
        """
        if self.layout.is_whole:
            return None
        mark = self.update.mark()
        told = torch.tensor([mark, mark**2], dtype=torch.float64, device=self.model.device)
        if self.update.clip_norm is not None:
            told = torch.cat([told, self.update.norms().masked_fill_(~self._tells, 0.0)])
        group.sum(told)
        if float(told[0]) ** 2 != float(told[1]) * group.size:
            raise self.update.other_groups()
        return None if self.update.clip_norm is None else told[2:]

    @cached_property
    def _home(self) -> list[int]:
        """The first layer of each trained parameter."""
        homes = {id(p): min(unit.layers) for unit in self.model.units for p in unit.parameters}
        return [homes[id(p)] for p in self.model.trainable]

    def apply(self, step: int) -> None:
        """Update with the gradients of the last attempt. An eager update is done already: make it final."""
        faults.point("update")
        terms = self.update.apply(step=step, norms=self._norms) if self.eager is None else self.eager.commit()
        if self.log is not None:
            self.log.note(step, terms)
        if faults.sabotaged("double-update"):
            self.update.apply(step=step, norms=self._norms)
        if self.buffers is not None:
            self.buffers.keep()
        self.drop()
        seed_everything(seed_of(self.order.seed, step, "after"), self.model.device)

    def drop(self) -> None:
        """Forget the gradients of the last attempt, and undo its eager updates and its changes of buffers."""
        if self.buffers is not None:
            self.buffers.restore()
        if self.eager is not None:
            self.collector.stop()
            self._undo(self.eager)
        self.collector.end()
        if self._stage is not None:
            self._stage.finish()  # frees the activations of a broken attempt: recovery may need the memory
        self.ties.forget()

    def _undo(self, eager: Eager) -> None:
        """Undo the eager updates. Torn units do not count as held any more."""
        undone = eager.undo()
        self.holdings.take_back(undone.units, torn=undone.torn)
        for unit in undone.torn:
            self.update.forget(self.model.units[unit].parameters)

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(self, data: Dataset, measure: Loss, group: Group) -> list[float]:
        """Return the weighted values of this worker's share of an evaluation, zero where others compute them.

        ``measure(output, target)`` returns the mean over the samples. Raises ``UsageError`` for empty data, and for
        an evaluation that changes what it must not. In fast mode its changes of buffers are undone.
        """
        if len(data) == 0:
            raise UsageError("there is nothing to evaluate: the data set is empty")
        order = Order(
            size=len(data),
            global_batch=len(data),
            micro_batch=self.order.micro_batch,
            seed=self.order.seed,
            shuffle=False,
        )
        count = order.micro_batches(0)
        values = [0.0] * count
        if self._stage is None:
            return values
        with self._evaluating(), self._guarding("the evaluation"):
            for number, index in enumerate(self._shares(count)[group.rank]):
                group.check()
                samples = order.samples(0, index)
                result = self._evaluate_one(self._stage, number, index, data, samples, measure)
                values[index] = result * len(samples) / len(data)
        self._stage.evaluated()
        return values

    def _evaluate_one(
        self, stage: Stage, number: int, index: int, data: Dataset, samples: list[int], measure: Loss
    ) -> float:
        post = stage.post
        inputs = targets = None
        if post.is_first or post.is_last:
            seed_everything(seed_of(self.order.seed, "evaluation", index), self.model.device)
            inputs, targets = fetch(data, samples, self.collate, self.model.device)

        def compute(x: Any) -> Any:
            with self._autocast():
                output = self.model.forward(x, post.role.layers, step="evaluation", index=index, between=lambda: None)
                return float(measure(output, targets)) if post.is_last else output

        result = stage.evaluate(number, inputs, compute)
        return float(result) if post.is_last else 0.0

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Set the model to evaluation, without gradients, and back to training. It leaves buffers as they were."""
        self.model.train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            if self.buffers is not None:
                self.buffers.restore()
            self.model.train()
            seed_everything(seed_of(self.order.seed, "evaluated"), self.model.device)
