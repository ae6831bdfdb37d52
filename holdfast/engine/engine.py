"""A training step on one worker: micro-batches in, reduced gradients out, then the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.data.order import Order
from holdfast.engine.gradients import make_buckets
from holdfast.engine.model import LayeredModel
from holdfast.engine.reduce import Reduction
from holdfast.engine.rng import seed_everything, seed_of
from holdfast.engine.statistics import RunningStatistics
from holdfast.engine.update import Update
from holdfast.errors import LossNotFinite, UsageError
from holdfast.plan.shares import shares

Loss = Callable[[Any, Any], torch.Tensor]


class Dataset(Protocol):
    """Map-style: ``dataset[i]`` is ``(input, target)``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Engine:
    """Computes steps. Knows nothing of failures but that ``Broken`` may fly through it at any time."""

    def __init__(
        self,
        *,
        model: LayeredModel,
        update: Update,
        loss: Loss,
        data: Dataset,
        order: Order,
        collate: Callable[[list[Any]], Any],
        exact: bool,
        autocast: torch.dtype | None,
    ) -> None:
        self.model = model
        self.update = update
        self.loss = loss
        self.data = data
        self.order = order
        self.collate = collate
        self.exact = exact
        self.autocast = autocast
        self.statistics = RunningStatistics(model.module)
        self.buckets = make_buckets(model.trainable)
        self.used: list[int] = []  # the samples of the current attempt, for tests that count them
        self._reduction: Reduction | None = None
        self._last_backward = False
        self._ready: set[int] = set()  # parameters whose gradient of the current micro-batch is there
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(self._hook(bucket.number))  # type: ignore[no-untyped-call]

    def _hook(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def ready(p: torch.Tensor) -> None:
            reduction = self._reduction
            if reduction is None:
                return
            reduction.group.check()  # leaves the backward pass at once when the generation is over
            if id(p) in self._ready:
                raise UsageError(
                    "a parameter gets its gradient in several parts within one backward pass",
                    hint="torch.utils.checkpoint with use_reentrant=False gives it whole",
                )
            self._ready.add(id(p))
            if self._last_backward:
                reduction.gradient_ready(bucket)

        return ready

    # --- one step --------------------------------------------------------------------------------

    def attempt(self, step: int, group: Group) -> list[float]:
        """Computes this worker's share of a step and reduces the gradients with the group.

        Returns the weighted losses of the step's micro-batches, zero where others computed them.
        """
        self.drop()
        self.statistics.begin()
        count = self.order.micro_batches(step)
        parts = shares(count, group.size)
        losses = [0.0] * count
        buffers = self.model.buffer_versions()
        self.model.module.train()
        self.used = []
        reduction = self._reduction = Reduction(self.buckets, group, parts, exact=self.exact)
        for index in reduction.share:
            reduction.before(index)
            last = index == reduction.share[-1]
            losses[index] = self._micro_batch(step, index, group, last=last)
            if not last:
                reduction.after(index)
        self._refuse_changed_buffers(buffers)
        reduction.flush()
        reduction.finish()
        self.statistics.agree(group)
        return losses

    def _micro_batch(self, step: int, index: int, group: Group, *, last: bool) -> float:
        samples = self.order.samples(step, index)
        if faults.sabotaged("repeat-sample"):
            samples[0] = samples[-1] if len(samples) > 1 else (samples[0] + 1) % len(self.data)
        self.used += samples
        faults.point("data")
        seed_everything(seed_of(self.order.seed, step, index, "data"), self.model.device)
        inputs, targets = self._fetch(self.data, samples)
        faults.point("forward")
        loss = self._forward(inputs, targets, step=step, index=index, between=group.check)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise LossNotFinite(
                f"the loss is {value} at step {step}, micro-batch {index} (samples {samples})",
                hint="lower the learning rate, clip_norm=1.0, or look at these samples",
            )
        weight = len(samples) / self.order.batch_size(step)
        faults.point("backward")
        self._last_backward = last
        self._ready.clear()
        if not faults.sabotaged("skip-gradient"):
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        return value * weight

    def _fetch(self, data: Dataset, samples: list[int]) -> tuple[Any, Any]:
        batch = self.collate([data[i] for i in samples])
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise UsageError(
                "dataset[i] must give (input, target)", hint="several inputs can be a tuple or dict in its place"
            )
        return _to(batch[0], self.model.device), _to(batch[1], self.model.device)

    def _forward(
        self, inputs: Any, targets: Any, *, step: int, index: int, between: Callable[[], None]
    ) -> torch.Tensor:
        with torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None):
            output = self.model.forward(inputs, step=step, index=index, between=between)
            loss = self.loss(output, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError("loss must give one number, the mean over the samples", hint="reduction='mean'")
        return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss

    def _refuse_changed_buffers(self, before: dict[str, tuple[torch.Tensor, int]]) -> None:
        if not self.exact:
            return
        for name, (buffer, version) in self.model.buffer_versions().items():
            if buffer is not before[name][0] or version != before[name][1]:
                raise UsageError(
                    f"the forward pass changes buffer '{name}', so its value depends on who computes what",
                    hint="leave buffers alone while training, or numerics='fast'",
                )

    def apply(self, step: int) -> None:
        """The update with the gradients of the last attempt."""
        faults.point("update")
        self.update.apply(step=step)
        if faults.sabotaged("double-update"):
            self.update.apply(step=step)
        self.statistics.keep()
        self.drop()
        seed_everything(seed_of(self.order.seed, step, "after"), self.model.device)

    def drop(self) -> None:
        """Forget the gradients of the last attempt."""
        self.statistics.restore()
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.release()

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(self, data: Dataset, measure: Loss, group: Group | None) -> list[float]:
        """Weighted values of this worker's share of an evaluation, zero where others compute them."""
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
        share = range(count) if group is None else shares(count, group.size)[group.rank]
        values = [0.0] * count
        with self._evaluating():
            for index in share:
                if group is not None:
                    group.check()
                samples = order.samples(0, index)
                seed_everything(seed_of(self.order.seed, "evaluation", index), self.model.device)
                inputs, targets = self._fetch(data, samples)
                with torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None):
                    value = measure(self.model(inputs), targets)
                values[index] = float(value) * len(samples) / len(data)
        return values

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.module.train()
            seed_everything(seed_of(self.order.seed, "evaluated"), self.model.device)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value


def label_of(module: nn.Module, order: Order, **settings: Any) -> str:
    """What must be equal on all workers, in words: they show it when they join."""
    parameters = sum(p.numel() for p in module.parameters())
    capability = torch.backends.cpu.get_cpu_capability()
    shown = {"parameters": parameters, **settings, **asdict(order), "threads": torch.get_num_threads()}
    shown |= {"torch": torch.__version__, "cpu": capability}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
