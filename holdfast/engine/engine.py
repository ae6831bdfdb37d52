"""The engine: computes one worker's part of a training step, reduces the gradients, and makes the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from holdfast.cluster import faults
from holdfast.cluster.group import Group, alone
from holdfast.cluster.team import Team
from holdfast.data.feed import Feed
from holdfast.data.fetch import pair, to_device
from holdfast.data.order import Batches
from holdfast.engine.attempt import Attempt, checked
from holdfast.engine.buffers import ChangingBuffers
from holdfast.engine.collector import Collector
from holdfast.engine.gradients import Bucket, make_buckets
from holdfast.engine.guard import Guard, refusal
from holdfast.engine.holdings import Holdings
from holdfast.engine.loss_reads import refuse_reads
from holdfast.engine.model import LayeredModel, Unit
from holdfast.engine.shards import norms_of_team, put_back, tells
from holdfast.engine.stage import Stage, connect, post_of
from holdfast.engine.statistics import Statistics
from holdfast.engine.tied_gradients import Ties
from holdfast.engine.update import Terms, Update
from holdfast.errors import Broken, LossNotFinite, UsageError
from holdfast.log.record import Recorder, RecordKeeper
from holdfast.plan.layout import Layout, side_by_side
from holdfast.plan.timeline import one_forward_one_backward
from holdfast.rng import seed_everything, seed_of
from holdfast.undo.eager import Eager
from holdfast.words import a_kind

Loss = Callable[[Any, Any], torch.Tensor]
Weight = Callable[[Any], Any]  # of a batch: a number


class Engine:
    """Computes steps. Of failures it knows only that ``Broken`` may be raised at any time.

    ``loss(output, target)`` returns the mean over a micro-batch; with ``takes_model`` it is ``loss(model, batch)``, and
    computes the forward pass itself; None: the script does, in a ``Loop``. ``weight(batch)`` is a micro-batch's weight
    in the step; None: its number of samples. ``feed`` gives the batches. ``exact``: results must not depend on the
    layout. ``autocast``: the dtype of the forward pass; None: as the model. ``log`` keeps what is sent across logged
    boundaries; None: no log.
    ``stays_whole``: every worker will always hold all layers, so the loss may read parameters.
    """

    def __init__(
        self,
        *,
        model: LayeredModel,
        update: Update,
        loss: Loss | None,
        feed: Feed,
        exact: bool,
        autocast: torch.dtype | None,
        log: RecordKeeper | None = None,
        weight: Weight | None = None,
        takes_model: bool = False,
        stays_whole: bool = True,
    ) -> None:
        self.model = model
        self.update = update
        self.loss = loss
        self.feed = feed
        self.weight = weight
        self.takes_model = takes_model
        self.total = 0.0  # the weights of the last attempt's micro-batches together: samples, without ``weight``
        self.terms: Terms | None = None  # of the last committed update
        self.exact = exact
        self.autocast = autocast
        self.log = log
        self.layout = side_by_side(len(model.layers), 1)
        self._may_read = stays_whole  # whether the loss may read parameters: every worker holds them all
        self._was_watched = False  # whether a loss has been seen not to read them
        self.weights: dict[int, float] = {}  # by micro-batch: those that this worker has found in this attempt
        self.current: Attempt | None = None  # the attempt under way, or the last one
        # An eager update changes parameters while passes still run.
        self.guard = Guard(model, trained=update.inverse is None, loss=loss)
        self.buffers = None if exact or log is not None else ChangingBuffers(self.guard)  # None: none may change
        self.statistics = Statistics(model)
        self.used: list[Any] = []  # samples of the current attempt, for tests that count them
        self.ties = Ties(model)
        self.eager = None if update.inverse is None else Eager(model, update)
        self.holdings = Holdings(unit.number for unit in model.units if model.is_held(unit))
        self.buckets: list[Bucket] = []
        self.collector = Collector(model)
        self.stage: Stage | None = None  # None: no place in the layout
        self._norms: torch.Tensor | None = None  # norms of all parameters' gradients, of the current attempt
        self._tells = torch.empty(0, dtype=torch.bool)  # by parameter: whether this worker tells the others its norm
        self.enter(self.layout, alone())

    @property
    def order(self) -> Batches:
        """The samples of each micro-batch."""
        return self.feed.order

    def enter(
        self, layout: Layout, group: Group, *, logged: Collection[int] = (), order: Batches | None = None
    ) -> None:
        """Take this worker's place in a new layout.

        ``logged``: the boundaries whose records are kept. ``order``: the samples of the micro-batches from now on;
        None: as before.
        """
        if order is not None:
            self.feed.order = order
        stage, self.stage = self.stage, None  # even if ``close`` raises, it is not closed a second time
        if stage is not None:
            stage.close()
        self.layout = layout
        post = post_of(layout, group.rank)
        self.recorder = None if self.log is None else Recorder(self.log, logged)
        if post is not None:
            self.stage = Stage(group, post, connect(group, post, self.model.device), self.recorder)
        self.buckets = self._buckets_of(layout, group.rank)
        tells = [layout.holders(layer)[0] == group.rank for layer in self._home]
        self._tells = torch.tensor(tells, device=self.model.device)
        self.feed.enter(lambda step: self.shares(self.order.micro_batches(step))[group.rank])

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
        known = {tuple(map(id, bucket.parameters)): bucket for bucket in self.buckets}
        for bucket in mine:  # a bucket of the last layout lends its memory to the same one of this layout
            before = known.get(tuple(map(id, bucket.parameters)))
            if before is not None:
                bucket.free, bucket.scratch = before.free, before.scratch
        return mine

    # --- one step --------------------------------------------------------------------------------

    def begin(self, step: int, group: Group) -> Attempt:
        """Begin an attempt at a step. What the one before has left behind is dropped."""
        self.drop()
        self.current = Attempt(self, step, group)
        return self.current

    def attempt(self, step: int, group: Group) -> list[float]:
        """Compute this worker's share of a step, and reduce the gradients with the group.

        Returns the weighted losses of the step's micro-batches, zero where others computed them. Raises ``Broken`` if
        a worker is lost, ``LossNotFinite`` for a loss that is NaN or infinite, and ``UsageError`` for a loss that is
        not one number, and for a forward pass that changes what it must not.
        """
        attempt = self.begin(step, group)
        try:
            self.compute(attempt)
        except Broken:
            attempt.broken()  # the pass is dropped, but not what it has written
            raise
        return self.finish(attempt)

    def compute(self, attempt: Attempt) -> None:
        """Run the forward and backward passes of this worker's share."""
        if self.takes_model:
            assert self.loss is not None, "the micro-batches of a loop are computed by its script"
            for batch in attempt.micro_batches():
                attempt.backward(self.loss(self.model.module, batch))
        elif self.stage is not None:
            self._run_schedule(attempt, self.stage)
            self.stage.finish()

    def finish(self, attempt: Attempt) -> list[float]:
        """Reduce the gradients of an attempt with its group; return its losses, as ``attempt`` does."""
        self.total = attempt.finish()
        losses = attempt.losses
        return losses if self.weight is None else [loss / self.total for loss in losses]

    def seed_part(self, part: int) -> None:
        """Seed the random numbers of a part of the micro-batch under way: dropout must not be alike in all parts."""
        if part and self.current is not None:
            self.current.seed_part(part)

    def shares(self, count: int) -> list[range]:
        """Return the micro-batches of each rank: those of its pipeline."""
        by_line = self.layout.shares(count)
        roles = [self.layout.role(rank) for rank in range(self.layout.size)]
        return [range(0) if role is None else by_line[role.pipeline] for role in roles]

    def layers_of(self, rank: int) -> range:
        """Return the layers that a rank computes."""
        role = self.layout.role(rank)
        return range(0) if role is None else role.layers

    def _run_schedule(self, attempt: Attempt, stage: Stage) -> None:
        """Run the forward and backward passes of this stage, in the order 1F1B; fill in its losses."""
        step, reduction, post = attempt.step, attempt.reduction, stage.post
        share = reduction.share
        ops = one_forward_one_backward(stage=post.role.stage, stages=post.stages, micro_batches=len(share))
        for op in ops:
            index = share[op.micro_batch]
            if op.kind == "forward":
                attempt.losses[index] = self.forward_pass(step, index, op.micro_batch, stage, reduction.group)
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
        place = self.order.number(step, index)
        inputs = targets = None
        if post.is_first or post.is_last:
            inputs, targets = pair(self.read(step, index, noted=post.is_first))
        else:
            faults.point("data")
        faults.point("forward")

        def compute(x: Any) -> Any:
            with self.statistics.micro_batch(index):
                return self._through(post.role.layers, x, targets, step=step, index=place, between=group.check)

        result = stage.forward(number, inputs, compute)
        if not post.is_last:
            self.weights.pop(index, None)  # the last stage tells it
            return 0.0
        return self.weigh(step, index, result)

    def read(self, step: int, index: int, *, noted: bool = True) -> Any:
        """Return the batch of a micro-batch on the device, and note its weight; its samples too, if ``noted``."""
        faults.point("data")
        read = (index + 1) % self.order.micro_batches(step) if faults.sabotaged("repeat-sample") else index
        batch = to_device(self.feed.read(step, read), self.model.device)
        if self.weight is not None:
            self.weights[index] = weight_of(self.weight(batch))
        if noted:
            self.used += self.feed.used(step, read)
        return batch

    def weigh(self, step: int, index: int, loss: torch.Tensor) -> float:
        """Return the loss of a micro-batch with its weight. Raises ``LossNotFinite`` if it is NaN or infinite."""
        if self.weights.get(index) == 0.0:
            return 0.0  # the mean over nothing is NaN
        value = float(loss.detach())
        if not math.isfinite(value):
            raise LossNotFinite(
                f"the loss is {value} at step {step}, micro-batch {index} ({self.feed.named(step, index)})",
                hint="lower the learning rate, clip_norm=1.0, or look at these samples",
            )
        return value * self.factor(step, index)

    def backward_pass(self, step: int, index: int, number: int, stage: Stage) -> None:
        """Run one backward pass of a stage. The arguments are those of ``forward_pass``."""
        faults.point("backward")
        weight = self.factor(step, index) if stage.post.is_last else 1.0
        stage.backward(number, weight, skip=weight == 0.0 or faults.sabotaged("skip-gradient"))

    def factor(self, step: int, index: int) -> float:
        """Return the factor of a micro-batch's loss: its share of the step's samples, or its weight.

        Gradients that are summed with weights are divided by their total in the update: nobody knows it before.
        """
        if self.weight is None:
            return len(self.order.samples(step, index)) / self.order.batch_size(step)
        return self.weights[index]

    def autocasting(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes, with their dtype."""
        return torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None)

    def _through(
        self, layers: range, x: Any, targets: Any, *, step: int, index: int, between: Callable[[], None]
    ) -> Any:
        """Return the output of these layers for ``x``, or the loss if the last layer is among them."""
        with self.autocasting():
            output = self.model.forward(x, layers, step=step, index=index, between=between, exact=self.exact)
            return self._loss_of(output, targets) if layers.stop == len(self.model.layers) else output

    def _loss_of(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the user's loss. Raises ``UsageError`` if it is not one number that depends on parameters."""
        assert self.loss is not None
        watched = not (self._may_read or self._was_watched)
        with refuse_reads(self.model) if watched else nullcontext():
            loss = checked(self.loss(output, targets))
        self._was_watched = True  # once, unless a later step reads more: what this worker does not hold is NaN
        if not (watched or self._may_read or math.isfinite(float(loss.detach()))):
            with refuse_reads(self.model):
                self.loss(output, targets)
        return loss

    @contextmanager
    def guarding(self, during: str) -> Iterator[None]:
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
        put_back(self.model.module)
        changed = self.guard.changed()
        for each in changed:
            if each.kind != "buffer" or self.buffers is None:
                raise refusal(each, during=during)
        if self.buffers is not None:
            self.buffers.note(changed)

    def look_at(self, unit: Unit | None) -> None:
        """Raise ``UsageError`` if some byte that no pass may change has changed, in a unit or (None) anywhere."""
        self.guard.look_at_all(unit, buffers=self.buffers is None)

    def sum_norms(self, group: Group) -> None:
        """Learn the norms of all parameters' gradients, if some gradients are on other workers.

        The first holder of each parameter tells its norm; the others add zero. In the same exchange workers compare
        the values of the optimizer's groups: steps on different layers may have led to different ones. Raises
        ``UsageError`` if they have.
        """
        self._norms = None
        if self.layout.is_whole:
            return
        mark = self.update.mark()
        told = torch.tensor([mark, mark**2], dtype=torch.float64, device=self.model.device)
        told = torch.cat([told, self.update.norms().masked_fill_(~self._tells, 0.0)])
        group.sum(told)
        if float(told[0]) ** 2 != float(told[1]) * group.size:
            raise self.update.other_groups()
        self._norms = told[2:]

    def norms_here(self, team: Team) -> list[float]:
        """Return the norm of each gradient's part that this rank of a team counts: 0 for what others count.

        What the step does not update, of several optimizers, counts nowhere.
        """
        chosen = self.update.parameters if self.update.chosen is None else self.update.chosen
        stepping = {id(p) for p in chosen}
        counts = [id(p) in stepping and (team.leads or tells(p)) for p in self.update.parameters]
        return [norm if own else 0.0 for norm, own in zip(self.update.norms().tolist(), counts, strict=True)]

    def take_norms(self, ranks: Sequence[Sequence[float]]) -> None:
        """Take the norms of all parameters' gradients from those of their parts on each rank of a team."""
        self._norms = torch.tensor(norms_of_team(ranks), dtype=torch.float64, device=self.model.device)

    @cached_property
    def _home(self) -> list[int]:
        """The first layer of each trained parameter."""
        homes = {id(p): min(unit.layers) for unit in self.model.units for p in unit.parameters}
        return [homes[id(p)] for p in self.model.trainable]

    @property
    def facts(self) -> dict[str, float | None]:
        """Facts of the last committed step, as ``run.script.Step`` has them."""
        terms, total = self.terms, self.total
        return {
            "lr": None if terms is None or not terms.groups else float(terms.groups[0]["lr"]),
            "grad_norm": None if terms is None else terms.norm,
            "tokens": int(total) if total.is_integer() else total,
        }

    def apply(self, step: int) -> None:
        """Update with the gradients of the last attempt. An eager update is done already: make it final."""
        faults.point("update")
        total = None if self.weight is None else self.total
        if self.eager is None:
            terms = self.update.apply(step=step, norms=self._norms, total=total)
        else:
            norm = self.update.norm(self._norms, total)
            terms = replace(self.eager.commit(), norm=norm)
        self.terms = terms
        if self.log is not None:
            self.log.note(step, terms)
        if faults.sabotaged("double-update"):
            self.update.apply(step=step, norms=self._norms)
        if faults.sabotaged("flip-bit"):
            next(p for p in self.model.trainable if p.grad is not None).data.view(-1).view(torch.int32)[0] ^= 1
        self.statistics.apply(step)
        if self.buffers is not None:
            self.buffers.keep()
        self.feed.keep()
        self.drop()
        seed_everything(seed_of(self.order.seed, step, "after"), self.model.device)

    def drop(self) -> None:
        """Forget the gradients of the last attempt, and undo its eager updates and its changes of buffers."""
        if self.current is not None:
            self.current.broken()
        self.feed.drop()
        self.statistics.drop()
        if self.buffers is not None:
            self.buffers.restore()
        if self.eager is not None:
            self.collector.stop()
            self._undo(self.eager)
        self.collector.end()
        if self.stage is not None:
            self.stage.finish()  # frees the activations of a broken attempt: recovery may need the memory
        self.ties.forget()

    def abandon(self) -> None:
        """Drop an attempt that an exception of the script has ended, so that another run may train the same model."""
        if self.current is not None:
            self.current.abandon()
        self.drop()

    def _undo(self, eager: Eager) -> None:
        """Undo the eager updates. Torn units do not count as held any more."""
        undone = eager.undo()
        self.holdings.take_back(undone.units, torn=undone.torn)
        for unit in undone.torn:
            self.update.forget(self.model.units[unit].parameters)


def weight_of(given: Any) -> float:
    """Return a micro-batch's weight as a number. Raises ``UsageError`` if the user's function gave none."""
    try:
        value = float(given)
    except (TypeError, ValueError, RuntimeError) as e:
        raise UsageError(f"weight gave {a_kind(given)}, not a number", hint="as in .sum()") from e
    if not 0 <= value < math.inf:
        raise UsageError(f"weight gave {value}", hint="a number from 0 on, such as the number of tokens that count")
    return value
