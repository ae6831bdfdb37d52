"""A profile measured in the run itself, right before it trains: a few passes that leave no trace.

``holdfast profile`` measures longer and better (``measure.py``); this is for a run that was not given a profile.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from holdfast.engine.boundary import tensors_in
from holdfast.engine.engine import Engine
from holdfast.engine.model import LayeredModel
from holdfast.engine.profile.key import device_facts, device_text
from holdfast.engine.profile.measure import AS_INSIDE, device_memory
from holdfast.engine.profile.passes import Passes, cut, micro_batch, note_saved, saved_bytes
from holdfast.engine.profile.shadow import Shadow
from holdfast.errors import UsageError
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.rng import undisturbed_generators
from holdfast.words import count

FEWEST_ROUNDS = 3  # timed passes at least: the median of three drops one that was disturbed
ENOUGH_SECONDS = 0.05  # of timed passes: then the medians of small models hold still
LONGEST_SECONDS = 3.0  # for all of it, and stronger than the two above: the run waits for this profile
STAND_IN = 0.01  # value in place of weights that are on other workers: NaN and tiny numbers may compute slowly


@dataclass(kw_only=True)
class Seen:
    """The measurements, one entry for each layer in each list."""

    forward: list[float] = field(default_factory=list)  # seconds
    backward: list[float] = field(default_factory=list)  # seconds
    output_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)


def quick_profile(engine: Engine, link: Link, *, memory: int | None) -> Profile:
    """Measure every layer of a run that is about to train, and leave everything as it was.

    ``link`` is the one between workers (``round_trips.quick_link``), ``memory`` the bytes that a worker may use; None:
    what the device has, if that is known. Layers that this worker does not hold get memory one at a time.

    Only one worker calls this and sends the profile to the others: all must plan with the same one. Raises
    ``UsageError`` if the layers cannot be measured one by one, or the loss depends on no parameter.
    """
    deadline = time.perf_counter() + LONGEST_SECONDS
    model, shadow = engine.model, Shadow(engine.update)
    with undisturbed(model):
        inputs, targets = micro_batch(engine)
        if len(model.held) == len(model.layers):
            seen = _in_passes(Passes(engine, inputs, targets), engine, deadline)
        else:
            seen = OneByOne(engine, inputs, targets).measure(deadline)
        costs = tuple(_alike(list(_costs(model, seen, shadow)), list(map(str, model.layers))))
    notes = {
        "measured": time.time(),
        "host": socket.gethostname(),
        "rounds": "a few, in the run itself",
        "slots": "not known: taken to be two for each weight" if shadow.is_guess else "tried out",
        "inside": "measured between two workers",
        "between": AS_INSIDE,
    }
    weights = sum(layer.weight_bytes for layer in costs)
    return Profile(
        model=f"{count(len(costs), 'layer')}, {weights:,} bytes of weights",
        device=device_text(device_facts(model.device, engine.autocast)),
        micro_batch=engine.order.micro_batch,
        layers=costs,
        inside=link,
        between=link,
        memory=device_memory(model.device) if memory is None else memory,
        notes=notes,
    )


def _costs(model: LayeredModel, seen: Seen, shadow: Shadow) -> Iterator[LayerCost]:
    for number, (parameters, buffers) in enumerate(model.parts()):
        kept = shadow.kept(parameters)
        yield LayerCost(
            name=f"{number} {type(model.layers[number]).__name__}",
            forward=seen.forward[number],
            backward=seen.backward[number],
            output_bytes=seen.output_bytes[number],
            output_gradient_bytes=seen.gradient_bytes[number],
            weight_bytes=sum(tensor.nbytes for tensor in [*parameters, *buffers]),
            trainable_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            slot_bytes=kept.slot_bytes,
            saved_bytes=seen.saved[number],
            update=kept.seconds,
        )


def _alike(costs: Sequence[LayerCost], settings: Sequence[str]) -> Iterator[LayerCost]:
    """Give layers with the same settings and sizes the same seconds, the median of theirs.

    Else few rounds on a busy machine would make equal layers differ, and plans with them.
    """
    kinds: defaultdict[tuple[str, LayerCost], list[LayerCost]] = defaultdict(list)
    keys = [
        (words, replace(cost, name="", forward=0.0, backward=0.0)) for cost, words in zip(costs, settings, strict=True)
    ]
    for key, cost in zip(keys, costs, strict=True):
        kinds[key].append(cost)
    for key, cost in zip(keys, costs, strict=True):
        forward, backward = (median(getattr(one, name) for one in kinds[key]) for name in ("forward", "backward"))
        yield replace(cost, forward=forward, backward=backward)


def _in_passes(passes: Passes, engine: Engine, deadline: float) -> Seen:
    """Measure in whole passes, as in training. All layers must be held."""
    weighed, saved = saved_bytes(passes, engine)
    timed = [passes.one() for _ in _rounds(deadline, ENOUGH_SECONDS)] or [weighed]
    return Seen(
        forward=[median(times) for times in zip(*(one.forward for one in timed), strict=True)],
        backward=[median(times) for times in zip(*(one.backward for one in timed), strict=True)],
        output_bytes=weighed.output_bytes,
        gradient_bytes=weighed.gradient_bytes,
        saved=saved,
    )


def _rounds(deadline: float, enough: float) -> Iterator[int]:
    """Count rounds until there are enough of them, or until another one would end after the deadline."""
    start = now = time.perf_counter()
    for number in itertools.count():
        before, now = now, time.perf_counter()
        if (number >= FEWEST_ROUNDS and now - start >= enough) or now + (now - before) > deadline:
            return
        yield number


# --- layers that are not held -----------------------------------------------------------------------


class OneByOne(Passes):
    """Measures layers one after the other: each gets memory, computes forward and backward, and gives the memory back.

    So no more memory is used than the largest layer needs. The gradient that a layer gets from the next one is made
    up, all ones: the next layer has not computed yet.
    """

    def measure(self, deadline: float) -> Seen:
        """Measure all layers until ``deadline`` (of ``time.perf_counter``), with a fair part of the time for each."""
        seen, value = Seen(), self._inputs
        for number in range(self._last + 1):
            now = time.perf_counter()
            until = now + (deadline - now) / (self._last + 1 - number)
            with _lent(self._model, number):
                value = self._measure(number, value, until, seen)
        seen.output_bytes[-1] = 0  # the loss goes nowhere
        seen.gradient_bytes = [*seen.gradient_bytes[1:], 0]
        return seen

    def _measure(self, number: int, value: Any, until: float, seen: Seen) -> Any:
        """Measure one layer with the input ``value``; return its output, cut off from the layer."""
        kept: dict[int, int] = {}
        first = self._trip(number, value, kept)
        rounds = _rounds(until, ENOUGH_SECONDS / (self._last + 1))
        times = [self._trip(number, value).seconds for _ in rounds] or [first.seconds]
        seen.forward.append(median(forward for forward, _ in times))
        seen.backward.append(median(backward for _, backward in times))
        seen.output_bytes.append(sum(tensor.nbytes for tensor in tensors_in(first.output)))
        seen.gradient_bytes.append(first.gradient_bytes)
        seen.saved.append(sum(kept.values()) if first.seconds[1] else 0)
        return first.output

    def _trip(self, number: int, value: Any, kept: dict[int, int] | None = None) -> _Trip:
        """One forward and backward pass of a layer. ``kept`` gets what the layer saves in between."""
        crossing = cut(value)
        watch = nullcontext() if kept is None else note_saved(kept, crossing.inputs, self._model.layers[number])
        with self._autocast(), watch:
            begin = self._now()
            output = self._layer(number, crossing.inputs)
            forward = self._now() - begin
        self._check(number, output)
        behind = cut(output)
        if number == self._last and not behind.goes_back:
            raise UsageError("the loss does not depend on any parameter", hint="check requires_grad, and detach()")
        for leaf in behind.leaves:
            if leaf.requires_grad:
                leaf.grad = torch.ones_like(leaf)
        backward = self._backward(number, behind)
        given = tree_map(lambda leaf: _cut_off(leaf) if isinstance(leaf, Tensor) else leaf, output)
        return _Trip(seconds=(forward, backward), gradient_bytes=crossing.gradient_bytes, output=given)


@dataclass(frozen=True, kw_only=True)
class _Trip:
    """The measurements of one forward and backward pass of a layer."""

    seconds: tuple[float, float]  # forward, backward
    gradient_bytes: int  # that go back to the layer before
    output: Any  # cut off from the layer


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def _lent(model: LayeredModel, number: int) -> Iterator[None]:
    """Within this context, the layer has memory. Tensors that this worker does not hold get ``STAND_IN`` as values."""
    was_held = number in model.held
    fresh = [unit for unit in model.units_of([number]) if not model.is_held(unit)]
    if not was_held:
        model.hold([number])
    try:
        with torch.no_grad():
            for tensor in (tensor for unit in fresh for tensor in unit.tensors):
                tensor.fill_(STAND_IN if tensor.is_floating_point() or tensor.is_complex() else 0)
        yield
    finally:
        for p in model.layers[number].parameters():
            p.grad = None
        if not was_held:
            model.release([number])


# --- no trace --------------------------------------------------------------------------------------


@contextmanager
def undisturbed(model: LayeredModel) -> Iterator[None]:
    """After this context, gradients, buffers, modes and random number generators are as they were before.

    >>> model = LayeredModel([nn.BatchNorm1d(2)], seed=0, device=torch.device("cpu"))
    >>> with undisturbed(model):
    ...     model(torch.ones(3, 2)).sum().backward()
    >>> model.layers[0].running_mean, model.layers[0].weight.grad
    (tensor([0., 0.]), None)
    """
    wholes = [model.module, *model.layers]
    modules = list({id(module): module for whole in wholes for module in whole.modules()}.values())
    modes = [module.training for module in modules]
    gradients = [(p, p.grad) for module in modules for p in module._parameters.values() if p is not None]
    elsewhere = {id(buffer) for unit in model.units if not model.is_held(unit) for buffer in unit.buffers}
    buffers = [
        _Buffer(module, name, buffer, is_held=id(buffer) not in elsewhere)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for p, _ in gradients:
        p.grad = None
    with undisturbed_generators():
        try:
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for buffer in buffers:
                buffer.restore()
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


class _Buffer:
    """A module's buffer as it was. A forward pass may write into it, or put another tensor in its place."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor, *, is_held: bool) -> None:
        self._module, self._name, self._tensor = module, name, tensor
        self._before = tensor.detach().clone() if is_held else None  # a buffer that is not held has no values

    @torch.no_grad()
    def restore(self) -> None:
        self._module._buffers[self._name] = self._tensor
        # Values are compared because BatchNorm writes without telling: the tensor's version stays as it was.
        if self._before is not None and not torch.equal(self._tensor, self._before):
            self._tensor.copy_(self._before)
