"""Choice of the layout of a generation: which workers form which pipelines, and which layers each holds.

Every worker computes the layout by itself, from what all workers know; no message is needed. To the planner a worker
is a node with one device and one stage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.plan.fixed_stages import CutPoints, best_merge, fewest_workers, fixed_cut
from holdfast.plan.hosts import spread
from holdfast.plan.layout import ALONE, Layout, PlacedPipeline
from holdfast.plan.pipeline_counts import Demand, fewest_pipelines
from holdfast.plan.place import place
from holdfast.plan.planner import PipelinePlan, Shortage, make_plan
from holdfast.plan.profile import LayerCost, Profile
from holdfast.plan.template import Template, Templates
from holdfast.plan.template_stock import Stock, stock_of
from holdfast.words import count

SLACK = 0.02  # relative: a step may be 2% longer if fewer bytes have to be sent for it


def lay_out(
    *,
    layers: int,
    workers: Sequence[str],
    held: Mapping[str, Collection[int]],
    leaving: Collection[str],
    micro_batches: int,
    tolerate: int,
    stages: int | Sequence[int] | None,
    profile: Profile | None,
    hosts: Mapping[str, str],
    sizes: Sequence[int] | None = None,
) -> Layout | Shortage:
    """Return the layout of a generation of ``workers`` (names in the order of ranks), or a Shortage with its reason.

    With ``stages`` (their number, or the number of layers of each) all pipelines are alike. Without it the planner
    forms the fastest pipelines by ``profile``; without a profile too, every worker holds all ``layers``. ``held`` are
    the layers that workers have now: of equally good layouts it takes the one that moves the fewest bytes (``sizes``
    are the bytes of each layer, used where there is no profile). Workers that are ``leaving`` get no place unless the
    others are too few. ``tolerate`` is the number of simultaneous losses to survive; ``hosts`` gives the host of each
    worker, for layers to have copies on several. Raises UsageError if the profile or ``stages`` do not fit the model.

    >>> layout = lay_out(layers=10, workers=["a", "b", "c", "d", "e"], held={}, leaving=(), micro_batches=8,
    ...                  tolerate=1, stages=2, profile=None, hosts={})
    >>> [line.ranks for line in layout.pipelines], layout.pipelines[0].layers
    ([(0, 1), (2, 3)], (range(0, 5), range(5, 10)))
    >>> layout.reason
    '2 pipelines of 2 workers; 1 worker left over: a pipeline takes 2'
    """
    fixed = _fixed(layers, stages, profile)
    minimum = fewest_workers(fixed, profile) if fixed else _stock(profile).minimum
    sizes = [layer.state_bytes for layer in profile.layers] if profile else sizes or [1] * layers
    crew = _crew(workers, held, leaving, minimum, sizes)
    if len(crew) < minimum:
        return _shortage(len(workers), minimum)
    job = _Job(
        micro_batches=micro_batches,
        tolerate=tolerate,
        profile=profile,
        sizes=sizes,
        crew=crew,
        held={worker: _longest_run(held.get(worker, ())) for worker in crew},
        ranks={worker: rank for rank, worker in enumerate(workers)},
    )
    lines, words = _alike(job, fixed) if fixed else _planned(job)
    layout = Layout(
        pipelines=lines,
        size=len(workers),
        layers=layers,
        tolerate=min(tolerate, len(lines) - 1),
        minimum=minimum,
        reason="; ".join([*words, *_concessions(job, len(lines), leaving)]),
    )
    homes = [hosts.get(worker, "") for worker in workers]
    if len(set(homes)) == 1:
        return layout
    barred = [rank for rank, worker in enumerate(workers) if worker not in crew]
    there = [held.get(worker, ()) for worker in workers]
    return spread(layout, hosts=homes, held=there, sizes=sizes, barred=barred)


def _fixed(layers: int, stages: int | Sequence[int] | None, profile: Profile | None) -> CutPoints | None:
    """Return the cut that all pipelines have; None if the planner may choose."""
    if profile is not None and len(profile.layers) != layers:
        raise UsageError(
            f"the profile has {count(len(profile.layers), 'layer')}, the model {layers}",
            hint="make a new one: holdfast profile",
        )
    if stages is not None:
        return fixed_cut(layers, stages, profile)
    return (0, layers) if profile is None or layers == 1 else None


def _stock(profile: Profile | None) -> Stock:
    assert profile is not None, "without a profile the stages are fixed"
    return stock_of(profile)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Input of a layout, with the workers to use."""

    micro_batches: int
    tolerate: int
    profile: Profile | None
    sizes: Sequence[int]
    crew: list[str]  # the workers to use, in the order of ranks
    held: dict[str, range]
    ranks: dict[str, int]


def _crew(
    workers: Sequence[str],
    held: Mapping[str, Collection[int]],
    leaving: Collection[str],
    minimum: int,
    sizes: Sequence[int],
) -> list[str]:
    """Return the workers to use: all that stay and, if those are too few to train, leaving ones that hold the most."""
    staying = [worker for worker in workers if worker not in leaving]
    others = [worker for worker in workers if worker in leaving]
    others.sort(key=lambda worker: -sum(sizes[layer] for layer in held.get(worker, ())))
    chosen = {*staying, *others[: max(minimum - len(staying), 0)]}
    return [worker for worker in workers if worker in chosen]


def _shortage(workers: int, minimum: int) -> Shortage:
    there = f"there {'is' if workers == 1 else 'are'} {count(workers, 'worker')}"
    return Shortage(
        nodes=workers,
        needed=minimum,
        reason=f"{there}, and the model takes the memory of at least {minimum}",
        hint=f"{minimum - workers} more, or more memory",
    )


def _longest_run(layers: Collection[int]) -> range:
    """The planner knows ranges only; a copy that broke off may have left holes.

    >>> _longest_run({0, 1, 4, 5, 6, 9})
    range(4, 7)
    """
    best = range(0)
    for _, pairs in itertools.groupby(enumerate(sorted(set(layers))), key=lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in pairs]
        best = max(best, range(run[0], run[-1] + 1), key=len)
    return best


def _alike(job: _Job, fixed: CutPoints) -> tuple[tuple[PlacedPipeline, ...], list[str]]:
    """Return pipelines of the same stages, as many as there are workers for, and sentences about them.

    Workers that are left over wait. But if there are too few copies of the layers to survive the losses, they form
    one more pipeline with merged stages.
    """
    cut = best_merge(fixed, len(job.crew), job.profile)
    assert cut is not None, "there are enough workers"
    roles, number = _roles(cut), len(job.crew) // (len(cut) - 1)
    over = len(job.crew) % len(roles)
    short = best_merge(fixed, over, job.profile) if over and number <= job.tolerate else None
    rest = () if short is None else _roles(short)
    placed = place(roles * number + rest, job.crew, job.held, [_layer(size) for size in job.sizes])
    ranks = [job.ranks[worker] for worker in placed.nodes]
    groups = sorted(tuple(ranks[first : first + len(roles)]) for first in range(0, number * len(roles), len(roles)))
    template = None if rest else _template(job, fixed, cut)
    lines = [PlacedPipeline(ranks=group, layers=roles, template=template) for group in groups]
    if rest:
        lines.append(PlacedPipeline(ranks=tuple(ranks[number * len(roles) :]), layers=rest))
    return tuple(lines), _words_of(fixed, roles, rest, number, len(placed.spares))


def _roles(cut: CutPoints) -> tuple[range, ...]:
    return tuple(range(first, stop) for first, stop in itertools.pairwise(cut))


def _template(job: _Job, fixed: CutPoints, cut: CutPoints) -> Template | None:
    """Return the template with this cut, which knows how long a step takes; None if there is none."""
    if job.profile is None or cut != fixed or len(cut) <= 2:
        return None
    template = stock_of(job.profile).template(len(cut) - 1)
    return template if template is not None and template.roles == _roles(cut) else None


def _words_of(
    fixed: CutPoints, roles: tuple[range, ...], rest: tuple[range, ...], number: int, spares: int
) -> list[str]:
    if len(roles) == len(fixed) - 1 == 1:
        return [ALONE]
    words = [f"{count(number, 'pipeline')} of {count(len(roles), 'worker')}"]
    if len(roles) < len(fixed) - 1:
        words.append(f"{count(len(fixed) - 1, 'stage')} merged into {len(roles)}: there are no more workers")
    if rest:
        words.append(f"{count(len(rest), 'worker')} left over with stages merged: for a copy of every layer")
    if spares:
        words.append(f"{count(spares, 'worker')} left over: a pipeline takes {len(roles)}")
    return words


def _layer(size: int) -> LayerCost:
    nothing = {"output_bytes": 0, "output_gradient_bytes": 0, "trainable_bytes": 0, "slot_bytes": 0, "saved_bytes": 0}
    return LayerCost(name="", forward=0.0, backward=0.0, weight_bytes=size, **nothing)


def _planned(job: _Job) -> tuple[tuple[PlacedPipeline, ...], list[str]]:
    """Return the pipelines that the planner finds, and sentences about them."""
    stock = _stock(job.profile)
    survived = min(job.tolerate, len(job.crew) // stock.minimum - 1)
    templates = stock.templates(len(job.crew), tolerate=survived)
    # With fewer micro-batches than pipelines, some pipelines compute nothing. Their copies still protect the layers.
    shared = max(job.micro_batches, survived + 1)
    workers = job.crew if any(job.held.values()) else job.crew[: _usable(templates, len(job.crew), shared)]
    plan = make_plan(templates, workers, micro_batches=shared, held=job.held, slack=SLACK)
    assert isinstance(plan, PipelinePlan), "there are enough workers"
    lines = tuple(
        PlacedPipeline(
            ranks=tuple(job.ranks[worker] for worker in pipeline.nodes),
            layers=pipeline.template.roles,
            template=pipeline.template,
        )
        for pipeline in plan.pipelines
    )
    shape = Counter(len(line.ranks) for line in lines)
    words = [" + ".join(f"{count(number, 'pipeline')} of {count(size, 'worker')}" for size, number in shape.items())]
    over = len(job.crew) - sum(len(line.ranks) for line in lines)
    if over:
        why = "the step has no more micro-batches" if len(lines) >= job.micro_batches else templates.reason
        words.append(f"{count(over, 'worker')} left over: {why}")
    return lines, words


def _usable(templates: Templates, workers: int, micro_batches: int) -> int:
    """Return the most workers whose pipelines get a micro-batch each. At a fresh start the planner refuses more."""
    for used in range(workers, templates.needed, -1):
        demand = Demand(nodes=used, fewest=templates.tolerate + 1, micro_batches=micro_batches)
        fewest = fewest_pipelines(demand, list(templates.by_nodes))
        if fewest is not None and fewest <= micro_batches:
            return used
    return templates.needed


def _concessions(job: _Job, lines: int, leaving: Collection[str]) -> list[str]:
    """Return a sentence for each wish that the layout does not fulfil."""
    words = []
    asked = [worker for worker in job.crew if worker in leaving]
    if asked:
        words.append(f"{', '.join(asked)} cannot leave yet: the others are too few to hold the model")
    if lines - 1 < job.tolerate:
        words.append(f"survives the loss of {lines - 1}, not {job.tolerate}: more workers would")
    if job.micro_batches < lines:
        words.append(f"{count(lines - job.micro_batches, 'pipeline')} without a micro-batch")
    return words
