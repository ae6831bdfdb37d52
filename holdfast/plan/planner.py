"""The plan: which nodes form which pipelines, with how many micro-batches each, and why.

The same templates, nodes and held layers give the same plan on every worker, so no message is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.errors import UsageError
from holdfast.plan.batch import split
from holdfast.plan.pipeline_counts import Composition, Demand, Menu, equals, fastest, fewest_pipelines
from holdfast.plan.pipeline_sizes import what_it_takes
from holdfast.plan.place import Assignment, place
from holdfast.plan.place import NodeName as NodeName
from holdfast.plan.template import Template, Templates
from holdfast.words import count, size_text

MOST_MICRO_BATCHES = 10_000_000  # of a step; more is taken for a mistake
TRIES = 4096  # nodes placed in all while comparing equally fast plans: bounds the time of that search


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline of named nodes, in the order of the template's stages, and its micro-batches of a step."""

    template: Template
    nodes: tuple[NodeName, ...]
    micro_batches: int
    alone: bool = False  # no other pipeline to sum gradients with

    @property
    def seconds(self) -> float:
        """Seconds of a step of this pipeline."""
        return self.template.seconds(self.micro_batches, alone=self.alone)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Pipelines for all nodes. ``moved_bytes`` are the bytes of layers that nodes must be sent to hold their place."""

    pipelines: tuple[Pipeline, ...]
    tolerate: int
    micro_batches: int
    moved_bytes: int
    spares: tuple[NodeName, ...]  # nodes without a place: too few layers, or too little memory for longer pipelines
    lost: tuple[int, ...]  # layers that no node holds any more: they come from the log or a checkpoint
    reason: str

    @property
    def seconds(self) -> float:
        """Seconds of a step: those of its slowest pipeline."""
        return max(pipeline.seconds for pipeline in self.pipelines)

    def held(self) -> dict[NodeName, range]:
        """Return the layers of each node."""
        return {
            node: layers
            for pipeline in self.pipelines
            for node, layers in zip(pipeline.nodes, pipeline.template.roles, strict=True)
        }

    def holders(self, layer: int) -> list[NodeName]:
        """Return the nodes that hold a layer; there are more than ``tolerate``."""
        return [node for node, layers in self.held().items() if layer in layers]


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The answer instead of a plan when there are too few nodes: how many are needed, and what would help."""

    nodes: int
    needed: int
    reason: str
    hint: str


def make_plan(
    templates: Templates,
    nodes: Sequence[NodeName],
    *,
    micro_batches: int,
    held: Mapping[NodeName, range] | None = None,
    slack: float = 0.0,
) -> PipelinePlan | Shortage:
    """Return the fastest plan for these nodes; among equally fast plans, the one that moves the fewest bytes.

    ``micro_batches`` are those of a step. ``held`` are the layers that nodes hold now; nodes that are not in it hold
    none. With ``slack`` 0.02 a step that is up to 2% longer counts as equally fast. Returns a Shortage if there are
    too few nodes. Raises UsageError for a node named twice, too many micro-batches, or too few to give every pipeline
    one at the start of a run.

    >>> from holdfast.plan.profile import uniform
    >>> from holdfast.plan.template import make_templates
    >>> made = make_templates(uniform(8), nodes=5, tolerate=1, minimum=2)
    >>> plan = make_plan(made, ["a", "b", "c", "d", "e"], micro_batches=20)
    >>> [(pipeline.nodes, pipeline.micro_batches) for pipeline in plan.pipelines]
    [(('a', 'b'), 8), (('c', 'd', 'e'), 12)]
    >>> make_plan(made, ["a", "b", "c"], micro_batches=20).reason
    '3 nodes are left, and surviving the loss of 1 takes 2 pipelines of at least 2 nodes'
    """
    if micro_batches > MOST_MICRO_BATCHES:
        raise UsageError(
            f"a step of {micro_batches} micro-batches cannot be planned", hint=f"{MOST_MICRO_BATCHES:,} can"
        )
    if len(set(nodes)) != len(nodes):
        twice = next(node for node, count in Counter(nodes).items() if count > 1)
        raise UsageError(f"node {twice} is named twice")
    if len(nodes) < templates.needed:
        return _shortage(templates, len(nodes))
    known = {node: held[node] for node in nodes if held and len(held.get(node, ()))}
    running = any((held or {}).values())
    menu = Menu(templates.by_nodes)
    demand = _demand(templates, len(nodes), micro_batches, running=running)
    seconds, found = fastest(menu, demand)
    composition, placement = _place(templates, menu, nodes, known, demand, seconds * (1 + slack), found)
    chosen = [menu.templates[size] for size, count in composition.items() for _ in range(count)]
    shares = split(micro_batches, chosen)
    names = iter(placement.nodes)
    pipelines = tuple(
        Pipeline(
            template=template,
            nodes=tuple(islice(names, template.nodes)),
            micro_batches=share,
            alone=len(chosen) == 1,
        )
        for template, share in zip(chosen, shares, strict=True)
    )
    kept = {layer for layers in known.values() for layer in layers}
    lost = [layer for layer in range(len(templates.profile.layers)) if running and layer not in kept]
    return PipelinePlan(
        pipelines=pipelines,
        tolerate=templates.tolerate,
        micro_batches=micro_batches,
        moved_bytes=placement.moved_bytes,
        spares=placement.spares,
        lost=tuple(lost),
        reason=_reason(composition, pipelines, placement, lost, templates),
    )


def _shortage(templates: Templates, nodes: int) -> Shortage:
    fewest, needed, tolerate = templates.minimum, templates.needed, templates.tolerate
    if nodes >= fewest:
        hint = f"{needed - nodes} more, or tolerate only {nodes // fewest - 1}, or save and stop"
    elif tolerate:
        hint = f"{fewest - nodes} more to train at all, {needed - nodes} more to survive the loss of {tolerate}"
    else:
        hint = f"{needed - nodes} more"
    left = f"{count(nodes, 'node')} {'is' if nodes == 1 else 'are'} left"
    return Shortage(nodes=nodes, needed=needed, reason=f"{left}, and {what_it_takes(tolerate, fewest)}", hint=hint)


def _demand(templates: Templates, nodes: int, micro_batches: int, *, running: bool) -> Demand:
    """Return the demand for all nodes, or for as many as can be used.

    The model may have too few layers for all, or the step too few micro-batches. The latter is an error before the
    start; a run that is under way leaves nodes over.
    """
    sizes = list(templates.by_nodes)
    for used in range(nodes, templates.needed - 1, -1):
        demand = Demand(nodes=used, fewest=templates.tolerate + 1, micro_batches=micro_batches)
        fewest = fewest_pipelines(demand, sizes)
        if fewest is not None and fewest <= micro_batches:
            return demand
        if fewest is not None and (not running or micro_batches <= templates.tolerate):
            raise UsageError(
                f"{count(micro_batches, 'micro-batch')} cannot be shared by {used} nodes: they form at least "
                f"{count(fewest, 'pipeline')}",
                hint=f"the nearest number that can be shared is {fewest}",
            )
    raise AssertionError("(f+1) pipelines of the smallest size always fit")


def _place(
    templates: Templates,
    menu: Menu,
    nodes: Sequence[NodeName],
    held: Mapping[NodeName, range],
    demand: Demand,
    seconds: float,
    found: Composition,
) -> tuple[Composition, Assignment]:
    """Return the equally fast composition whose places the nodes can fill with the fewest bytes."""
    layers = templates.profile.layers
    if sum(found.values()) == 1:
        candidates = [found]
    else:
        limit = max(TRIES // demand.nodes, 4) if held else 1
        candidates = equals(menu, demand, seconds, _intact(templates, held), limit) or [found]
    tried: list[tuple[Assignment, Composition]] = []
    for each in candidates:
        tried.append((place(_places(templates, each), nodes, held, layers), each))
        if not tried[-1][0].moved_bytes:  # no placement can be better
            break
    best = min(tried, key=lambda pair: pair[0].moved_bytes)
    return best[1], best[0]


def _places(templates: Templates, composition: Composition) -> list[range]:
    return [layers for size, count in composition.items() for layers in templates.by_nodes[size].roles * count]


def _intact(templates: Templates, held: Mapping[NodeName, range]) -> Composition:
    """Return how many whole pipelines of each size the nodes still form."""
    there = Counter(held.values())
    whole = {size: min(there[role] for role in template.roles) for size, template in templates.by_nodes.items()}
    return {size: number for size, number in whole.items() if number}


def _reason(
    composition: Composition,
    pipelines: Sequence[Pipeline],
    placement: Assignment,
    lost: Sequence[int],
    templates: Templates,
) -> str:
    shape = " + ".join(f"{number} of {count(size, 'node')}" for size, number in composition.items())
    slowest = max(pipelines, key=lambda pipeline: pipeline.seconds)
    words = [
        f"{shape}; the pipeline of {slowest.template.nodes} with {count(slowest.micro_batches, 'micro-batch')} is last"
    ]
    if placement.moved_bytes:
        words.append(f"{size_text(placement.moved_bytes)} move")
    if placement.spares:
        words.append(f"{_some(placement.spares)} left over: {_why_spares(templates, composition, pipelines)}")
    if lost:
        words.append(f"nobody holds layers {', '.join(map(str, lost))} any more")
    return "; ".join(words)


def _some(nodes: Sequence[NodeName]) -> str:
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def _why_spares(templates: Templates, composition: Composition, pipelines: Sequence[Pipeline]) -> str:
    if sum(pipeline.micro_batches for pipeline in pipelines) == sum(composition.values()):
        return "the step has no more micro-batches"
    return templates.reason
