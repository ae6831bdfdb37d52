"""Plans after the next changes: after every kind of loss, with fewer and fewer nodes, and with one more node."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb, factorial, inf, prod

from holdfast.plan.place import natural
from holdfast.plan.planner import NodeName, PipelinePlan, Shortage, make_plan
from holdfast.plan.template import Templates

LISTED = 20_000  # sets of positions to lose in one pipeline that are listed; of more only some are looked at
SIZES = 8  # rows of the table "with fewer nodes", from the tolerated losses down to the minimum
Shape = tuple[int, int]  # nodes and micro-batches of a pipeline; pipelines of one shape are interchangeable
SPARE: Shape = (0, 0)  # stands for a node without a pipeline


@dataclass(frozen=True, order=True)
class Hit:
    """A pipeline of ``nodes`` nodes that loses the nodes at ``positions``; ``nodes=0`` is a spare node."""

    nodes: int
    micro_batches: int
    positions: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the pipeline that is hit."""
        return self.nodes, self.micro_batches


Hits = tuple[Hit, ...]


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """A kind of loss, and the plan after it. Losses that hit interchangeable pipelines are of one kind."""

    hits: Hits
    alike: int  # number of sets of nodes whose loss is of this kind
    lost: tuple[NodeName, ...]  # one of these sets
    after: PipelinePlan | Shortage

    @property
    def badness(self) -> tuple[int, float, int]:
        """Sort key: stopping is worst, then losing layers, then the seconds of a step, then the bytes moved."""
        if isinstance(self.after, Shortage):
            return 2, inf, 0
        return int(bool(self.after.lost)), self.after.seconds, self.after.moved_bytes


@dataclass(frozen=True, kw_only=True)
class LossesAtOnce:
    """The kinds of losing ``count`` nodes at once, the worst first."""

    count: int
    cases: tuple[LossCase, ...]
    complete: bool  # False: there are more kinds than were looked at

    @property
    def worst(self) -> LossCase:
        """The kind of loss after which the plan is worst."""
        return self.cases[0]


@dataclass(frozen=True, kw_only=True)
class Fewer:
    """The plan with ``nodes`` nodes left, after the worst single loss from a plan for one node more."""

    nodes: int
    after: PipelinePlan | Shortage
    complete: bool  # False: some losses were not looked at


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Plans after losses, with fewer nodes, and after a join."""

    losses: tuple[LossesAtOnce, ...]  # of 1, 2, ... nodes at once, as many as are tolerated
    fewer: tuple[Fewer, ...]  # fewer and fewer nodes; the last entry is a Shortage
    join: PipelinePlan | Shortage  # one node more


def look_ahead(templates: Templates, plan: PipelinePlan, *, slack: float = 0.0) -> Outlook:
    """Plan for each kind of loss of up to ``tolerate`` nodes, for fewer nodes down to the minimum, and for a join.

    ``plan`` is the present plan, made from ``templates``; ``slack`` is that of ``make_plan``.
    """
    nodes = names(plan)
    most = cases_looked_at(len(nodes))
    losses = [after_losses(templates, plan, count, most=most, slack=slack) for count in range(1, plan.tolerate + 1)]
    joined = make_plan(templates, [*nodes, "new"], micro_batches=plan.micro_batches, held=plan.held(), slack=slack)
    return Outlook(
        losses=tuple(one for one in losses if one.cases),
        fewer=tuple(
            _fewer(templates, plan, left, most=max(2, most // 6), slack=slack)
            for left in sizes_down(templates, len(nodes))
        ),
        join=joined,
    )


def names(plan: PipelinePlan) -> list[NodeName]:
    """Return all nodes of a plan, sorted by name."""
    return sorted(
        [*(node for pipeline in plan.pipelines for node in pipeline.nodes), *plan.spares],
        key=lambda node: (natural(node), node),
    )


def cases_looked_at(nodes: int) -> int:
    """Return how many kinds of a number of losses are planned: fewer for many nodes, whose plans take longer.

    >>> cases_looked_at(24), cases_looked_at(1000)
    (250, 12)
    """
    return max(12, 6000 // max(nodes, 24))


def sizes_down(templates: Templates, nodes: int) -> list[int]:
    """Return at most ``SIZES`` numbers of nodes, from one below the tolerated losses to one too few to train."""
    highest, lowest = nodes - templates.tolerate - 1, (templates.tolerate + 1) * templates.minimum - 1
    if highest < lowest:
        return []
    steps = min(SIZES - 1, highest - lowest)
    return sorted({highest - (highest - lowest) * step // max(steps, 1) for step in range(steps + 1)}, reverse=True)


def _fewer(templates: Templates, plan: PipelinePlan, left: int, *, most: int, slack: float) -> Fewer:
    before = make_plan(templates, names(plan)[: left + 1], micro_batches=plan.micro_batches)
    if isinstance(before, Shortage):
        return Fewer(nodes=left, after=before, complete=True)
    losses = after_losses(templates, before, 1, most=most, slack=slack)
    return Fewer(nodes=left, after=losses.worst.after, complete=losses.complete)


def after_losses(
    templates: Templates, plan: PipelinePlan, count: int, *, most: int, slack: float = 0.0
) -> LossesAtOnce:
    """Plan for each kind of losing ``count`` nodes at once; if there are more than ``most`` kinds, for some of them."""
    groups = groups_of(plan)
    found = list(islice(_all_hits(groups, count), most + 1)) if _few_hits(groups, count) else []
    complete = 0 < len(found) <= most
    if not complete:
        found = _some_hits(names(plan), groups, count, most)
    held, nodes = plan.held(), names(plan)
    cases = []
    for hits in found:
        lost = example(groups, hits)
        left = [node for node in nodes if node not in lost]
        after = make_plan(templates, left, micro_batches=plan.micro_batches, held=held, slack=slack)
        cases.append(LossCase(hits=hits, alike=ways(groups, hits), lost=lost, after=after))
    return LossesAtOnce(
        count=count, cases=tuple(sorted(cases, key=lambda c: c.badness, reverse=True)), complete=complete
    )


# --- which losses there are -----------------------------------------------------------------------

Groups = dict[Shape, list[tuple[NodeName, ...]]]


def groups_of(plan: PipelinePlan) -> Groups:
    """Return the nodes of each pipeline, by the pipeline's shape; a spare node counts as a pipeline of its own."""
    groups: Groups = {}
    for pipeline in plan.pipelines:
        groups.setdefault((len(pipeline.nodes), pipeline.micro_batches), []).append(pipeline.nodes)
    return groups | ({SPARE: [(node,) for node in plan.spares]} if plan.spares else {})


def _few_hits(groups: Groups, count: int) -> bool:
    """Return whether the ways to lose nodes of one pipeline are few enough to be listed."""
    sizes = [len(first) for first, *_ in groups.values()]
    return sum(comb(size, number) for size in sizes for number in range(1, min(size, count) + 1)) <= LISTED


def _all_hits(groups: Groups, count: int) -> Iterator[Hits]:
    """Yield every kind of losing ``count`` nodes once."""
    hits = [
        Hit(*shape, positions)
        for shape, (first, *_) in groups.items()
        for number in range(1, min(len(first), count) + 1)
        for positions in combinations(range(len(first)), number)
    ]

    def choose(start: int, missing: int, room: Counter[Shape]) -> Iterator[Hits]:
        """Choose hits from number ``start`` on that lose ``missing`` nodes; ``room`` are the pipelines not yet hit."""
        if missing == 0:
            yield ()
        for number in range(start, len(hits)):
            hit = hits[number]
            if len(hit.positions) <= missing and room[hit.shape] > 0:
                less = room - Counter([hit.shape])
                for others in choose(number, missing - len(hit.positions), less):
                    yield (hit, *others)

    return choose(0, count, Counter({shape: len(group) for shape, group in groups.items()}))


def _some_hits(everyone: Sequence[NodeName], groups: Groups, count: int, most: int) -> list[Hits]:
    """Return some kinds of loss: neighbours in one pipeline, one position in several pipelines, then random nodes."""
    nasty: list[Sequence[NodeName]] = []
    for group in groups.values():
        nodes = len(group[0])
        for first in sorted({0, nodes // 2, max(nodes - count, 0)}):
            nasty.append([node for pipeline in group for node in pipeline[first:]][:count])
            nasty.append([pipeline[first] for pipeline in group][:count])
    draw = random.Random(count)
    found: dict[Hits, None] = {}
    for number in range(len(nasty) + 4 * most):
        lost = nasty[number] if number < len(nasty) else draw.sample(everyone, count)
        if len(lost) == count:
            found.setdefault(hits_of(groups, set(lost)))
    return list(found)[:most]


def hits_of(groups: Groups, lost: Collection[NodeName]) -> Hits:
    """Return the kind of loss that losing these nodes is."""
    hits = []
    for shape, group in groups.items():
        for pipeline in group:
            positions = tuple(number for number, node in enumerate(pipeline) if node in lost)
            hits += [Hit(*shape, positions)] if positions else []
    return tuple(sorted(hits))


def example(groups: Groups, hits: Hits) -> tuple[NodeName, ...]:
    """Return nodes whose loss is of this kind: of equal pipelines, the first ones."""
    free = {shape: iter(group) for shape, group in groups.items()}
    chosen = [(next(free[hit.shape]), hit) for hit in hits]
    return tuple(pipeline[position] for pipeline, hit in chosen for position in hit.positions)


def ways(groups: Groups, hits: Hits) -> int:
    """Return the number of sets of nodes whose loss is of this kind."""
    number = 1
    for shape, group in groups.items():
        same = Counter(hit for hit in hits if hit.shape == shape)
        number *= comb(len(group), same.total()) * factorial(same.total()) // prod(map(factorial, same.values()))
    return number
