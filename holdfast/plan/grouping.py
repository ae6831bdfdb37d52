"""Choice of the boundaries to log, within a budget. Stages between two logged boundaries form a group.

When a stage is lost, its whole group computes the steps since the last checkpoint again, from what crossed the two
ends of the group. More logged boundaries make smaller groups, which recover sooner; but the log is kept until the next
checkpoint and must fit into its budget. The best choice is a shortest path over boundaries with a limit on its bytes.
A price per byte (a Lagrange multiplier) gives a lower bound for every beginning of a path; the search follows only
beginnings whose bound is below the best path found so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import UsageError
from holdfast.plan.profile import MOST_BYTES

# Beginnings of paths kept per boundary, in three searches: a path found by a narrow search prunes the wider ones.
WIDTHS = (64, 1024, 32768)
EQUAL = 1e-12  # relative: times that differ by less differ only by rounding

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Groups of stages, and the logged boundaries between them. Boundary i lies behind stage i."""

    groups: tuple[range, ...]
    logged: tuple[int, ...]
    bytes: int  # of a whole log, at the end of its interval
    seconds: float  # expected recovery time per replayed step; any node is as likely to be lost as another
    gap: float  # 0.0: proven to be the best; 0.01: at most 1% slower than the best
    reason: str


def choose_groups(
    *,
    recovery_seconds: Sequence[float],
    boundary_bytes: Sequence[int],
    bandwidth: float,
    interval: int,
    budget: int,
    stages_per_node: int = 1,
) -> Grouping:
    """Choose the groups with the least expected recovery time among those whose log fits into ``budget`` bytes.

    Stage i takes ``recovery_seconds[i]`` seconds to compute a step again; ``boundary_bytes[i]`` bytes cross the
    boundary behind it per step, both directions together. A group takes the sum over its stages, plus the time to
    send over its inner boundaries at ``bandwidth`` bytes per second. The log is kept for ``interval`` steps. Stages
    of one node are lost together, so nothing is logged between them. Raises UsageError for negative or missing
    numbers.

    >>> chosen = choose_groups(
    ...     recovery_seconds=[1.0, 1.0, 1.0, 1.0], boundary_bytes=[50, 80, 50], bandwidth=100, interval=10, budget=1000
    ... )
    >>> chosen.groups, chosen.logged, chosen.bytes, chosen.seconds
    ((range(0, 1), range(1, 3), range(3, 4)), (0, 2), 1000, 1.9)
    >>> chosen.reason
    '2 of 3 boundaries logged, 1000 of 1000 bytes; 1.9 s per replayed step, 1 s if all were, 5.8 s without a log'
    """
    _check(recovery_seconds, boundary_bytes, bandwidth, interval, budget, stages_per_node)
    network = _Network.of(recovery_seconds, boundary_bytes, bandwidth, stages_per_node)
    capacity = min(budget // interval, sum(boundary_bytes))  # more is never needed
    path, bound = network.cheapest(capacity)
    stops = [network.stop[end] for end in path]
    seconds, crossing = network.cost_of(path)
    logged = tuple(stop - 1 for stop in stops[:-1])
    gap = max(seconds / bound - 1, 0.0) if bound > 0 else 0.0
    return Grouping(
        groups=tuple(range(first, stop) for first, stop in zip([0, *stops], stops, strict=False)),
        logged=logged,
        bytes=crossing * interval,
        seconds=seconds,
        gap=0.0 if gap <= 2 * EQUAL else gap,
        reason=_reason(network, len(logged), len(boundary_bytes), seconds, crossing * interval, budget),
    )


def longest_interval(*, bytes_per_step: int, budget: int) -> int | None:
    """Return the most steps from one checkpoint to the next for which a log fits into ``budget`` bytes.

    None means any number, because nothing is logged. The log of a step is dropped when a later checkpoint is durable
    on every worker, so the steps made while a checkpoint is written belong to the interval. Raises UsageError for
    negative numbers.

    >>> longest_interval(bytes_per_step=180, budget=1000)
    5
    """
    if bytes_per_step < 0 or budget < 0:
        raise UsageError(f"a log of {bytes_per_step} bytes per step in {budget} bytes", hint="neither may be negative")
    return budget // bytes_per_step if bytes_per_step else None


def _check(
    seconds: Sequence[float], sizes: Sequence[int], bandwidth: float, interval: int, budget: int, stages_per_node: int
) -> None:
    if not seconds or len(sizes) != len(seconds) - 1:
        raise UsageError(
            f"{len(seconds)} stages with {len(sizes)} boundaries cannot be grouped",
            hint="there is one boundary between each stage and the next",
        )
    for stage, value in enumerate(seconds):
        if not 0 <= value < math.inf:
            raise UsageError(f"stage {stage} takes {value} s to replay a step", hint="it takes 0 or more")
    for boundary, size in enumerate(sizes):
        if not 0 <= size <= MOST_BYTES:
            raise UsageError(f"{size} bytes cross boundary {boundary}", hint=f"0 to {MOST_BYTES:g}")
    if not bandwidth > 0 or interval < 1 or budget < 0 or stages_per_node < 1:
        raise UsageError(
            f"a log of {budget} bytes for {interval} steps, {bandwidth} bytes/s, {stages_per_node} stages per node",
            hint="the budget may be 0, the others are positive",
        )


def _reason(network: _Network, logged: int, boundaries: int, seconds: float, kept: int, budget: int) -> str:
    units = list(range(1, network.nodes + 1))
    most, _ = network.cost_of(units)
    least, _ = network.cost_of(units[-1:])
    if not boundaries:
        return f"one stage has nothing to log; {seconds:.3g} s per replayed step"
    head = f"{logged} of {boundaries} boundaries logged, {kept} of {budget} bytes; {seconds:.3g} s per replayed step"
    return f"{head}, {most:.3g} s if all were, {least:.3g} s without a log"


@dataclass(frozen=True, kw_only=True)
class _Front:
    """Pareto front of the paths to one end: no path in it has both fewer bytes and less time than another."""

    bytes: Integers
    seconds: Floats
    source: Integers  # where the choice's last group begins
    place: Integers  # index of the path before that group, in the front of ``source``


@dataclass(frozen=True, kw_only=True)
class _Network:
    """A graph whose vertices are the ends 0 … n between nodes. An edge is a group, weighted with its expected time."""

    nodes: int
    stop: list[int]  # the stage that follows each end
    crossing: Integers  # bytes per step that cross each end; 0 at the first and the last
    seconds: Floats  # [first, end]; infinite where end <= first

    @classmethod
    def of(cls, recovery: Sequence[float], sizes: Sequence[int], bandwidth: float, together: int) -> _Network:
        """Build the graph; ``together`` is the number of stages on a node."""
        stages = len(recovery)
        stop = np.array([*range(0, stages, together), stages])
        nodes = len(stop) - 1
        replay = np.array(recovery, dtype=float)
        inner = np.array([0.0, *(size / bandwidth for size in sizes)])  # in front of each stage
        seconds = np.full((nodes + 1, nodes + 1), np.inf)
        for first in range(nodes):
            # Each row is summed for itself: a difference of two long sums would lose small stages beside large ones.
            group = np.cumsum(replay[stop[first] :]) + np.cumsum([0.0, *inner[stop[first] + 1 :]])
            seconds[first, first + 1 :] = group[stop[first + 1 :] - stop[first] - 1] * np.arange(1, nodes - first + 1)
        crossing = np.array([0, *(sizes[at - 1] for at in stop[1:-1]), 0], dtype=np.int64)
        return cls(nodes=nodes, stop=stop.tolist(), crossing=crossing, seconds=seconds / nodes)

    def cost_of(self, path: Sequence[int]) -> tuple[float, int]:
        """Return the expected seconds and the bytes per step of groups with these ends."""
        edges = zip([0, *path], path, strict=False)
        return math.fsum(self.seconds[edge] for edge in edges), int(sum(self.crossing[list(path)].tolist()))

    def cheapest(self, capacity: int) -> tuple[list[int], float]:
        """Return the best path found with at most ``capacity`` bytes per step, and a lower bound for all of them."""
        known, prices = self._hull(capacity)
        bound = self.cost_of(known)[0] if not prices else 0.0
        for width in WIDTHS if prices else ():
            limit = self.cost_of(known)[0] * (1 + EQUAL)
            found, bound = self._search(capacity, prices, limit, width)
            known = min([known, found] if found else [known], key=self._order)
            if bound >= self.cost_of(known)[0]:
                break
        return known, bound

    def _order(self, path: list[int]) -> tuple[float, int]:
        seconds, crossing = self.cost_of(path)
        return float(f"{seconds:.12g}"), crossing

    def _hull(self, capacity: int) -> tuple[list[int], list[float]]:
        """Return a path that fits, and the prices per byte to bound others with; no prices if the fastest path fits.

        The path is a corner of the lower convex hull of all (bytes, seconds). Each round asks for the cheapest path at
        the price that makes the best path within the capacity and the best one beyond it cost the same.
        """
        over = self._fastest()
        if self.cost_of(over)[1] <= capacity:
            return over, []
        under = [end for end in range(1, self.nodes + 1) if self.crossing[end] == 0]
        prices: list[float] = []
        while True:
            (slow, few), (fast, many) = self.cost_of(under), self.cost_of(over)
            price = (slow - fast) / (many - few)
            prices.append(price)
            path = self._path(price)
            seconds, crossing = self.cost_of(path)
            if seconds + price * crossing >= (slow + price * few) * (1 - EQUAL):
                return under, prices
            over, under = (path, under) if crossing > capacity else (over, path)

    def _fastest(self) -> list[int]:
        """Return the path with the least seconds and, among equals, the fewest bytes. Its bytes are not limited."""
        seconds, sizes, sources = np.zeros(self.nodes + 1), np.zeros(self.nodes + 1), [0]
        for end in range(1, self.nodes + 1):
            totals = seconds[:end] + self.seconds[:end, end]
            fastest = np.flatnonzero(totals <= totals.min() * (1 + EQUAL))
            source = int(fastest[np.argmin(sizes[fastest])])
            seconds[end], sizes[end] = totals[source], sizes[source] + self.crossing[end]
            sources.append(source)
        path = [self.nodes]
        while sources[path[0]]:
            path.insert(0, sources[path[0]])
        return path

    def _forward(self, price: float) -> Floats:
        """Return the least cost of a path from the first end to each end, with bytes at this price."""
        least = np.zeros(self.nodes + 1)
        for end in range(1, self.nodes + 1):
            least[end] = (least[:end] + self.seconds[:end, end]).min() + price * self.crossing[end]
        return least

    def _backward(self, price: float) -> Floats:
        """Return the least cost of a path from each end to the last one, with bytes at this price."""
        least = np.zeros(self.nodes + 1)
        for end in range(self.nodes - 1, -1, -1):
            least[end] = (least + self.seconds[end] + price * self.crossing)[end + 1 :].min()
        return least

    def _path(self, price: float) -> list[int]:
        """Return the cheapest path with bytes at this price."""
        least = self._forward(price)
        path = [self.nodes]
        while path[0] > 0:
            end = path[0]
            path.insert(0, int(np.argmin(least[:end] + self.seconds[:end, end])))
        return path[1:]

    def _search(self, capacity: int, prices: list[float], limit: float, width: int) -> tuple[list[int], float]:
        """Return the best path within capacity and limit, and a lower bound for the paths that were cut off."""
        ahead = [self._backward(price) for price in prices]
        empty = np.zeros(1, dtype=np.int64)
        fronts = [_Front(bytes=empty, seconds=np.zeros(1), source=empty, place=empty)]
        useful = np.ones_like(self.seconds, dtype=bool)
        for price, rest in zip(prices, ahead, strict=True):
            through = (self._forward(price)[:, None] + self.seconds) + (price * self.crossing + rest)[None, :]
            useful &= through - price * capacity <= limit
        bound = limit
        for end in range(1, self.nodes + 1):
            front = self._arrivals(fronts, np.flatnonzero(useful[:end, end]), end)
            bounds = np.full(len(front.bytes), -np.inf)
            for price, rest in zip(prices, ahead, strict=True):
                bounds = np.maximum(bounds, front.seconds + rest[end] + price * (front.bytes - float(capacity)))
            chosen = _undominated(front, np.flatnonzero((front.bytes <= capacity) & (bounds <= limit)))
            if len(chosen) > width:
                promising = _promising(chosen, bounds, width)
                bound = min(bound, bounds[np.setdiff1d(chosen, promising)].min())
                chosen = promising
            fronts.append(_take(front, chosen))
        return _trace(fronts), bound

    def _arrivals(self, fronts: list[_Front], sources: Integers, end: int) -> _Front:
        """Return all paths to ``end`` whose last group begins at one of ``sources``."""
        parts = [fronts[source] for source in sources]
        counts = [len(part.bytes) for part in parts]
        none: list[Integers] = [np.zeros(0, dtype=np.int64)]
        groups = [part.seconds + self.seconds[source, end] for source, part in zip(sources, parts, strict=True)]
        return _Front(
            bytes=np.concatenate(none + [part.bytes + self.crossing[end] for part in parts]),
            seconds=np.concatenate([np.zeros(0), *groups]),
            source=np.repeat(sources, counts),
            place=np.concatenate(none + [np.arange(count) for count in counts]),
        )


def _undominated(front: _Front, chosen: Integers) -> Integers:
    """Keep the paths that no other one beats in both bytes and seconds."""
    chosen = chosen[np.lexsort((front.seconds[chosen], front.bytes[chosen]))]
    seconds = front.seconds[chosen]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(seconds)[:-1]])
    return chosen[seconds < best_before * (1 - EQUAL)]


def _promising(chosen: Integers, bounds: Floats, width: int) -> Integers:
    """Keep about ``width`` paths: half with the lowest bounds, half spread over the bytes (bounds may all be equal)."""
    lowest = np.argsort(bounds[chosen], kind="stable")[: width // 2]
    spread = np.linspace(0, len(chosen) - 1, width // 2).astype(np.int64)
    return chosen[np.union1d(lowest, spread)]


def _take(front: _Front, places: Integers) -> _Front:
    return _Front(
        bytes=front.bytes[places],
        seconds=front.seconds[places],
        source=front.source[places],
        place=front.place[places],
    )


def _trace(fronts: list[_Front]) -> list[int]:
    """Return the ends of the fastest path to the last end; an empty list if no path was kept."""
    end = len(fronts) - 1
    if not len(fronts[end].bytes):
        return []
    place, path = int(np.argmin(fronts[end].seconds)), []
    while end > 0:
        path.append(end)
        end, place = int(fronts[end].source[place]), int(fronts[end].place[place])
    return path[::-1]
