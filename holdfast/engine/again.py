"""Repetition of past steps of some layers, from records of the inputs and gradients that their neighbours sent.

All workers share the micro-batches, as in data parallelism: the records stand in for the neighbours. In exact mode the
result is bit for bit that of the first time, because it depends neither on the cut into stages nor on who computes
what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.cluster.group import Group
from holdfast.engine.boundary import like
from holdfast.engine.engine import Engine
from holdfast.engine.gradients import make_buckets
from holdfast.engine.pipe import describe
from holdfast.engine.reduce import Reduction
from holdfast.engine.stage import Neighbours, Post, Stage
from holdfast.engine.update import Terms
from holdfast.log.record import Direction, Key, Message, Recorder, RecordKeeper
from holdfast.plan.layout import Role


class Again:
    """Computes some layers' part of one past step after the other.

    ``spans``: the layers, as ranges between logged boundaries. ``find`` returns the value of a record. The first
    ``workers`` ranks compute. The outputs of the layers are logged again, because the worker that logged them the
    first time is lost.
    """

    def __init__(
        self,
        engine: Engine,
        group: Group,
        spans: Sequence[range],
        find: Callable[[Key], Any],
        *,
        workers: int,
        log: RecordKeeper,
    ) -> None:
        self._engine = engine
        self._group = group
        self._find = find
        layers = [engine.model.layers[layer] for span in spans for layer in span]
        parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
        self._workers = workers
        self._computes = group.rank < workers
        self._buckets = make_buckets([(tuple(range(workers)), parameters)])
        self._recorder = Recorder(log, {end for span in spans for end in (span.start, span.stop)})
        self._stages = [_Span(engine, group, span, find, self._recorder) for span in reversed(spans)]
        self._inside = {layer for span in spans for layer in span}
        ties = enumerate(engine.ties.described)
        self._apart = {number for number, tie in ties if tie.is_cut(self._recorder.logged)}

    def attempt(self, step: int, shares: Sequence[range]) -> None:
        """Compute the gradients of one step. ``shares``: the micro-batches of each rank.

        Gradients may still be on their way to other workers when it returns: vote before ``apply``.
        """
        if not self._computes:
            return
        collector, order = self._engine.collector, self._engine.order
        self._recorder.at(step, range(order.micro_batches(step)))
        reduction = Reduction(self._buckets, self._group, shares, exact=self._engine.exact)
        collector.begin(reduction)
        with self._engine.statistics.taking_aside():
            for index in reduction.share:
                reduction.before(index)
                last = index == reduction.share[-1]
                collector.micro_batch(last=last)
                for stage in self._stages:
                    stage.compute(step, index)
                if not last:
                    reduction.after(index)
        reduction.flush()
        reduction.finish()
        self._tie(step)
        self._engine.statistics.exchange(self._group, self._layers_of, shares)

    def _layers_of(self, rank: int) -> set[int]:
        """Return the layers that a rank computes again."""
        return self._inside if rank < self._workers else set()

    def apply(self, step: int, terms: Terms) -> None:
        """Repeat the update that the step ended with. It writes into gradients that were sent: vote before it."""
        if self._computes:
            self._engine.update.repeat(terms)
            self._engine.statistics.apply(step)
            self.drop()

    def drop(self) -> None:
        """Forget the gradients, after an update or a broken attempt."""
        self._engine.collector.end()
        self._engine.ties.forget()
        self._engine.statistics.drop()

    def _tie(self, step: int) -> None:
        """Add up the gradients of shared weights. Those of layers that are not computed again come from records."""
        for number, (weight, uses) in enumerate(self._engine.ties.weights):
            if not any(use.layer in self._inside for use in uses):
                continue
            total: torch.Tensor | None = None
            for use in uses:
                grad = use.leaf.grad
                if use.layer not in self._inside:
                    key = Key(step=step, boundary=use.layer, micro_batch=number, direction=Direction.TIE)
                    grad = self._find(key)
                assert grad is not None
                if use.layer in self._inside and self._group.rank == 0 and number in self._apart:
                    self._recorder.tie(use.layer, number, describe(grad))
                total = grad if total is None else total + grad
                use.leaf.grad = None
            assert total is not None
            weight.grad = like(total, weight.stride())


class _Span:
    """Consecutive layers between two logged boundaries, as a stage whose neighbours are records."""

    def __init__(
        self, engine: Engine, group: Group, span: range, find: Callable[[Key], Any], recorder: Recorder
    ) -> None:
        self._engine, self._group = engine, group
        is_first, is_last = span.start == 0, span.stop == len(engine.model.layers)
        rank = group.rank
        post = Post(
            role=Role(pipeline=rank, stage=0, layers=span),
            stages=1,
            before=None if is_first else rank,
            behind=None if is_last else rank,
        )
        self._inputs = None if is_first else _Recorded(find, span.start, Direction.FORWARD)
        self._gradients = None if is_last else _Recorded(find, span.stop, Direction.BACKWARD)
        neighbours = Neighbours(
            inputs=self._inputs,
            gradients=self._gradients,
            outputs=None if is_last else _Nobody(),
            back=None if is_first else _Nobody(),
        )
        self._stage = Stage(group, post, neighbours, recorder)

    def compute(self, step: int, index: int) -> None:
        """Run the forward and the backward pass of one micro-batch."""
        for source in (self._inputs, self._gradients):
            if source is not None:
                source.at(step, index)
        self._engine.forward_pass(step, index, index, self._stage, self._group)
        self._engine.backward_pass(step, index, index, self._stage)
        self._stage.finish()


class _Recorded:
    """A neighbour that sends what was recorded: the receiving end of a pipe."""

    def __init__(self, find: Callable[[Key], Any], boundary: int, direction: Direction) -> None:
        self._find, self._boundary, self._direction = find, boundary, direction
        self._key: Key | None = None

    def at(self, step: int, index: int) -> None:
        self._key = Key(step=step, boundary=self._boundary, micro_batch=index, direction=self._direction)

    def take(self) -> Any:
        assert self._key is not None
        return self._find(self._key)

    def close(self) -> None: ...


class _Nobody:
    """A neighbour that needs nothing: it got these values the first time."""

    def send(self, message: Message) -> list[Any]:
        return []
