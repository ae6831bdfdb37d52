"""Walks over a data set: forward passes without gradients, shared by all workers, for evaluations and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.cluster.group import Group
from holdfast.data.fetch import Dataset, Request, is_map_style, pair, to_device
from holdfast.data.order import Order
from holdfast.data.stream import Stream
from holdfast.engine.engine import Engine
from holdfast.engine.stage import Stage
from holdfast.errors import UsageError
from holdfast.rng import seed_everything, seed_of
from holdfast.words import a_kind


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A micro-batch whose forward pass is done."""

    index: int  # its number in the data set
    samples: int  # how many it has
    batch: Any  # as ``collate`` made it
    pair: tuple[Any, Any]  # what the loss takes: output and target, or model and batch


def check_dataset(data: object) -> None:
    """Raise ``UsageError`` if a data set cannot be evaluated: workers share it by the numbers of its samples."""
    if Stream.is_meant(data) or not is_map_style(data):
        raise UsageError(
            f"{a_kind(data)} cannot be evaluated: its samples have no numbers",
            hint="the data set itself, with len(data) and data[i]: loader.dataset, for example",
        )


def evaluation_order(engine: Engine, data: Dataset) -> Order:
    """Return the micro-batches in which a data set is evaluated. Raises ``UsageError`` if it is empty."""
    if len(data) == 0:
        raise UsageError("there is nothing to evaluate: the data set is empty")
    size, micro_batch, seed = len(data), engine.order.micro_batch, engine.order.seed
    return Order(size=size, global_batch=size, micro_batch=micro_batch, seed=seed, shuffle=False)


def walk(engine: Engine, data: Dataset, group: Group, use: Callable[[Passed], None]) -> None:
    """Compute the forward passes of this worker's share of a data set. Where outputs are, ``use`` gets each.

    Raises ``UsageError`` for empty data, and for passes that change what they must not. In fast mode changes of
    buffers are undone.
    """
    order = evaluation_order(engine, data)
    stage = engine.stage
    if stage is None:
        return
    share = engine.shares(order.micro_batches(0))[group.rank]
    requests = [
        Request(seed=seed_of(order.seed, "evaluation", index), samples=tuple(order.samples(0, index)))
        for index in share
    ]
    reads = stage.post.is_first or stage.post.is_last
    with (
        _evaluating(engine),
        engine.guarding("the evaluation"),
        engine.feed.reading(data, requests if reads else []) as read,
    ):
        for number, (index, request) in enumerate(zip(share, requests, strict=True)):
            group.gate()
            batch = to_device(read(request), engine.model.device) if reads else None
            _pass_on(engine, stage, number, index, batch, len(request.samples), use)
    stage.evaluated()


def _pass_on(
    engine: Engine, stage: Stage, number: int, index: int, batch: Any, samples: int, use: Callable[[Passed], None]
) -> None:
    """Compute one micro-batch of a stage; ``batch`` is None where neither inputs nor targets are needed."""
    post = stage.post
    inputs = targets = None
    if batch is not None:
        inputs, targets = (batch, None) if engine.takes_model else pair(batch)

    def compute(x: Any) -> Any:
        with engine.autocasting():
            if engine.takes_model:
                engine.model.seed_layer(0, step="evaluation", index=index)
                use(Passed(index=index, samples=samples, batch=batch, pair=(engine.model.module, x)))
                return None
            output = engine.model.forward(x, post.role.layers, step="evaluation", index=index, between=lambda: None)
            if not post.is_last:
                return output
            use(Passed(index=index, samples=samples, batch=batch, pair=(output, targets)))
            return None

    stage.evaluate(number, inputs, compute)


@contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    """Set the model to evaluation, without gradients, and back to training. It leaves buffers as they were."""
    engine.model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        if engine.buffers is not None:
            engine.buffers.restore()
        engine.model.train()
        seed_everything(seed_of(engine.order.seed, "evaluated"), engine.model.device)
