"""What the simulator needs to know of a model that nobody measured on other systems: from its profile and our planner.

The one place where the simulator meets the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from holdfast.plan.planner import PipelinePlan, Shortage, make_plan
from holdfast.plan.profile import Profile, state_bytes
from holdfast.plan.template import Template, Templates, make_templates
from holdfast.simulate.course import Moment, NodeArrangement, Reaction, follow
from holdfast.simulate.measured_tables import ModelFacts, Speeds
from holdfast.simulate.systems.rearranging import Arrange
from holdfast.simulate.trace import Trace

# Assumed for models that nobody measured: the least that Oobleck's tables have for any model.
RECONFIGURE = 2.0
LOCAL_RENDEZVOUS, GLOBAL_RENDEZVOUS = 76.0, 30.0
CHECKPOINT_EVERY = 10
RESTART = 60.0  # beside reading the checkpoint
CREATION = 45.0


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A profile and how it is to be trained."""

    templates: Templates
    micro_batches: int

    @property
    def samples(self) -> int:
        return self.micro_batches * self.templates.profile.micro_batch

    def plan(self, nodes: tuple[str, ...], held: dict[str, range] | None = None) -> PipelinePlan | None:
        """None: too few nodes."""
        made = make_plan(self.templates, nodes, micro_batches=self.micro_batches, held=held)
        return None if isinstance(made, Shortage) else made

    def planned(self, nodes: int) -> tuple[float, int]:
        """Samples per second of our plan for so many nodes, and how many of them train."""
        made = self.plan(tuple(f"node{number}" for number in range(nodes)))
        return (self.samples / made.seconds, len(made.held())) if made else (0.0, 0)

    def grid(self, nodes: int) -> tuple[float, int]:
        """The same of the fastest equal pipelines."""
        if nodes < self.templates.minimum:
            return 0.0, 0
        depth = self.best_depth(nodes)
        return self.grid_speed(nodes // depth, self.templates.by_nodes[depth]), nodes // depth * depth

    def grid_speed(self, pipelines: int, template: Template) -> float:
        """Samples per second of equal pipelines."""
        if not pipelines:
            return 0.0
        # A single pipeline has nobody to sum its gradients with.
        return self.samples / template.seconds(-(-self.micro_batches // pipelines), alone=pipelines == 1)

    def best_depth(self, nodes: int, sizes: Collection[int] | None = None) -> int:
        """The pipelines' size in the fastest grid of equal pipelines; ``sizes``: which there are to choose from."""
        sizes = sizes or self.templates.by_nodes
        possible = [size for size in sizes if size <= max(nodes, min(sizes))]
        return max(possible, key=lambda size: self.grid_speed(nodes // size, self.templates.by_nodes[size]))

    def redundant_depth(self, nodes: int) -> int | None:
        """The same for Bamboo: somebody has to be the predecessor, with the memory for two. None: nobody has."""
        memory, by_nodes = self.templates.profile.memory, self.templates.by_nodes
        sizes = [size for size in by_nodes if size > 1] or list(by_nodes)
        fit = [s for s in sizes if memory is None or 2 * max(stage.bytes for stage in by_nodes[s].stages) <= memory]
        return self.best_depth(nodes, fit) if fit else None


def make_model(
    profile: Profile,
    trace: Trace,
    *,
    tolerate: int = 1,
    devices: int = 1,
    micro_batches: int | None = None,
) -> PlannedModel:
    """Templates for the most nodes that the trace ever has; by default 4 micro-batches for each of their devices."""
    most = max(trace.counts)
    templates = make_templates(profile, nodes=most, tolerate=tolerate, devices=devices)
    return PlannedModel(templates=templates, micro_batches=micro_batches or 4 * most * devices)


def make_facts(model: PlannedModel, trace: Trace) -> ModelFacts:
    """As a tables file would have them: throughput by our cost model, the rest assumed."""
    templates, profile = model.templates, model.templates.profile
    counts = live_counts(trace, CREATION)
    usual = usual_nodes(trace)
    depth = model.best_depth(usual)
    redundant = model.redundant_depth(usual)
    shape = templates.by_nodes[depth]
    everything = state_bytes(profile.layers, range(len(profile.layers)))
    moving = everything / profile.between.bandwidth
    return ModelFacts(
        model=profile.model,
        samples_per_step=model.samples,
        speeds={
            "oobleck": _speeds(model.planned, counts),
            "varuna": _speeds(model.grid, counts),
            "recycle": Speeds({n * depth: model.grid_speed(n, shape) for n in range(1, max(counts) // depth + 1)}),
            "bamboo": _bamboo(model, templates.by_nodes[redundant], counts) if redundant else None,
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
        depth=redundant or depth,
        waiting_slows=False,
        stages=depth,
        micro_batches=model.micro_batches,
    )


def planning(model: PlannedModel, *, restart: float) -> Arrange:
    """Rearranges as our planner does: each node is sent the layers it lacks, all nodes at once over their own links.

    Layers that nobody holds any more come from a checkpoint, with a restart.
    """
    profile = model.templates.profile

    def arrange(live: tuple[str, ...], before: NodeArrangement | None) -> NodeArrangement:
        held = before.memory if before is not None else None
        made = model.plan(live, held)
        if made is None:
            # Who still holds what is remembered: enough nodes may come before it is lost.
            kept = {node: layers for node, layers in (held or {}).items() if node in live}
            return NodeArrangement(samples_per_s=0.0, used=0, memory=kept)
        now = made.held()
        lacking = (_lacking(profile, layers, (held or {}).get(node, range(0))) for node, layers in now.items())
        moving = restart if made.lost else profile.between.seconds(max(lacking)) if held else 0.0
        return NodeArrangement(samples_per_s=model.samples / made.seconds, used=len(now), moving=moving, memory=now)

    return arrange


def _lacking(profile: Profile, needed: range, held: range) -> int:
    return sum(profile.layers[layer].state_bytes for layer in needed if layer not in held)


def usual_nodes(trace: Trace) -> int:
    """The nodes there are on average: what somebody who chooses pipelines once and for all goes by."""
    return round(3600 * trace.node_hours / trace.seconds)


def live_counts(trace: Trace, creation: float) -> list[int]:
    """The numbers of nodes that are ever up, be it at once (the ideal) or so many seconds after they are added."""
    counting = _Counting(creation=creation)
    follow(trace, counting)
    return sorted({*trace.counts, *counting.seen})


@dataclass(kw_only=True)
class _Counting:
    """A system that only counts who is up."""

    creation: float
    boundary_samples: float = 0.0
    boundary_seconds: float = 0.0
    seen: set[int] = field(default_factory=set)

    def begin(self, moment: Moment) -> NodeArrangement:
        self.seen.add(len(moment.live))
        return NodeArrangement(samples_per_s=0.0, used=0)

    def lose(self, layout: NodeArrangement, moment: Moment) -> Reaction:
        return Reaction(then=self.begin(moment))

    join = lose


def _speeds(at: Callable[[int], tuple[float, int]], counts: Iterable[int]) -> Speeds:
    found = {count: at(count) for count in counts}
    return Speeds(
        {count: speed for count, (speed, _) in found.items()}, {count: used for count, (_, used) in found.items()}
    )


def _bamboo(model: PlannedModel, shape: Template, counts: Iterable[int]) -> Speeds:
    """Each node also computes its successor's forward."""
    layers = model.templates.profile.layers
    forward, backward = sum(layer.forward for layer in layers), sum(layer.backward for layer in layers)
    slower = (2 * forward + backward) / (forward + backward)

    def at(count: int) -> tuple[float, int]:
        pipelines = count // shape.nodes
        return model.grid_speed(pipelines, shape) / slower, pipelines * shape.nodes

    return _speeds(at, counts)
