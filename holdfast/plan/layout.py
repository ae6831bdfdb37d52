"""A layout: pipelines, the places of workers in them, and the micro-batches of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from holdfast.plan.batch import shares, split
from holdfast.plan.template import Template

ALONE = "every worker holds all layers"


@dataclass(frozen=True, kw_only=True)
class Role:
    """The place of a worker: one stage of one pipeline, with its layers."""

    pipeline: int
    stage: int
    layers: range


@dataclass(frozen=True, kw_only=True)
class PlacedPipeline:
    """One pipeline of a layout: the rank and the layers of each of its stages."""

    ranks: tuple[int, ...]  # the worker of each stage
    layers: tuple[range, ...]  # the layers of each stage; consecutive, together all layers
    template: Template | None = None  # tells how long a step takes; None: shares go by the number of workers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The pipelines of a generation. Workers without a place in a pipeline hold no layers.

    >>> layout = side_by_side(4, 3)
    >>> layout.role(2), layout.holders(0), layout.shares(8)
    (Role(pipeline=2, stage=0, layers=range(0, 4)), (0, 1, 2), [range(0, 2), range(2, 5), range(5, 8)])
    """

    pipelines: tuple[PlacedPipeline, ...]
    size: int  # members of the generation
    layers: int
    tolerate: int  # simultaneous losses that it survives: as asked for, or fewer when there are too few workers
    minimum: int  # n0: the fewest workers that can hold the model
    reason: str

    def role(self, rank: int) -> Role | None:
        """Return the place of a rank; None if it has none."""
        return self._roles.get(rank)

    def holders(self, layer: int) -> tuple[int, ...]:
        """Return the ranks that hold a layer, ascending."""
        return self._holders[layer]

    @property
    def is_whole(self) -> bool:
        """Whether every worker holds all layers."""
        return len(self.pipelines) == self.size and all(len(line.ranks) == 1 for line in self.pipelines)

    def shares(self, micro_batches: int) -> list[range]:
        """Return each pipeline's micro-batches of a step, as consecutive ranges that cover all. Some may be empty."""
        if micro_batches not in self._shares:
            self._shares[micro_batches] = _shares(self.pipelines, micro_batches)
        return list(self._shares[micro_batches])

    def shares_of_losses(self, micro_batches: int) -> list[range]:
        """Return the micro-batches whose losses each rank computes: those of its pipeline, if it has the last stage.

        >>> side_by_side(4, 2).shares_of_losses(8)
        [range(0, 4), range(4, 8)]
        """
        found = [range(0)] * self.size
        for line, share in zip(self.pipelines, self.shares(micro_batches), strict=True):
            found[line.ranks[-1]] = share
        return found

    @cached_property
    def _roles(self) -> dict[int, Role]:
        return {
            rank: Role(pipeline=number, stage=stage, layers=layers)
            for number, line in enumerate(self.pipelines)
            for stage, (rank, layers) in enumerate(zip(line.ranks, line.layers, strict=True))
        }

    @cached_property
    def _holders(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[] for _ in range(self.layers)]
        for rank, role in sorted(self._roles.items()):
            for layer in role.layers:
                found[layer].append(rank)
        return [tuple(ranks) for ranks in found]

    @cached_property
    def _shares(self) -> dict[int, list[range]]:
        """Cache of ``shares`` by the number of micro-batches: every step asks, with one or two different numbers."""
        return {}


def _shares(lines: tuple[PlacedPipeline, ...], micro_batches: int) -> list[range]:
    templates = [line.template for line in lines if line.template is not None]
    if len(templates) < len(lines):
        return _by_workers(lines, micro_batches)
    # With fewer micro-batches than pipelines, the pipelines that are fastest with one micro-batch get one each.
    order = sorted(range(len(lines)), key=lambda number: (templates[number].seconds(1), number))
    busy = sorted(order[:micro_batches])
    counts = [0] * len(lines)
    if busy:
        for number, count in zip(busy, split(micro_batches, [templates[number] for number in busy]), strict=True):
            counts[number] = count
    ends = [sum(counts[: number + 1]) for number in range(len(lines))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _by_workers(lines: tuple[PlacedPipeline, ...], micro_batches: int) -> list[range]:
    """Share micro-batches in proportion to the number of workers, where speeds are not known."""
    each = shares(micro_batches, sum(len(line.ranks) for line in lines))
    first = list(itertools.accumulate((len(line.ranks) for line in lines), initial=0))
    return [range(each[a].start, each[b - 1].stop) for a, b in itertools.pairwise(first)]


def side_by_side(layers: int, size: int, *, reason: str = "") -> Layout:
    """Return the layout of plain data parallelism: each of ``size`` workers is a pipeline with all layers.

    >>> [line.ranks for line in side_by_side(10, 3).pipelines]
    [(0,), (1,), (2,)]
    """
    return Layout(
        pipelines=tuple(PlacedPipeline(ranks=(rank,), layers=(range(layers),)) for rank in range(size)),
        size=size,
        layers=layers,
        tolerate=size - 1,
        minimum=1,
        reason=reason or ALONE,
    )
