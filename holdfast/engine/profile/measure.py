"""Measures a run's layers in real passes, and tells whether a profile is one of a given run."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast.engine.engine import Engine
from holdfast.engine.model import LayeredModel
from holdfast.engine.profile.key import RunFacts, device_text, facts_of
from holdfast.engine.profile.passes import Pass, Passes, micro_batch, saved_bytes
from holdfast.engine.profile.round_trips import MeasuredLink
from holdfast.engine.update import Update
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.words import count, seconds_text

if TYPE_CHECKING:
    from holdfast.run.training import Training

WARM_UP = 3  # passes that are not timed, because the first ones are slower; in the very first, bytes are counted
UPDATES = 5  # of the optimizer that are timed, after one that makes its slots; their median counts


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers:
    """The measurements of a run's layers: a profile but for the links."""

    facts: RunFacts
    costs: tuple[LayerCost, ...]
    memory: int | None  # bytes of the device; None: unknown
    notes: dict[str, Any]

    def profile(self, name: str, inside: MeasuredLink) -> Profile:
        """Return the profile of the run with this ``name``, given the link ``inside`` a host.

        The link between hosts is taken to be the same; ``with_between`` says it better.
        """
        transport = "two processes of this host, over loopback"
        if self.facts.device["type"] == "cuda":
            transport += "; the run itself would use NCCL, which is not measured"
        return Profile(
            model=model_text(name, self.costs, self.facts.key),
            device=device_text(self.facts.device),
            micro_batch=self.facts.micro_batch["samples"],
            layers=self.costs,
            inside=inside.link,
            between=inside.link,
            memory=self.memory,
            key=self.facts.key,
            notes={
                **self.notes,
                "inside": f"measured: {transport}",
                "inside_trips": inside.notes(),
                "between": AS_INSIDE,
            },
        )


def model_text(name: str, layers: Sequence[LayerCost], key: str) -> str:
    """Return the line that says which model a profile is of.

    >>> from holdfast.plan.profile import uniform
    >>> model_text("train", uniform(1, weight_bytes=4000).layers, "1b4f42ea2721-2cff45ba94ab-44136fa355b3")
    'train: 1 layer, 4,000 bytes of weights (1b4f42ea2721)'
    """
    weights = sum(layer.weight_bytes for layer in layers)
    return f"{name}: {count(len(layers), 'layer')}, {weights:,} bytes of weights ({key.partition('-')[0]})"


AS_INSIDE = "not measured: taken to be as inside a host"


def read_facts(engine: Engine) -> tuple[RunFacts, Any, Any]:
    """Return the facts of a run, and inputs and targets of the micro-batch that they were read from."""
    inputs, targets = micro_batch(engine)
    return facts_of(engine, inputs, targets), inputs, targets


def measure(engine: Engine, *, rounds: int, say: Callable[[str], None] = lambda text: None) -> MeasuredLayers:
    """Measure every layer of a run in ``rounds`` timed passes. ``say`` is told what is about to be measured.

    The run cannot train afterwards: its optimizer and gradients are used up. Raises ``UsageError`` if the layers cannot
    be measured one by one, or if the loss depends on no parameter.
    """
    engine.model.make_whole()
    facts, inputs, targets = read_facts(engine)
    passes = Passes(engine, inputs, targets)
    weighed, saved = saved_bytes(passes, engine)
    last = [passes.one() for _ in range(WARM_UP - 1)][-1]
    layers, seconds = count(len(engine.model.layers), "layer"), sum(last.forward + last.backward)
    say(f"measuring {layers} in {rounds} passes of about {seconds_text(seconds)}")
    timed = [passes.one() for _ in range(rounds)]
    updates = _updates(engine.update, engine.model.device)
    costs = _costs(engine, weighed=weighed, saved=saved, timed=timed, update=median(updates))
    notes = {
        "measured": time.time(),
        "host": socket.gethostname(),
        "rounds": rounds,
        "micro_batch": facts.micro_batch,
        "seconds": "medians of the rounds; the last layer's include the loss",
        "pass": median(sum(one.forward) + sum(one.backward) for one in timed),
        "spread": _spread(timed, updates),
        "update": "the optimizer's measured seconds, shared out by the bytes of gradients and slots",
        "saved": "the layer's input and what autograd saves, once each, without weights",
    }
    return MeasuredLayers(facts=facts, costs=costs, memory=device_memory(engine.model.device), notes=notes)


def _costs(
    engine: Engine, *, weighed: Pass, saved: Sequence[int], timed: Sequence[Pass], update: float
) -> tuple[LayerCost, ...]:
    names = layer_names(engine.model)
    states = [_state(engine.update, *part) for part in engine.model.parts()]
    moved = [state["trainable_bytes"] + state["slot_bytes"] for state in states]
    return tuple(
        LayerCost(
            name=names[number],
            forward=median(one.forward[number] for one in timed),
            backward=median(one.backward[number] for one in timed),
            output_bytes=weighed.output_bytes[number],
            output_gradient_bytes=weighed.gradient_bytes[number],
            saved_bytes=saved[number],
            update=update * moved[number] / sum(moved),
            **states[number],
        )
        for number in range(len(names))
    )


def layer_names(model: LayeredModel) -> list[str]:
    """Return each layer's name in the model, with its class.

    >>> layer_names(LayeredModel([nn.Linear(2, 2), nn.ReLU()], seed=0, device=torch.device("cpu")))
    ['0 Linear', '1 ReLU']
    """
    names = {id(layer): name for name, layer in model.module.named_children()}
    names |= {id(layer): str(number) for number, layer in enumerate(model.layers) if id(layer) not in names}
    if model.layers == [model.module]:
        names = {id(model.module): ""}
    return [f"{names[id(layer)]} {type(layer).__name__}".strip() for layer in model.layers]


def _state(update: Update, parameters: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor]) -> dict[str, int]:
    """The bytes of a layer's weights, of those that are trained, and of their slots in the optimizer."""
    trained = [p for p in parameters if p.requires_grad]
    slots = [value for slot in update.slots(trained) for value in slot.values() if isinstance(value, torch.Tensor)]
    return {
        "weight_bytes": sum(tensor.nbytes for tensor in [*parameters, *buffers]),
        "trainable_bytes": sum(p.nbytes for p in trained),
        "slot_bytes": sum(value.nbytes for value in slots),
    }


def _updates(update: Update, device: torch.device) -> list[float]:
    """Seconds of the timed updates. The schedule of learning rates is not asked: it may have an end."""
    seconds = []
    for p in update.parameters:
        if p.grad is None:  # a parameter that was not used has a gradient of zero in training too
            p.grad = torch.zeros_like(p)
    for _ in range(1 + UPDATES):
        begin = time.perf_counter()
        if update.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(update.parameters, update.clip_norm)
        update.optimizer.step()
        if device.type == "cuda":  # untested here
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def _spread(timed: Sequence[Pass], updates: Sequence[float]) -> dict[str, Any]:
    """The seconds between which half of the measurements lie, for the profile's notes."""
    forward = zip(*(one.forward for one in timed), strict=True)
    backward = zip(*(one.backward for one in timed), strict=True)
    return {
        "forward": [_middle_half(seconds) for seconds in forward],
        "backward": [_middle_half(seconds) for seconds in backward],
        "pass": _middle_half([sum(one.forward) + sum(one.backward) for one in timed]),
        "update": _middle_half(updates),
    }


def _middle_half(seconds: Sequence[float]) -> list[float]:
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return [low, high]


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU; None for a CPU, since nobody knows which part of the host's memory is one worker's."""
    if device.type == "cuda":  # untested here
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None


# --- the link between hosts -----------------------------------------------------------------


def with_between(
    profile: Profile,
    *,
    bandwidth: float | None = None,
    latency: float | None = None,
    peer: str = "",
    measured: MeasuredLink | None = None,
) -> Profile:
    """Return the profile with another link between hosts, and a note that says where it is from.

    That is the one ``measured`` with ``peer``; else ``bandwidth`` (bytes/s) and ``latency`` (s) as given, where what is
    not given is as inside a host.

    >>> from holdfast.plan.profile import uniform
    >>> with_between(uniform(4), bandwidth=1e9).notes["between"]
    'given: bandwidth; the latency is that inside a host'
    """
    notes: dict[str, Any] = {"between": AS_INSIDE}
    link = profile.inside
    if measured is not None:
        link, notes = measured.link, {"between": f"measured: with {peer}", "between_trips": measured.notes()}
    elif bandwidth is not None and latency is not None:
        link, notes = Link(bandwidth=bandwidth, latency=latency), {"between": "given: bandwidth and latency"}
    elif bandwidth is not None:
        link = replace(link, bandwidth=bandwidth)
        notes["between"] = "given: bandwidth; the latency is that inside a host"
    elif latency is not None:
        link = replace(link, latency=latency)
        notes["between"] = "given: latency; the bandwidth is that inside a host"
    return replace(profile, between=link, notes={**profile.notes, **notes})


# --- is it the right one? -----------------------------------------------------------------------------


def fits(profile: Profile, run: Training) -> str | None:
    """Return why a profile is not one of this run, in words; None if it is one."""
    facts, *_ = read_facts(run.engine)
    return difference(profile, facts, run.engine.model)


def difference(profile: Profile, facts: RunFacts, model: LayeredModel) -> str | None:
    """Return in words what differs between a profile and the ``facts`` of a run: model, micro-batch or device.

    None: nothing does. ``model`` is the run's; it tells which layer is another one.
    """
    if profile.key == facts.key:
        return None
    if profile.key.count("-") != 2:
        return "the profile was not measured but made up: it has no key"
    same_model, same_batch, _ = (a == b for a, b in zip(profile.key.split("-"), facts.key.split("-"), strict=True))
    if not same_model:
        return f"a profile of another model: {_other_model(profile, model)}"
    if not same_batch:
        before = profile.notes.get("micro_batch") or {"samples": profile.micro_batch}
        return f"a profile of another micro-batch: {_shown(before)}; this run has {_shown(facts.micro_batch)}"
    return f"a profile of another device: {profile.device}; this run is on {device_text(facts.device)}"


def _other_model(profile: Profile, model: LayeredModel) -> str:
    names = layer_names(model)
    if len(profile.layers) != len(names):
        return f"it has {count(len(profile.layers), 'layer')}, this run's has {len(names)}"
    for number, (layer, name, part) in enumerate(zip(profile.layers, names, model.parts(), strict=True)):
        if layer.name != name:
            return f"its layer {number} is '{layer.name}', this run's is '{name}'"
        size = sum(tensor.nbytes for tensor in [*part[0], *part[1]])
        if layer.weight_bytes != size:
            return f"its layer {number} ({name}) has {layer.weight_bytes:,} bytes of weights, this run's has {size:,}"
    return "the layers have the same names and sizes, but their settings or code, the loss or the optimizer differ"


def _shown(batch: dict[str, Any]) -> str:
    parts = [count(batch["samples"], "sample")]
    parts += [f"{name} {', '.join(batch[name])}" for name in ("inputs", "targets") if name in batch]
    return "; ".join(parts)
