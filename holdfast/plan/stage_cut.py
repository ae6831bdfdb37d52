"""Choice of where to cut layers into stages: the cut with the shortest step, by branch and bound.

Lower bound of a step. Let stage i be the slowest, w the seconds that a micro-batch occupies it, N the number of
micro-batches. The stage works N·w, beginning when the first micro-batch has come through the stages before it. While
the pipeline fills and drains, it may also wait for one round trip through the stages behind, less the work it can do
meanwhile. After its last backward, the stages before it still have to do theirs. Each stage then sums its gradients
with other pipelines and updates. The largest such sum over all stages is a lower bound of the exact step, and mostly
equal to it.

The bound of a stage depends on its layers, its place and on what lies behind it, so dynamic programming from the last
stage gives a bound for every suffix of stages. Best-first search completes cuts in the order of their bounds and times
each by the exact recurrence. When no bound is left below the best time, that cut is proven to be optimal. For large
models this may take too long; then the search stops earlier, and ``StageCut.least`` tells how far off it may be.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.timeline import Vector, last_ends

EFFORT = 6_000  # vector operations per template; enough to prove the optimum for 10 layers in every test
EXPANSION = 6  # vector operations that extending a cut by one stage takes, about
SWEEPS = 3  # rounds over all boundaries when an unfinished search is polished
TINY = 1e-12  # relative: times that differ by less differ only by rounding


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """A cut into stages: stage i has the layers [bounds[i], bounds[i+1]). No cut is faster than ``least`` seconds."""

    bounds: tuple[int, ...]
    seconds: float
    least: float
    effort: int = 0  # vector operations that finding it took


class LowerBounds:
    """Lower bounds in seconds for every suffix of stages, as arrays [first stage of the suffix, its first layer].

    ``done`` bounds the end of the first stage's last backward; ``step`` the end of the step for all its stages, with
    gradient sums and updates; ``round_trip`` is the way of one micro-batch to the last stage and back. ``done`` and
    ``step`` leave out the forward sends over earlier boundaries: users of the arrays add them.
    """

    def __init__(self, costs: StageCosts, chain: Chain) -> None:
        self.costs = costs
        self.chain = chain
        stages, size = chain.stages, costs.count + 1
        nothing = np.zeros((2, size))  # is sent behind the last stage
        self.sends = np.array([*(costs.sends(chain, stage) for stage in range(stages)), nothing])
        self.done, self.step, self.round_trip = np.full((3, stages + 1, size), np.inf)
        self.done[stages, costs.count] = -np.inf
        self.step[stages, costs.count] = self.round_trip[stages, costs.count] = 0.0
        spare = costs.count - stages
        layers = np.arange(1, self._most_layers() + 1)
        for stage in reversed(range(stages)):
            # Each stage before and behind needs a layer too.
            first = np.arange(stage, stage + spare + 1)[:, None] if stage else np.array([[0]])
            stop = np.minimum(first + layers, stage + spare + 1)
            part = self.stage(stage, first, stop)
            self.done[stage, first[:, 0]] = part.done.min(axis=1)
            rest = self.step[stage + 1, stop] + self.sends[stage, 0, first]
            self.step[stage, first[:, 0]] = np.maximum(part.done + part.after, rest).min(axis=1)
            self.round_trip[stage, first[:, 0]] = part.round_trip.min(axis=1)

    def _most_layers(self) -> int:
        """Return a number of layers that no stage of the best cut exceeds.

        More would not fit into memory, or one stage alone would take longer than a whole step with an even cut.
        """
        costs, chain = self.costs, self.chain
        most = costs.count
        if costs.profile.memory is not None:
            most = _furthest(costs.resident + costs.saved, costs.profile.memory)
        sums = costs.forward + costs.backward
        even = np.searchsorted(sums, sums[-1] * np.arange(chain.stages + 1) / chain.stages)
        place = np.arange(chain.stages + 1)
        cut = np.minimum(np.maximum.accumulate(even - place) + place, costs.count - chain.stages + place)
        even_cut = tuple(cut.tolist())
        if not self.holds(even_cut):
            return most
        return min(most, _furthest(sums, _timed(self, even_cut).seconds / chain.micro_batches * (1 + TINY)))

    @property
    def least(self) -> float:
        """Seconds that no cut can beat; infinite if none fits into memory."""
        return float(self.step[0, 0])

    def stage(self, stage: int, first: Vector, stop: Vector) -> _StageBound:
        """Return the bounds for layers [first, stop) as this stage, with the best suffix behind.

        Bounds are infinite where the layers do not fit into memory.
        """
        costs, chain = self.costs, self.chain
        send = self.sends[stage, 0, first]
        forward = costs.forward[stop] - costs.forward[first] + self.sends[stage + 1, 0, stop]
        backward = costs.backward[stop] - costs.backward[first] + self.sends[stage, 1, first]
        behind = self.round_trip[stage + 1, stop]
        hidden = chain.stages - stage - 1
        filling = np.maximum(behind - hidden * forward, 0.0)
        draining = np.maximum(behind - hidden * backward, 0.0)
        own = costs.forward[first] + send + chain.micro_batches * (forward + backward) + filling + draining
        done = np.maximum(own, self.done[stage + 1, stop] + send + backward)
        misfit = np.where(self._fits(hidden + 1, first, stop), 0.0, np.inf)
        update, exchange = costs.after(chain, first, stop)
        return _StageBound(
            done=done + misfit,
            after=update + exchange,
            backward=backward,
            round_trip=forward + backward + behind + misfit,
        )

    def _fits(self, under_way: int, first: Vector, stop: Vector) -> Vector:
        """Return whether layers [first, stop) fit into a device with so many micro-batches under way."""
        costs = self.costs
        fits: Vector = first < stop
        if costs.profile.memory is None:
            return fits
        saved = min(under_way, self.chain.micro_batches) * (costs.saved[stop] - costs.saved[first])
        return fits & (costs.resident[stop] - costs.resident[first] + saved <= costs.profile.memory)

    def holds(self, cut: tuple[int, ...]) -> bool:
        """Return whether every stage of a cut fits into its device."""
        if self.costs.profile.memory is None:
            return True
        return all(
            self._fits(self.chain.stages - stage, np.array(first), np.array(stop))
            for stage, (first, stop) in enumerate(itertools.pairwise(cut))
        )

    def occupied(self, cut: tuple[int, ...]) -> tuple[Vector, Vector, Vector]:
        """Return each stage's seconds of a forward and a backward with sends, and after the last backward."""
        at = np.array(cut)
        place = np.arange(self.chain.stages)
        forward = np.diff(self.costs.forward[at]) + self.sends[place + 1, 0, at[1:]]
        backward = np.diff(self.costs.backward[at]) + self.sends[place, 1, at[:-1]]
        update, exchange = self.costs.after(self.chain, at[:-1], at[1:])
        return forward, backward, update + exchange


def _furthest(sums: Vector, limit: float) -> int:
    """Return the most consecutive layers whose sum is within a limit; at least one."""
    reach = np.searchsorted(sums, sums + limit, side="right") - np.arange(len(sums)) - 1
    return max(int(reach.max()), 1)


class _StageBound(NamedTuple):
    """Seconds of one stage for several choices of its layers; see LowerBounds."""

    done: Vector
    after: Vector  # gradient sums and update
    backward: Vector  # of one micro-batch
    round_trip: Vector


class _OpenCut(NamedTuple):
    """A cut whose last stages are not chosen yet. It sorts by its bound, then by the fewest stages left."""

    bound: float  # seconds of a step, at least
    left: int  # stages still to choose
    cut: tuple[int, ...]
    sent: float  # seconds of forward sends before the last stage chosen
    back: float  # seconds from the next stage's last backward to the end of the step


def best_cut(bounds: LowerBounds, *, effort: int = EFFORT, rival: float = np.inf) -> StageCut | None:
    """Return the fastest cut into ``chain.stages`` stages that fits into memory; None if none does.

    The search ends after ``effort`` vector operations. Cuts that are not faster than ``rival`` seconds are not looked
    for: another chain has a better one.

    >>> from holdfast.plan.profile import uniform
    >>> chain = Chain(stages=2, per_node=1, lanes=1, micro_batches=8)
    >>> best_cut(LowerBounds(StageCosts(uniform(4)), chain)).bounds
    (0, 2, 4)
    """
    if bounds.least == np.inf:
        return None
    root = _OpenCut(bounds.least, bounds.chain.stages, (0,), 0.0, 0.0)
    best = _timed(bounds, _first_guess(bounds, root))
    waiting = [root]
    spent = 0
    while waiting and waiting[0].bound < (limit := min(best.seconds, rival) * (1 - TINY)):
        if spent > effort:
            better = _polished(bounds, best)
            return replace(better, least=min(waiting[0].bound, better.seconds), effort=spent)
        chosen = heapq.heappop(waiting)
        spent += EXPANSION
        if chosen.left:
            for child in _children(bounds, chosen, below=limit):
                heapq.heappush(waiting, child)
        elif _closer_bound(bounds, chosen.cut) < limit:
            best = min(best, _timed(bounds, chosen.cut), key=lambda cut: cut.seconds)
            spent += bounds.chain.micro_batches + bounds.chain.stages
    return replace(best, least=min(best.seconds, max(rival, bounds.least)), effort=spent)


def _polished(bounds: LowerBounds, best: StageCut) -> StageCut:
    """Move single boundaries of a cut as long as that helps: for a search that could not finish.

    Moves are judged by their lower bound, which is cheap and nearly exact; only the last cut is timed.
    """
    cut, least = best.bounds, _closer_bound(bounds, best.bounds)
    for _ in range(SWEEPS):
        before = cut
        for place, step in itertools.product(range(1, bounds.chain.stages), (-1, 1)):
            moved = (*cut[:place], cut[place] + step, *cut[place + 1 :])
            if moved[place - 1] < moved[place] < moved[place + 1] and bounds.holds(moved):
                bound = _closer_bound(bounds, moved)
                if bound < least * (1 - TINY):
                    cut, least = moved, bound
        if cut == before:
            break
    return min(best, _timed(bounds, cut), key=lambda cut: cut.seconds)


def _children(bounds: LowerBounds, chosen: _OpenCut, *, below: float) -> list[_OpenCut]:
    """Return the cuts with one more stage chosen whose bound is below a limit."""
    chain, count = bounds.chain, bounds.costs.count
    stage, first, left = chain.stages - chosen.left, chosen.cut[-1], chosen.left - 1
    stops = np.arange(first + 1, count - left + 1) if left else np.array([count])
    part = bounds.stage(stage, np.array(first), stops)
    sent = chosen.sent + float(bounds.sends[stage, 0, first])
    own = part.done + chosen.sent + np.maximum(part.after, chosen.back)
    bound = np.maximum(np.maximum(own, bounds.step[stage + 1, stops] + sent), chosen.bound)
    back = part.backward + np.maximum(part.after, chosen.back)
    return [
        _OpenCut(float(bound[i]), left, (*chosen.cut, int(stops[i])), sent, float(back[i]))
        for i in np.flatnonzero(bound < below)
    ]


def _first_guess(bounds: LowerBounds, root: _OpenCut) -> tuple[int, ...]:
    """Return the cut found by always taking the child with the least bound: often the best cut already."""
    chosen = root
    while chosen.left:
        chosen = min(_children(bounds, chosen, below=np.inf))
    return chosen.cut


def _timed(bounds: LowerBounds, cut: tuple[int, ...]) -> StageCut:
    """Return the cut with the exact seconds of its step."""
    forward, backward, after = bounds.occupied(cut)
    ends = last_ends(forward, backward, np.array([bounds.chain.micro_batches]))
    return StageCut(bounds=cut, seconds=float((ends + after).max()), least=0.0)


def _closer_bound(bounds: LowerBounds, cut: tuple[int, ...]) -> float:
    """Return a lower bound for a complete cut, closer than that of the search and far cheaper than timing it.

    A stage may wait for any number of the stages behind it, not only for all of them.
    """
    forward, backward, after = bounds.occupied(cut)
    both = forward + backward
    until = np.cumsum(both)
    place = np.arange(len(both))
    further = place - place[:, None]
    wait = np.where(further >= 0, until - until[:, None], -np.inf)
    filling = (wait - further * forward[:, None]).max(axis=1)
    draining = (wait - further * backward[:, None]).max(axis=1)
    own = np.cumsum(forward) - forward + bounds.chain.micro_batches * both + filling + draining
    before = np.cumsum(backward) - backward
    done = np.maximum.accumulate((own + before)[::-1])[::-1] - before
    return float((done + after).max())
