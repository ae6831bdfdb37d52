"""Statistics that modules keep of what passes through them in training, such as BatchNorm's running ones.

A forward pass must change nothing that lasts, for its step may be dropped; and what it leaves behind must not depend
on who computes which micro-batch. So no training call changes the buffers of such a module. What the call would have
changed is taken aside, as a *measurement*. The measurements of all micro-batches are exchanged among the workers that
hold the module, and mixed in when the step is applied, in the order of the micro-batches. It is what one process does
that accumulates gradients over the same micro-batches.

Two kinds of modules are known:

- Normalisations: modules with buffers ``running_mean`` and ``running_var`` that give them to ``F.batch_norm`` or
  ``F.instance_norm``, whatever their class.
- Any module that declares how its own buffers are combined, by a method ``combine_statistics(measured)``. Each training
  call sees the buffers as they were before the step. After the step the method gets the buffers' values after each
  call, as a list of dictionaries in the order of the micro-batches, and writes the new values into the buffers.

A forward pass that activation checkpointing repeats in the backward pass measures nothing: it is no further batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from holdfast.cluster.group import Group
from holdfast.engine.measured import LayersOf, Measured, Measurement, exchange
from holdfast.engine.model import LayeredModel
from holdfast.engine.running import Averages, mix
from holdfast.engine.training_calls import COMBINE, COUNTER, Forward, Use, call, other_shape
from holdfast.errors import UsageError
from holdfast.rng import seed_everything, seed_of


class Statistics:
    """The statistics of a model: taken aside in an attempt, mixed in when it is applied.

    >>> model = LayeredModel([nn.Linear(1, 1), nn.BatchNorm1d(1)], seed=0, device=torch.device("cpu"))
    >>> statistics = Statistics(model)
    >>> with statistics.taking_aside(), statistics.micro_batch(0):
    ...     _ = model.layers[1](torch.tensor([[1.0], [3.0]]))
    >>> model.layers[1].running_mean
    tensor([0.])
    >>> statistics.apply(0)
    >>> model.layers[1].running_mean, model.layers[1].num_batches_tracked
    (tensor([0.2000]), tensor(1))
    """

    def __init__(self, model: LayeredModel) -> None:
        self._model = model
        self.uses = _uses(model)
        self._numbers = {(use.layer, id(use.module)): number for number, use in enumerate(self.uses)}
        self._layers = {id(use.module): use.layer for use in reversed(self.uses)}  # the first one of each module
        self._measured: Measured = {}
        self._now: int | None = None  # the micro-batch whose forward pass runs; None: nothing is measured

    # --- forward passes --------------------------------------------------------------------------

    @contextmanager
    def taking_aside(self) -> Iterator[None]:
        """Let no training call change statistics while this context lasts. Begins with no measurements.

        Raises ``UsageError`` if the modules are not those that the run was made with.
        """
        self.drop()
        self._refuse_replaced()
        wrapped: list[tuple[nn.Module, Any]] = []  # each with the forward pass that it had as an attribute of its own
        try:
            for module in {id(use.module): use.module for use in self.uses}.values():
                wrapped.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = self._measuring(module)
            yield
        finally:
            for module, before in wrapped:
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Count training calls in this context as those of a micro-batch."""
        self._now = index
        try:
            yield
        finally:
            self._now = None

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Count no training calls in this context: the backward pass may repeat some, for activation checkpointing."""
        now, self._now = self._now, None
        try:
            yield
        finally:
            self._now = now

    def _measuring(self, module: nn.Module) -> Forward:
        """Return a module's forward pass, as one that measures."""
        forward = module.forward

        def measuring(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return forward(*args, **kwargs)
            number = self._number_of(module)
            output, measured = call(self.uses[number], forward, args, kwargs)
            if self._now is not None:
                self._measured.setdefault((self._now, number), []).extend(measured)
            return output

        return measuring

    def _number_of(self, module: nn.Module) -> int:
        """Return the number of a module's use in the layer that runs now."""
        now = (self._model.at, id(module))
        return self._numbers[now] if now in self._numbers else self._numbers[self._layers[id(module)], id(module)]

    def _refuse_replaced(self) -> None:
        if self.uses and [(layer, id(module)) for layer, _, module in _modules(self._model)] != list(self._numbers):
            raise UsageError(
                "a module with running statistics was added, replaced or removed after the run was made",
                hint="make the Run when the model is complete",
            )

    # --- the end of a step -----------------------------------------------------------------------

    def exchange(self, group: Group, layers_of: LayersOf, shares: Sequence[range]) -> None:
        """Give this worker the measurements of all micro-batches. Those who hold layers with statistics call this.

        ``layers_of``: the layers of each rank; ``shares``: its micro-batches. May raise ``Broken``.
        """
        if self.uses and group.size > 1:
            device = self._model.device
            self._measured = exchange(group, self.uses, self._measured, layers_of, shares, device)

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """Mix the measurements of a step into the modules' buffers, and forget them."""
        in_order = [(number, one) for (_, number), ones in sorted(self._measured.items(), key=_cell) for one in ones]
        norms: dict[int, list[tuple[Use, Measurement]]] = {}  # by running mean: modules may share one
        declared: dict[int, list[Measurement]] = {}
        for number, one in in_order:
            use = self.uses[number]
            if use.is_declared:
                declared.setdefault(number, []).append(one)
            else:
                norms.setdefault(id(use.mean), []).append((use, one))
        _mix_all(list(norms.values()))
        for number, measured in declared.items():
            seed_everything(seed_of(self._model.seed, step, "statistics", number), self._model.device)
            _combine(self.uses[number], measured)
        self.drop()

    def drop(self) -> None:
        """Forget all measurements: the attempt is over."""
        self._measured = {}


def _mix_all(columns: Sequence[Sequence[tuple[Use, Measurement]]]) -> None:
    """Mix measurements into running statistics. Each column has those of one running mean, in order.

    The n-th of all columns are mixed in together: a few operations on long tensors instead of many on short ones.
    """
    averages = [_read(column[0][0]) for column in columns]
    for place in range(max(map(len, columns), default=0)):
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, column in enumerate(columns):
            if place < len(column):
                mean = column[place][0].mean
                alike.setdefault((mean.dtype, mean.device), []).append(number)
        for some in alike.values():
            mix([averages[number] for number in some], [columns[number][place][1] for number in some])
    for column, new in zip(columns, averages, strict=True):
        _write(column[0][0], new)


def _read(use: Use) -> Averages:
    count = use.buffers.get(COUNTER)
    return Averages(mean=use.mean, var=use.buffers["running_var"], count=None if count is None else int(count))


def _write(use: Use, new: Averages) -> None:
    use.mean.copy_(new.mean)
    use.buffers["running_var"].copy_(new.var)
    if new.count is not None:
        use.buffers[COUNTER].fill_(new.count)


def _combine(use: Use, measured: Sequence[Measurement]) -> None:
    """Let a module combine its measurements. Buffers that it replaces keep their places, with the new values."""
    given = [dict(zip(use.buffers, one.values, strict=True)) for one in measured]
    getattr(use.module, COMBINE)(given)
    for name, buffer in use.buffers.items():
        new = use.module._buffers.get(name)
        if new is not buffer:
            if new is None or (new.shape, new.dtype) != (buffer.shape, buffer.dtype):
                raise other_shape(use, name)
            buffer.copy_(new)
            use.module._buffers[name] = buffer


def _cell(item: tuple[tuple[int, int], object]) -> tuple[int, int]:
    return item[0]


def _modules(model: LayeredModel) -> Iterator[tuple[int, str, nn.Module]]:
    """Return the modules with statistics: layer, name and module, in an order that is the same on every worker."""
    for number, layer in enumerate(model.layers):
        for name, module in layer.named_modules(prefix=f"{number}"):
            if hasattr(type(module), COMBINE) or _is_norm(module):
                yield number, name, module


def _is_norm(module: nn.Module) -> bool:
    own = module._buffers
    return own.get("running_mean") is not None and own.get("running_var") is not None


def _uses(model: LayeredModel) -> list[Use]:
    """Return all uses of modules with statistics. Raises ``UsageError`` for one that no rule fits."""
    layers = {id(buffer): unit.layers for unit in model.units for buffer in unit.buffers}
    found = []
    for number, name, module in _modules(model):
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        measured = list(buffers) if hasattr(type(module), COMBINE) else ["running_mean", "running_var"]
        use = Use(
            layer=number,
            wanted=frozenset[int]().union(*(layers[id(buffer)] for buffer in buffers.values())),
            forms=tuple((buffers[key].shape, buffers[key].dtype) for key in measured),
            name=name,
            module=module,
            buffers=buffers,
        )
        if use.is_declared and len(use.wanted) > 1:
            raise UsageError(
                f"'{name}' combines statistics in buffers that several layers share", hint="keep them in one layer"
            )
        found.append(use)
    return found
