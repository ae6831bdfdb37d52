"""What the simulator needs to know of a model that nobody measured on other systems: from its profile and our planner.

The one place where the simulator meets the planner.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.plan.planner import Plan, Shortage, make_plan
from holdfast.plan.profile import Profile, state_bytes, uniform
from holdfast.plan.template import Template, Templates, make_templates
from holdfast.simulate.course import Layout
from holdfast.simulate.systems.rearranging import Arrange
from holdfast.simulate.tables import Facts, Speeds
from holdfast.simulate.trace import Trace

# Assumed for models that nobody measured: the least that Oobleck's tables have for any model.
RECONFIGURE = 2.0
LOCAL_RENDEZVOUS, GLOBAL_RENDEZVOUS = 76.0, 30.0
CHECKPOINT_EVERY = 10
RESTART = 60.0  # beside reading the checkpoint
CREATION = 45.0
MADE_UP = "uniform:"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A profile and how it is to be trained."""

    templates: Templates
    micro_batches: int

    @property
    def samples(self) -> int:
        return self.micro_batches * self.templates.profile.micro_batch

    def plan(self, nodes: tuple[str, ...], held: dict[str, range] | None = None) -> Plan | None:
        """None: too few nodes."""
        made = make_plan(self.templates, nodes, micro_batches=self.micro_batches, held=held)
        return None if isinstance(made, Shortage) else made

    def speed(self, nodes: int) -> float:
        """Samples per second of our plan for so many nodes."""
        made = self.plan(tuple(f"node{number}" for number in range(nodes)))
        return self.samples / made.seconds if made else 0.0

    def grid_speed(self, pipelines: int, template: Template) -> float:
        """Samples per second of equal pipelines."""
        return self.samples / template.seconds(-(-self.micro_batches // pipelines)) if pipelines else 0.0

    def best_depth(self, nodes: int, *, fewest: int = 1) -> int:
        """The pipelines' size in the fastest grid of equal pipelines; if there is a choice, not fewer nodes."""
        sizes = [size for size in self.templates.by_nodes if size <= max(nodes, self.templates.minimum)]
        sizes = [size for size in sizes if size >= fewest] or sizes
        return max(sizes, key=lambda size: self.grid_speed(nodes // size, self.templates.by_nodes[size]))


def read_model(text: str) -> Profile:
    """The profile that ``--model`` names.

    >>> len(read_model("uniform:96").layers)
    96
    """
    if text.startswith(MADE_UP):
        count = text.removeprefix(MADE_UP)
        if not count.isdecimal():
            raise UsageError(f"{text!r} names no made-up model", hint="uniform:96 has 96 equal layers")
        return uniform(int(count))
    try:
        document = json.loads(Path(text).read_text())
    except OSError as e:
        raise UsageError(
            f"there is no profile {text!r}",
            hint="give the path of one, uniform:96 for a made-up model, or --tables with the model's name in them",
        ) from e
    except ValueError as e:
        raise UsageError(f"the profile {text} is not JSON: {e}", hint="make one: holdfast profile train.py") from e
    return Profile.from_json(document)


def make_model(
    profile: Profile,
    trace: Trace,
    *,
    tolerate: int = 1,
    devices: int = 1,
    micro_batches: int | None = None,
    memory: float | None = None,
) -> Model:
    """Templates for the most nodes that the trace ever has; by default 4 micro-batches for each of their devices."""
    if memory is not None:
        if not memory > 0:
            raise UsageError(f"a device with {memory:g} GB of memory cannot hold a layer")
        profile = replace(profile, memory=int(memory * 1e9))
    most = max(trace.counts)
    templates = make_templates(profile, nodes=most, tolerate=tolerate, devices=devices)
    return Model(templates=templates, micro_batches=micro_batches or 4 * most * devices)


def make_facts(model: Model, trace: Trace) -> Facts:
    """As a tables file would have them: throughput by our cost model, the rest assumed."""
    templates, profile = model.templates, model.templates.profile
    counts = _live_counts(trace, CREATION)
    depth = model.best_depth(len(trace.nodes))
    redundant = model.best_depth(len(trace.nodes), fewest=2)  # Bamboo: somebody has to be the predecessor
    shape = templates.by_nodes[depth]
    everything = state_bytes(profile.layers, range(len(profile.layers)))
    moving = everything / profile.between.bandwidth
    return Facts(
        model=profile.model,
        samples_per_step=model.samples,
        speeds={
            "oobleck": Speeds({count: model.speed(count) for count in counts}),
            "varuna": Speeds({count: _best_grid(model, count) for count in counts}),
            "recycle": Speeds({n * depth: model.grid_speed(n, shape) for n in range(1, max(counts) // depth + 1)}),
            "bamboo": _bamboo(model, templates.by_nodes[redundant], counts),
        },
        reconfigure=RECONFIGURE,
        local_rendezvous=LOCAL_RENDEZVOUS,
        global_rendezvous=GLOBAL_RENDEZVOUS,
        effective_fraction=None,
        checkpoint_every=CHECKPOINT_EVERY,
        checkpoint=moving,
        restart=RESTART + moving,
        creation=CREATION,
        state_bytes=everything,
        depth=redundant,
        stages=depth,
        micro_batches=model.micro_batches,
    )


def planning(model: Model, *, restart: float) -> Arrange:
    """Rearranges as our planner does: each node is sent the layers it lacks, all nodes at once over their own links.

    Layers that nobody holds any more come from a checkpoint, with a restart.
    """
    profile = model.templates.profile

    def arrange(live: tuple[str, ...], before: Layout | None) -> Layout:
        held = before.memory if before is not None else None
        made = model.plan(live, held)
        if made is None:
            # Who still holds what is remembered: enough nodes may come before it is lost.
            kept = {node: layers for node, layers in (held or {}).items() if node in live}
            return Layout(samples_per_s=0.0, used=0, memory=kept)
        now = made.held()
        lacking = (_lacking(profile, layers, (held or {}).get(node, range(0))) for node, layers in now.items())
        moving = restart if made.lost else profile.between.seconds(max(lacking)) if held else 0.0
        return Layout(samples_per_s=model.samples / made.seconds, used=len(now), moving=moving, memory=now)

    return arrange


def _lacking(profile: Profile, needed: range, held: range) -> int:
    return sum(profile.layers[layer].state_bytes for layer in needed if layer not in held)


def _live_counts(trace: Trace, creation: float) -> list[int]:
    """The numbers of nodes that may be up: added ones come up later."""
    added = [replace(change, lost=(), time=change.time + creation) for change in trace.changes if change.added]
    lost = [replace(change, added=()) for change in trace.changes if change.lost]
    late = replace(trace, changes=tuple(sorted([*added, *lost], key=lambda change: change.time)))
    return sorted({*trace.counts, *(count for count in late.counts if count > 0)})


def _best_grid(model: Model, nodes: int) -> float:
    templates = model.templates
    if nodes < templates.minimum:
        return 0.0
    depth = model.best_depth(nodes)
    return model.grid_speed(nodes // depth, templates.by_nodes[depth])


def _bamboo(model: Model, shape: Template, counts: Iterable[int]) -> Speeds | None:
    """Each node also computes its successor's forward, and holds its layers beside its own."""
    profile = model.templates.profile
    if profile.memory is not None and 2 * max(stage.bytes for stage in shape.stages) > profile.memory:
        return None
    forward = sum(layer.forward for layer in profile.layers)
    backward = sum(layer.backward for layer in profile.layers)
    slower = (2 * forward + backward) / (forward + backward)
    return Speeds({count: model.grid_speed(count // shape.nodes, shape) / slower for count in counts})
