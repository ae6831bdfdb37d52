"""Where to cut the layers of a pipeline into stages: the shortest step, by bound and search.

Let stage i be the one that a step waits for, w what a micro-batch occupies it, N the micro-batches. It
works N·w, after the first micro-batch has come through the stages before it. While it fills and while it
drains it may also have to wait for the stages behind, once there and back: then the forwards (or
backwards) that it can do meanwhile are hidden behind that. From its last backward the stages before it
have to go back too, and each sums its gradients with other pipelines and updates when its own are
done. The largest of these sums is a lower bound of the exact step, and mostly equal to it.

The bound of a stage depends on its layers, its place and on what lies behind, so dynamic programming from
the end gives a bound for every suffix. Best-first search then completes cuts in the order of their
bounds and times each by the exact recurrence; it stops when no bound is left below the best time: proven.
On large models that may take too long; then it stops earlier and says how far the bound is (``gap``).
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.timeline import Vector, last_ends

EFFORT = 6_000  # vector operations spent on a template's cuts; in all tests enough to finish models of up to 10 layers
EXPANSION = 6  # of these, to look one stage further
SWEEPS = 3  # over all boundaries, when the effort is used up
TINY = 1e-12  # rounding: not a difference


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """Layers [bounds[i], bounds[i+1]) are stage i; no cut of the chain is faster than ``least``."""

    bounds: tuple[int, ...]
    seconds: float
    least: float
    effort: int = 0  # that finding it took


class LowerBounds:
    """Lower bounds of every suffix, by its first stage and layer.

    ``done`` bounds the end of the stage's last backward, ``step`` that of all stages from it on with what
    comes after, ``round_trip`` is the way of a micro-batch to the end and back. Sends forward over the
    boundaries before are left out of the first two: everything behind has to add them.
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
        """No stage of the best cut has more layers.

        They would not fit, or take longer than an even cut takes in all.
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
        """No cut can be faster; infinite if none fits the memory."""
        return float(self.step[0, 0])

    def stage(self, stage: int, first: Vector, stop: Vector) -> _StageBound:
        """What layers [first, stop) mean as this stage, with the best that may come behind; infinite if too large."""
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
        costs = self.costs
        fits: Vector = first < stop
        if costs.profile.memory is None:
            return fits
        saved = min(under_way, self.chain.micro_batches) * (costs.saved[stop] - costs.saved[first])
        return fits & (costs.resident[stop] - costs.resident[first] + saved <= costs.profile.memory)

    def holds(self, cut: tuple[int, ...]) -> bool:
        """Does every stage of a cut fit into its device?"""
        if self.costs.profile.memory is None:
            return True
        return all(
            self._fits(self.chain.stages - stage, np.array(first), np.array(stop))
            for stage, (first, stop) in enumerate(itertools.pairwise(cut))
        )

    def occupied(self, cut: tuple[int, ...]) -> tuple[Vector, Vector, Vector]:
        """What a micro-batch's forward and backward occupy each stage of a cut, and the seconds after."""
        at = np.array(cut)
        place = np.arange(self.chain.stages)
        forward = np.diff(self.costs.forward[at]) + self.sends[place + 1, 0, at[1:]]
        backward = np.diff(self.costs.backward[at]) + self.sends[place, 1, at[:-1]]
        update, exchange = self.costs.after(self.chain, at[:-1], at[1:])
        return forward, backward, update + exchange


def _furthest(sums: Vector, limit: float) -> int:
    """The most consecutive layers whose sum is within a limit, at least one."""
    reach = np.searchsorted(sums, sums + limit, side="right") - np.arange(len(sums)) - 1
    return max(int(reach.max()), 1)


class _StageBound(NamedTuple):
    done: Vector
    after: Vector
    backward: Vector
    round_trip: Vector


class _OpenCut(NamedTuple):
    """A cut that is not complete: ordered by its bound, on equal bounds the deepest first."""

    bound: float
    left: int  # stages
    cut: tuple[int, ...]
    sent: float  # forward, before the last stage chosen
    back: float  # from the next stage's last backward to the end of a step


def best_cut(bounds: LowerBounds, *, effort: int = EFFORT, rival: float = np.inf) -> StageCut | None:
    """The fastest cut into ``chain.stages`` stages that fits the memory; None if none does.

    Cuts that are no faster than ``rival`` are not looked for: another chain has a better one.

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
    """The cut after moving single boundaries as long as that helps: for a search that could not finish.

    Moves are judged by their bound, which is cheap and all but exact; the outcome is timed.
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
    """The ways to choose one more stage, with bounds below a limit."""
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
    """Always the child with the least bound: often the best cut already."""
    chosen = root
    while chosen.left:
        chosen = min(_children(bounds, chosen, below=np.inf))
    return chosen.cut


def _timed(bounds: LowerBounds, cut: tuple[int, ...]) -> StageCut:
    forward, backward, after = bounds.occupied(cut)
    ends = last_ends(forward, backward, np.array([bounds.chain.micro_batches]))
    return StageCut(bounds=cut, seconds=float((ends + after).max()), least=0.0)


def _closer_bound(bounds: LowerBounds, cut: tuple[int, ...]) -> float:
    """The bound of a whole cut, which may wait for only some of the stages behind. Far cheaper than timing it."""
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
