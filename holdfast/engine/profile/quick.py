"""A profile measured in the run itself, right before it trains: a few passes that leave no trace.

``holdfast profile`` measures longer and better (``measure.py``); this is for a run that was not given one.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from holdfast.cluster.group import Group
from holdfast.engine.engine import Engine
from holdfast.engine.model import LayeredModel
from holdfast.engine.profile.key import _device, device_text
from holdfast.engine.profile.links import fit
from holdfast.engine.profile.measure import AS_INSIDE, _memory
from holdfast.engine.profile.passes import Passes, _storage, cut, micro_batch, saved_bytes, tensors_in
from holdfast.engine.profile.shadow import Shadow
from holdfast.engine.profile.undisturbed import undisturbed
from holdfast.errors import UsageError
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.words import count

ROUNDS = 3  # at least, and
ENOUGH = 0.05  # seconds of passes; but no more than
LONGEST = 3.0  # seconds, with all the rest
FILLED = 0.01  # what stands in for weights that are elsewhere: no NaN, nothing that computes slowly


@dataclass(kw_only=True)
class Seen:
    """What was seen of each layer."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    output_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)


def quick_profile(engine: Engine, link: Link, *, memory: int | None) -> Profile:
    """Measures every layer of a run that is about to train, and leaves all as it was.

    ``link`` is that between workers (``quick_link``), ``memory`` the bytes that a worker may use. Layers that are
    not held get memory one at a time. All workers must plan with the same profile: one measures, and tells the
    others.
    """
    deadline = time.perf_counter() + LONGEST
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
        device=device_text(_device(model.device, engine.autocast)),
        micro_batch=engine.order.micro_batch,
        layers=costs,
        inside=link,
        between=link,
        memory=_memory(model.device) if memory is None else memory,
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
    """Layers that look alike take the same time: few rounds on a busy machine would make them differ."""
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
    """All layers are here: whole passes, as in training."""
    weighed, saved = saved_bytes(passes, engine)
    timed = [passes.one() for _ in _rounds(deadline, ENOUGH)] or [weighed]
    return Seen(
        forward=[median(times) for times in zip(*(one.forward for one in timed), strict=True)],
        backward=[median(times) for times in zip(*(one.backward for one in timed), strict=True)],
        output_bytes=weighed.output_bytes,
        gradient_bytes=weighed.gradient_bytes,
        saved=saved,
    )


def _rounds(deadline: float, enough: float) -> Iterator[int]:
    """Counts rounds until there are enough, or another one would end after the deadline."""
    start = now = time.perf_counter()
    for number in itertools.count():
        before, now = now, time.perf_counter()
        if (number >= ROUNDS and now - start >= enough) or now + (now - before) > deadline:
            return
        yield number


# --- layers that are not held -----------------------------------------------------------------------


class OneByOne(Passes):
    """Each layer gets memory, goes forward and backward a few times, and gives it back.

    What comes back from behind is made up, all ones: the layer behind is not there yet.
    """

    def measure(self, deadline: float) -> Seen:
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
        """Returns what the layer gives, cut off from it."""
        kept: dict[int, int] = {}
        first = self._trip(number, value, kept)
        rounds = _rounds(until, ENOUGH / (self._last + 1))
        times = [self._trip(number, value).seconds for _ in rounds] or [first.seconds]
        seen.forward.append(median(forward for forward, _ in times))
        seen.backward.append(median(backward for _, backward in times))
        seen.output_bytes.append(sum(tensor.nbytes for tensor in tensors_in(first.output)))
        seen.gradient_bytes.append(first.gradient_bytes)
        seen.saved.append(sum(kept.values()) if first.seconds[1] else 0)
        return first.output

    def _trip(self, number: int, value: Any, kept: dict[int, int] | None = None) -> _Trip:
        crossing = cut(value)
        watch = nullcontext() if kept is None else self._watch(number, crossing.inputs, kept)
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

    def _watch(self, number: int, inputs: Any, kept: dict[int, int]) -> AbstractContextManager[Any]:
        """Fills ``kept`` with what the layer keeps for its backward, by address."""
        layer = self._model.layers[number]
        weights = {_storage(tensor)[0] for tensor in [*layer.parameters(), *layer.buffers()]}

        def keep(tensor: Tensor) -> Tensor:
            address, size = _storage(tensor)
            if address not in weights:
                kept[address] = size
            return tensor

        for tensor in tensors_in(inputs):
            keep(tensor)
        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


@dataclass(frozen=True, kw_only=True)
class _Trip:
    seconds: tuple[float, float]
    gradient_bytes: int  # over the boundary in front
    output: Any  # cut off


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def _lent(model: LayeredModel, number: int) -> Iterator[None]:
    """The layer has memory within this. What was not there is filled with numbers, not with its weights."""
    was_held = number in model.held
    fresh = [unit for unit in model.units_of([number]) if not model.is_held(unit)]
    if not was_held:
        model.hold([number])
    try:
        with torch.no_grad():
            for tensor in (tensor for unit in fresh for tensor in unit.tensors):
                tensor.fill_(FILLED if tensor.is_floating_point() or tensor.is_complex() else 0)
        yield
    finally:
        for p in model.layers[number].parameters():
            p.grad = None
        if not was_held:
            model.release([number])


# --- the link ---------------------------------------------------------------------------------------

MESSAGE, ORDER = 1_000_000, 1_000_001  # tags
SIZES = (4, 16 << 10, 256 << 10, 1 << 20)  # bytes
SPENT = 0.01  # seconds on each size, if a trip takes no longer
FEWEST, MOST = 3, 20  # trips of one size; the first is slow
SLOW = 0.05  # seconds: of a trip that takes longer, one is enough
TOO_LONG = 0.6  # seconds: a trip that would end later is not tried


def quick_link(
    group: Group, hosts: Sequence[str], *, clock: int = 0, device: torch.device | None = None
) -> Link | None:
    """The link between two workers, if possible of different hosts; ``hosts`` are those of all ranks.

    All call it. The one of rank ``clock`` gets the answer; the others get None, and all but one of them at once.
    """
    others = [rank for rank in range(group.size) if rank != clock]
    other = next((rank for rank in others if hosts[rank] != hosts[clock]), others[0] if others else None)
    if group.rank == clock and other is not None:
        return fit(_trips(group, other, device))
    if group.rank == other:
        _echo(group, clock, device)
    return None


def _trips(group: Group, other: int, device: torch.device | None) -> dict[int, float]:
    """Seconds of one way by bytes, of the fastest trip: a slower one shows who else wanted the cores."""
    seconds: dict[int, float] = {}
    start = time.perf_counter()
    for size in SIZES:
        expected = 2 * fit(seconds).seconds(size) if len(seconds) > 1 else 0.0
        if time.perf_counter() + expected > start + TOO_LONG:
            break
        trips = 1 if expected > SLOW else max(FEWEST, min(MOST, int(SPENT / expected))) if expected else FEWEST
        group.start([(other, torch.tensor([size, trips], device=device), ORDER)], [])
        message, echo = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(trips):
            begin = time.perf_counter()
            group.finish(group.start([(other, message, MESSAGE)], [(other, echo, MESSAGE)]))
            one_way = (time.perf_counter() - begin) / 2
            seconds[size] = min(seconds.get(size, one_way), one_way)
    group.start([(other, torch.tensor([0, 0], device=device), ORDER)], [])
    return seconds


def _echo(group: Group, clock: int, device: torch.device | None) -> None:
    order = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        group.finish(group.start([], [(clock, order, ORDER)]))
        size, trips = order.tolist()
        if not size:
            return
        message = torch.empty(size, dtype=torch.uint8, device=device)
        for _ in range(trips):
            group.finish(group.start([], [(clock, message, MESSAGE)]))
            group.start([(clock, message, MESSAGE)], [])
