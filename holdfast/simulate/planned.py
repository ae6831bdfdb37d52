"""Facts about a model that was never measured on other systems, from its profile and our planner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from holdfast.plan.pipeline_sizes import PER_DEVICE
from holdfast.plan.planner import PipelinePlan, Shortage, make_plan
from holdfast.plan.profile import Profile, state_bytes
from holdfast.plan.template import Template, Templates, make_templates
from holdfast.simulate.course import Moment, NodeArrangement, Reaction, follow
from holdfast.simulate.measured_tables import ModelFacts, Speeds
from holdfast.simulate.systems.rearranging import Arrange
from holdfast.simulate.trace import Trace

# Assumed where nothing was measured: the least that Oobleck's tables have for any model. In seconds, but for the steps.
RECONFIGURE = 2.0  # of Oobleck
LOCAL_RENDEZVOUS, GLOBAL_RENDEZVOUS = 76.0, 30.0  # of Bamboo
CHECKPOINT_EVERY = 10  # steps of Varuna
RESTART = 60.0  # of Varuna, besides reading the checkpoint
CREATION = 45.0  # until an added node is up


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model with its templates, to ask for the throughput of different systems."""

    templates: Templates
    micro_batches: int  # of a step

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.micro_batches * self.templates.profile.micro_batch

    def plan(self, nodes: tuple[str, ...], held: dict[str, range] | None = None) -> PipelinePlan | None:
        """Return our plan for these nodes; None if they are too few."""
        made = make_plan(self.templates, nodes, micro_batches=self.micro_batches, held=held)
        return None if isinstance(made, Shortage) else made

    def planned(self, nodes: int) -> tuple[float, int]:
        """Return the samples per second of our plan for so many nodes, and how many of them train."""
        made = self.plan(tuple(f"node{number}" for number in range(nodes)))
        return (self.samples / made.seconds, len(made.held())) if made else (0.0, 0)

    def grid(self, nodes: int) -> tuple[float, int]:
        """Return the same for the fastest grid of equal pipelines."""
        if nodes < self.templates.minimum:
            return 0.0, 0
        depth = self.best_depth(nodes)
        return self.grid_speed(nodes // depth, self.templates.by_nodes[depth]), nodes // depth * depth

    def grid_speed(self, pipelines: int, template: Template) -> float:
        """Return the samples per second of so many equal pipelines."""
        if not pipelines:
            return 0.0
        # A single pipeline has nobody to sum its gradients with.
        return self.samples / template.seconds(-(-self.micro_batches // pipelines), alone=pipelines == 1)

    def best_depth(self, nodes: int, sizes: Collection[int] | None = None) -> int:
        """Return the pipelines' size in the fastest grid of equal pipelines, among ``sizes`` or all templates."""
        sizes = sizes or self.templates.by_nodes
        possible = [size for size in sizes if size <= max(nodes, min(sizes))]
        return max(possible, key=lambda size: self.grid_speed(nodes // size, self.templates.by_nodes[size]))

    def redundant_depth(self, nodes: int) -> int | None:
        """Return the same for Bamboo, whose nodes need memory for two stages; None if no pipeline has that.

        A pipeline has at least two nodes, where possible: each has a predecessor that can stand in for it.
        """
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
    """Make templates for the most nodes that the trace ever has; by default 4 micro-batches per device."""
    most = max(trace.counts)
    templates = make_templates(profile, nodes=most, tolerate=tolerate, devices=devices)
    return PlannedModel(templates=templates, micro_batches=micro_batches or PER_DEVICE * most * devices)


def make_facts(model: PlannedModel, trace: Trace) -> ModelFacts:
    """Return the facts that a tables file would have: throughput by our cost model, times as assumed above."""
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
    """Return a function that rearranges nodes by our planner.

    Each node is sent the layers it lacks, all nodes at once over their own links. Layers that no node holds any more
    come from a checkpoint, which takes ``restart`` seconds.
    """
    profile = model.templates.profile

    def arrange(live: tuple[str, ...], before: NodeArrangement | None) -> NodeArrangement:
        held = before.memory if before is not None else None
        made = model.plan(live, held)
        if made is None:
            # The layers that nodes still hold are remembered: enough nodes may join before these are lost too.
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
    """Return the average number of nodes: systems that choose the pipelines' size only once choose it for these."""
    return round(3600 * trace.node_hours / trace.seconds)


def live_counts(trace: Trace, creation: float) -> list[int]:
    """Return all numbers of nodes that are ever up, if added nodes are up at once or after ``creation`` seconds."""
    counting = _Counting(creation=creation)
    follow(trace, counting)
    return sorted({*trace.counts, *counting.seen})


@dataclass(kw_only=True)
class _Counting:
    """Rules that never train, and only record how many nodes are up."""

    creation: float
    boundary_samples: float = 0.0
    boundary_seconds: float = 0.0
    seen: set[int] = field(default_factory=set)

    def begin(self, moment: Moment) -> NodeArrangement:
        self.seen.add(len(moment.live))
        return NodeArrangement(samples_per_s=0.0, used=0)

    def lose(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        return Reaction(then=self.begin(moment))

    join = lose


def _speeds(at: Callable[[int], tuple[float, int]], counts: Iterable[int]) -> Speeds:
    found = {count: at(count) for count in counts}
    return Speeds(
        {count: speed for count, (speed, _) in found.items()}, {count: used for count, (_, used) in found.items()}
    )


def _bamboo(model: PlannedModel, shape: Template, counts: Iterable[int]) -> Speeds:
    """Return Bamboo's throughput: each node also computes the forward of its successor."""
    layers = model.templates.profile.layers
    forward, backward = sum(layer.forward for layer in layers), sum(layer.backward for layer in layers)
    slower = (2 * forward + backward) / (forward + backward)

    def at(count: int) -> tuple[float, int]:
        pipelines = count // shape.nodes
        return model.grid_speed(pipelines, shape) / slower, pipelines * shape.nodes

    return _speeds(at, counts)
