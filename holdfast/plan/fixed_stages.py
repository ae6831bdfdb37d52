"""Stages that the user has fixed: where the layers are cut, and how stages are merged when workers are too few."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from holdfast.errors import UsageError
from holdfast.plan.pipeline_sizes import PER_DEVICE
from holdfast.plan.profile import Profile
from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.template_stock import stock_of
from holdfast.words import count, size_text

CutPoints = tuple[int, ...]  # the first layer of each stage, then the number of layers


def fixed_cut(layers: int, stages: int | Sequence[int], profile: Profile | None) -> CutPoints:
    """Return where to cut ``layers`` layers into stages.

    ``stages`` is their number, or a list with the number of layers of each. A number is cut for the fastest pipeline
    if there is a profile, else into equal numbers of layers. Raises UsageError if the layers cannot be cut like that
    or a stage does not fit into a worker's memory.

    >>> fixed_cut(10, 3, None), fixed_cut(10, [3, 3, 4], None)
    ((0, 3, 6, 10), (0, 3, 6, 10))
    >>> fixed_cut(10, [3, 3], None)
    Traceback (most recent call last):
    holdfast.errors.UsageError: stages of 3 and 3 layers are 6 in all, the model has 10 (for example stages=[5, 5])
    """
    if not isinstance(stages, int):
        return _of_counts(layers, list(stages), profile)
    if not 1 <= stages <= layers:
        hint = (
            f"1 to {layers}: a stage has a layer"
            if layers > 1
            else "pass a list of layers, or holdfast.layers_of(model)"
        )
        raise UsageError(f"stages={stages}, and the model has {count(layers, 'layer')}", hint=hint)
    if profile is None:
        return tuple(stage * layers // stages for stage in range(stages + 1))
    stock = stock_of(profile)
    template = stock.template(stages)
    if template is None:
        raise UsageError(
            f"a pipeline of {count(stages, 'stage')} does not fit into {_memory(profile)}",
            hint=f"the fewest that do are {stock.minimum}; or leave stages to the planner",
        )
    return (0, *(role.stop for role in template.roles))


def _of_counts(layers: int, counts: list[int], profile: Profile | None) -> CutPoints:
    if not counts or not all(isinstance(number, int) and number >= 1 for number in counts):
        raise UsageError(f"stages={counts}", hint="the number of stages, or the number of layers of each, at least 1")
    if sum(counts) != layers:
        number = min(len(counts), layers)
        ends = [stage * layers // number for stage in range(number + 1)]
        example = [stop - first for first, stop in itertools.pairwise(ends)]
        listed = " and ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))
        raise UsageError(
            f"stages of {listed} layers are {sum(counts)} in all, the model has {layers}",
            hint=f"for example stages={example}",
        )
    bounds = (0, *itertools.accumulate(counts))
    if not _fits(bounds, profile):
        assert profile is not None
        raise UsageError(
            f"stages of {', '.join(map(str, counts))} layers do not fit into {_memory(profile)}",
            hint="more of them, or leave stages to the planner",
        )
    return bounds


def _memory(profile: Profile) -> str:
    return f"workers with {size_text(profile.memory or 0)} of memory"


def _fits(bounds: CutPoints, profile: Profile | None) -> bool:
    """Return whether every stage fits into the memory of its worker."""
    if profile is None or profile.memory is None:
        return True
    costs, chain = stock_of(profile).costs, _chain(len(bounds) - 1)
    needs = [costs.memory(chain, stage, *span) for stage, span in enumerate(itertools.pairwise(bounds))]
    return max(needs) <= profile.memory


def _chain(stages: int) -> Chain:
    return Chain(stages=stages, per_node=1, lanes=1, micro_batches=PER_DEVICE * stages)


def merged(bounds: CutPoints, stages: int, profile: Profile | None) -> CutPoints | None:
    """Merge neighbouring stages until ``stages`` are left, so that the longest one is as short as possible.

    Returns None if no such cut fits into the workers' memory.

    >>> merged((0, 1, 2, 3, 10), 2, None)
    (0, 3, 10)
    """
    if stages >= len(bounds) - 1:
        return bounds
    costs = None if profile is None else stock_of(profile).costs
    best: dict[int, tuple[float, CutPoints]] = {0: (0.0, (0,))}  # by the end of the stages so far: the longest, the cut
    for stage in range(stages):
        ends = bounds[stage + 1 :] if stage + 1 < stages else bounds[-1:]
        tried = {
            stop: [
                (max(longest, weight), (*cut, stop))
                for first, (longest, cut) in best.items()
                if first < stop and (weight := _weight(costs, stages, stage, first, stop)) is not None
            ]
            for stop in ends
        }
        best = {stop: min(options) for stop, options in tried.items() if options}
    return best[bounds[-1]][1] if best else None


def _weight(costs: StageCosts | None, stages: int, stage: int, first: int, stop: int) -> float | None:
    """Return the seconds (without a profile: the number) of layers [first, stop); None if they do not fit."""
    if costs is None:
        return stop - first
    memory = costs.profile.memory
    if memory is not None and costs.memory(_chain(stages), stage, first, stop) > memory:
        return None
    both = costs.forward + costs.backward
    return float(both[stop] - both[first])


def best_merge(bounds: CutPoints, workers: int, profile: Profile | None) -> CutPoints | None:
    """Merge as few stages as so many workers allow. Returns None if the workers cannot hold the model at all."""
    options = (merged(bounds, stages, profile) for stages in range(min(workers, len(bounds) - 1), 0, -1))
    return next((cut for cut in options if cut is not None), None)


def fewest_workers(bounds: CutPoints, profile: Profile | None) -> int:
    """Return the fewest workers that can hold these stages, merged as far as that takes."""
    return next(stages for stages in range(1, len(bounds)) if merged(bounds, stages, profile) is not None)
