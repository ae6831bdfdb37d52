"""What comes after a plan: every kind of loss, fewer and fewer nodes, one more node."""

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

LISTED = 20_000  # ways to hit a pipeline; of more only some are looked at
SIZES = 8  # numbers of nodes that are looked at on the way down to the minimum
Shape = tuple[int, int]  # pipelines of one shape are alike: nodes, micro-batches
SPARE: Shape = (0, 0)  # nodes without a pipeline


@dataclass(frozen=True, order=True)
class Hit:
    """A pipeline of ``nodes`` nodes that loses those at ``positions``; no nodes stand for a spare one."""

    nodes: int
    micro_batches: int
    positions: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return self.nodes, self.micro_batches


Hits = tuple[Hit, ...]


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """Losses that differ only in which of several equal pipelines they hit, and what is done after any of them."""

    hits: Hits
    alike: int  # sets of nodes whose loss is this case
    lost: tuple[NodeName, ...]  # one of them
    after: PipelinePlan | Shortage

    @property
    def badness(self) -> tuple[int, float, int]:
        """Stopping is worse than losing layers, that is worse than slow steps, those are worse than moving bytes."""
        if isinstance(self.after, Shortage):
            return 2, inf, 0
        return int(bool(self.after.lost)), self.after.seconds, self.after.moved_bytes


@dataclass(frozen=True, kw_only=True)
class LossesAtOnce:
    """So many nodes lost at once: the cases, the worst first."""

    count: int
    cases: tuple[LossCase, ...]
    complete: bool  # else there are more cases than were looked at

    @property
    def worst(self) -> LossCase:
        return self.cases[0]


@dataclass(frozen=True, kw_only=True)
class Fewer:
    """So many nodes are left, after one more was lost; ``after`` is what is done after the worst such loss."""

    nodes: int
    after: PipelinePlan | Shortage
    complete: bool  # else some losses were not looked at


@dataclass(frozen=True, kw_only=True)
class Outlook:
    losses: tuple[LossesAtOnce, ...]  # of 1, 2, ... nodes at once, as many as are tolerated
    fewer: tuple[Fewer, ...]  # and with fewer nodes; the last one stops the training
    join: PipelinePlan | Shortage  # one node more


def look_ahead(templates: Templates, plan: PipelinePlan, *, slack: float = 0.0) -> Outlook:
    """What happens after each kind of loss up to ``tolerate`` at once, then down to the minimum, and after a join.

    ``slack`` is that of ``make_plan``.
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
    """All nodes of a plan, in the order of their names."""
    return sorted(
        [*(node for pipeline in plan.pipelines for node in pipeline.nodes), *plan.spares],
        key=lambda node: (natural(node), node),
    )


def cases_looked_at(nodes: int) -> int:
    """Of one number of losses: a plan for many nodes takes longer to make, and its cases are more alike.

    >>> cases_looked_at(24), cases_looked_at(1000)
    (250, 12)
    """
    return max(12, 6000 // max(nodes, 24))


def sizes_down(templates: Templates, nodes: int) -> list[int]:
    """Numbers of nodes from those left after the tolerated losses to one too few, not more than ``SIZES``."""
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
    """Each case of losing ``count`` nodes at once; if there are more than ``most``, the nastiest and some others."""
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
    """The nodes of pipelines that are alike, together; spare nodes each for itself."""
    groups: Groups = {}
    for pipeline in plan.pipelines:
        groups.setdefault((len(pipeline.nodes), pipeline.micro_batches), []).append(pipeline.nodes)
    return groups | ({SPARE: [(node,) for node in plan.spares]} if plan.spares else {})


def _few_hits(groups: Groups, count: int) -> bool:
    """Can the ways to hit one pipeline be listed at all?"""
    sizes = [len(first) for first, *_ in groups.values()]
    return sum(comb(size, number) for size in sizes for number in range(1, min(size, count) + 1)) <= LISTED


def _all_hits(groups: Groups, count: int) -> Iterator[Hits]:
    """Every way to lose ``count`` nodes, those that hit equal pipelines alike only once."""
    hits = [
        Hit(*shape, positions)
        for shape, (first, *_) in groups.items()
        for number in range(1, min(len(first), count) + 1)
        for positions in combinations(range(len(first)), number)
    ]

    def choose(start: int, missing: int, room: Counter[Shape]) -> Iterator[Hits]:
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
    """Neighbours in one pipeline, one position in several pipelines, and then any nodes."""
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
    """Which positions of which kinds of pipelines these nodes are."""
    hits = []
    for shape, group in groups.items():
        for pipeline in group:
            positions = tuple(number for number, node in enumerate(pipeline) if node in lost)
            hits += [Hit(*shape, positions)] if positions else []
    return tuple(sorted(hits))


def example(groups: Groups, hits: Hits) -> tuple[NodeName, ...]:
    """Nodes whose loss is this one: equal pipelines are taken in their order."""
    free = {shape: iter(group) for shape, group in groups.items()}
    chosen = [(next(free[hit.shape]), hit) for hit in hits]
    return tuple(pipeline[position] for pipeline, hit in chosen for position in hit.positions)


def ways(groups: Groups, hits: Hits) -> int:
    """How many sets of nodes are this case: over all cases they add up to all sets of so many nodes."""
    number = 1
    for shape, group in groups.items():
        same = Counter(hit for hit in hits if hit.shape == shape)
        number *= comb(len(group), same.total()) * factorial(same.total()) // prod(map(factorial, same.values()))
    return number
