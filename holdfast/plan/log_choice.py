"""Choice of the boundaries of a layout that are logged: all useful ones, or the best that fit into a budget.

A lost layer can be computed again from a boundary only if the records of all micro-batches are there. So a boundary
is useful only if every pipeline has it between two of its stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.plan.grouping import choose_groups, longest_interval
from holdfast.plan.layout import Layout, PlacedPipeline
from holdfast.plan.profile import Profile
from holdfast.words import count, size_text


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A weight that several layers share. Where the layers can be lost apart, the gradient of each use is logged."""

    layers: tuple[int, ...]
    bytes: int

    def is_cut(self, boundaries: frozenset[int]) -> bool:
        """Return whether a logged boundary lies between two of the layers.

        >>> Tie(layers=(0, 9), bytes=4).is_cut(frozenset([3])), Tie(layers=(4, 9), bytes=4).is_cut(frozenset([3]))
        (True, False)
        """
        return any(self.layers[0] < boundary <= self.layers[-1] for boundary in boundaries)


@dataclass(frozen=True, kw_only=True)
class LogChoice:
    """The boundaries whose records are kept, and the bytes that this is expected to take."""

    boundaries: frozenset[int]
    reason: str
    bytes_per_step: int = 0  # of all workers together; 0 without a profile
    longest: int | None = None  # steps between checkpoints for which the budget lasts; None: any number


def choose_boundaries(
    layout: Layout,
    *,
    profile: Profile | None,
    micro_batches: int,
    interval: int,
    budget: int | None,
    ties: Sequence[Tie] = (),
) -> LogChoice:
    """Choose the boundaries to log: all useful ones without a budget, else those that recover soonest within it.

    ``budget`` is in bytes of all workers together, for ``interval`` steps from checkpoint to checkpoint of
    ``micro_batches`` each. ``profile`` gives the bytes and seconds of layers; without it the budget is ignored.
    ``ties`` are the weights that layers share.

    >>> from holdfast.plan.layout import PlacedPipeline
    >>> line = PlacedPipeline(ranks=(0, 1, 2), layers=(range(0, 2), range(2, 3), range(3, 6)))
    >>> layout = Layout(pipelines=(line,), size=3, layers=6, tolerate=0, minimum=1, reason="")
    >>> sorted(choose_boundaries(layout, profile=None, micro_batches=8, interval=10, budget=None).boundaries)
    [2, 3]
    """
    cuts = _common_cuts(layout, micro_batches)
    if not cuts:
        return LogChoice(boundaries=frozenset(), reason="no boundary is one between stages in every pipeline")
    if budget is None or profile is None:
        everything = frozenset(cuts)
        size = 0 if profile is None else _crossing(profile, everything, micro_batches, ties)
        reason = f"{count(len(cuts), 'boundary')} logged: there is no {'limit' if budget is None else 'profile'}"
        return LogChoice(boundaries=everything, bytes_per_step=size, reason=reason)
    cuts = _affordable(cuts, ties, budget // interval)
    found = choose_groups(
        recovery_seconds=[
            _seconds(profile, range(first, stop)) * micro_batches
            for first, stop in itertools.pairwise([0, *cuts, layout.layers])
        ],
        boundary_bytes=[_bytes(profile, cut) * micro_batches for cut in cuts],
        bandwidth=profile.between.bandwidth,
        interval=interval,
        budget=budget - interval * _tie_bytes(ties, frozenset(cuts)),
    )
    chosen = frozenset(cuts[number] for number in found.logged)
    size = _crossing(profile, chosen, micro_batches, ties)
    return LogChoice(
        boundaries=chosen,
        bytes_per_step=size,
        longest=longest_interval(bytes_per_step=size, budget=budget),
        reason=f"a budget of {size_text(budget)}: {found.reason}",
    )


def _common_cuts(layout: Layout, micro_batches: int) -> list[int]:
    """Return the boundaries that lie between two stages in every pipeline that has micro-batches."""
    shares = layout.shares(micro_batches)
    cuts = [_cuts(line) for line, share in zip(layout.pipelines, shares, strict=True) if share]
    return sorted(set.intersection(*cuts)) if cuts else []


def _affordable(cuts: Sequence[int], ties: Sequence[Tie], limit: int) -> list[int]:
    """Boundaries whose gradients of shared weights fit together into ``limit`` bytes per step; the dearest go first.

    >>> ties = [Tie(layers=(0, 1), bytes=4), Tie(layers=(2, 3), bytes=30)]
    >>> _affordable([1, 3], ties, 68), _affordable([1, 3], ties, 67)
    ([1, 3], [1])
    """
    left = list(cuts)
    while _tie_bytes(ties, frozenset(left)) > limit:
        left.remove(max(left, key=lambda cut: _tie_bytes(ties, frozenset([cut]))))
    return left


def _cuts(line: PlacedPipeline) -> set[int]:
    return {layers.stop for layers in line.layers[:-1]}


def _seconds(profile: Profile, layers: range) -> float:
    return sum(profile.layers[layer].forward + profile.layers[layer].backward for layer in layers)


def _bytes(profile: Profile, cut: int) -> int:
    """Return the bytes that cross a boundary for one micro-batch, both directions together."""
    layer = profile.layers[cut - 1]
    return layer.output_bytes + layer.output_gradient_bytes


def _tie_bytes(ties: Sequence[Tie], boundaries: frozenset[int]) -> int:
    """Return the bytes per step of the gradients of shared weights that these boundaries cut: one for each use."""
    return sum(tie.bytes * len(tie.layers) for tie in ties if tie.is_cut(boundaries))


def _crossing(profile: Profile, boundaries: frozenset[int], micro_batches: int, ties: Sequence[Tie]) -> int:
    """Return the bytes of all records of a step."""
    return sum(_bytes(profile, cut) for cut in boundaries) * micro_batches + _tie_bytes(ties, boundaries)
