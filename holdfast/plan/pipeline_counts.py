"""Choice of how many pipelines of each size to form: the composition with the fastest step.

In a step of T seconds each template can compute a known number of micro-batches, so the most that N nodes can compute
is a knapsack problem over sizes. The answer is the least T for which that reaches the step's micro-batches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.plan.stage_cut import TINY
from holdfast.plan.template import CLOSE, PLENTY, Template
from holdfast.plan.timeline import Vector

Composition = dict[int, int]  # pipelines by size
NEVER = -(1 << 60)  # micro-batches of an impossible sum of sizes: adding to it can never make it look possible
HALVINGS = 12  # bisections of T before the search also asks whether anything is left below the best step


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Requirements of a composition: it uses all nodes, has enough pipelines, and a micro-batch for each."""

    nodes: int
    fewest: int  # pipelines, at least: f + 1
    micro_batches: int  # of a step


def fewest_pipelines(demand: Demand, sizes: Sequence[int]) -> int | None:
    """Return the least number of pipelines that together use all nodes; None if no sum of ``sizes`` does.

    >>> fewest_pipelines(Demand(nodes=9, fewest=2, micro_batches=8), [2, 3, 4])
    3
    """
    reachable = np.zeros(demand.nodes + 1, dtype=bool)
    reachable[0] = True
    for count in range(1, demand.nodes // min(sizes) + 1):
        before, reachable = reachable, np.zeros_like(reachable)
        for size in sizes:
            reachable[size:] |= before[: max(len(before) - size, 0)]
        if reachable[-1] and count >= demand.fewest:
            return count
    return None


class Menu:
    """Templates by size, also as arrays: ``capacities`` asks all of them at once, which is faster."""

    def __init__(self, templates: Mapping[int, Template]) -> None:
        self.templates = dict(sorted(templates.items()))
        self.sizes = np.array(list(self.templates))
        knots = [template.knots for template in self.templates.values()]
        self._count = np.array([len(each.numbers) for each in knots])
        self._numbers = np.zeros((len(knots), self._count.max()))
        self._times = np.full((len(knots), self._count.max()), np.inf)
        for row, each in enumerate(knots):
            self._numbers[row, : len(each.numbers)] = each.numbers
            self._times[row, : len(each.times)] = each.times
        self._slope = np.array([each.slope for each in knots])
        self._lanes = np.array([template.lanes for template in self.templates.values()])

    def capacities(self, seconds: float) -> Vector:
        """Return ``Template.capacity(seconds)`` of each template, with NEVER instead of 0."""
        seconds *= 1 + TINY
        row = np.arange(len(self.sizes))
        reached = (self._times <= seconds).sum(axis=1)
        low = np.maximum(reached - 1, 0)
        high = np.minimum(reached, self._count - 1)
        steps = np.maximum(self._numbers[row, high] - self._numbers[row, low], 1)
        rise = np.where(high > low, (self._times[row, high] - self._times[row, low]) / steps, self._slope)
        more = np.floor(np.minimum((seconds - self._times[row, low]) / rise + 1e-7, PLENTY))
        more -= self._times[row, low] + more * rise > seconds  # rounding may have given one too many
        longest = np.minimum(self._numbers[row, low] + more, PLENTY)
        return np.where(reached > 0, longest * self._lanes, NEVER).astype(np.int64)

    def last_end(self, composition: Composition, seconds: float) -> float:
        """Return when the last pipeline ends if each gets as many micro-batches as ``seconds`` allow."""
        chosen = [self.templates[size] for size in composition]
        return max(template.seconds(max(template.capacity(seconds), 1)) for template in chosen)


def fastest(menu: Menu, demand: Demand) -> tuple[float, Composition]:
    """Return the seconds of the fastest step, and a composition that reaches it. At least one must exist.

    >>> from holdfast.plan.template import make_templates
    >>> from holdfast.plan.profile import uniform
    >>> menu = Menu(make_templates(uniform(8), nodes=9, tolerate=1, minimum=2).by_nodes)
    >>> fastest(menu, Demand(nodes=9, fewest=2, micro_batches=36))[1]
    {2: 1, 3: 1, 4: 1}
    """
    low = high = min(template.seconds(1) for template in menu.templates.values())
    while (found := _within(menu, demand, high)) is None:
        low, high = high, 2 * high
    best = found
    for attempt in itertools.count():
        high = min(high, menu.last_end(best, high))
        if high - low <= CLOSE * high:
            break
        # After some halvings few steps are left that could be the best: ask whether anything is below at all.
        below = attempt >= HALVINGS and attempt % 2 == 0
        target = high * (1 - CLOSE) if below else (low + high) / 2
        found = _within(menu, demand, target)
        if found is not None:
            best, high = found, target
        elif below:
            break
        else:
            low = target
    if demand.fewest == 1 and demand.nodes in menu.templates:
        alone = menu.templates[demand.nodes].seconds(demand.micro_batches, alone=True)
        if alone <= high:
            return alone, {demand.nodes: 1}
    return high, best


def _within(menu: Menu, demand: Demand, seconds: float) -> Composition | None:
    """Return a composition that computes all micro-batches within ``seconds``; None if there is none."""
    items = [
        (size, worth)
        for size, worth in zip(menu.sizes.tolist(), menu.capacities(seconds).tolist(), strict=True)
        if worth > 0 and size <= demand.nodes
    ]
    if not items:
        return None
    if demand.micro_batches < demand.nodes // items[0][0]:  # some compositions have too many pipelines
        tables = list(_exactly(items, demand.nodes, demand.micro_batches))
        count = max(range(demand.fewest, len(tables)), key=lambda count: int(tables[count][demand.nodes]))
        if tables[count][demand.nodes] < demand.micro_batches:
            return None
        return dict(Counter(sorted(_trace(items, tables[: count + 1], demand.nodes))))
    free, items = _any_number(items, demand.nodes)
    tables = list(_exactly(items, demand.nodes, demand.fewest))
    both = tables[-1] + free[::-1]
    first = int(np.argmax(both))
    if both[first] < demand.micro_batches:
        return None
    chosen = [*_trace(items, tables, first), *_trace(items, [free] * (demand.nodes + 1), demand.nodes - first)]
    return dict(Counter(sorted(chosen)))


Items = list[tuple[int, int]]  # sizes, and the micro-batches that a pipeline of each can compute


def _exactly(items: Items, nodes: int, count: int) -> Iterator[Vector]:
    """Yield tables for exactly 0, 1, … ``count`` pipelines: the most micro-batches, by the nodes used."""
    table = np.full(nodes + 1, NEVER)
    table[0] = 0
    yield table
    for _ in range(count):
        longer = np.full(nodes + 1, NEVER)
        for size, worth in items:
            np.maximum(longer[size:], table[: nodes + 1 - size] + worth, out=longer[size:])
        table = np.where(longer < 0, NEVER, longer)
        yield table


def _any_number(items: Items, nodes: int) -> tuple[Vector, Items]:
    """Return the table for any number of pipelines, and the sizes that it needs.

    A size that computes no more than smaller ones together is left out.
    """
    table = np.full(nodes + 1, NEVER)
    table[0] = 0
    needed = []
    for size, worth in items:
        if table[size] < worth:
            needed.append((size, worth))
            table = _with(table, size, worth)
    return table, needed


def _with(table: Vector, size: int, worth: int) -> Vector:
    """Return the table if pipelines of one more size may be used, any number of them.

    Totals that leave the same rest when divided by the size differ by pipelines of that size: the best number of them
    is a running maximum along these totals.
    """
    rows = -(-len(table) // size)
    padded = np.full(rows * size, NEVER)
    padded[: len(table)] = table
    gained = np.arange(rows)[:, None] * worth
    best = np.maximum.accumulate(padded.reshape(rows, size) - gained, axis=0) + gained
    longer = best.reshape(-1)[: len(table)]
    return np.where(longer < 0, NEVER, longer)


def _trace(items: Items, tables: Sequence[Vector], total: int) -> Iterator[int]:
    """Yield the sizes whose sum gave the last table's entry for ``total``."""
    for before, after in zip(reversed(tables[:-1]), reversed(tables[1:]), strict=True):
        if total == 0:
            return
        size = next(s for s, worth in items if s <= total and before[total - s] + worth == after[total])
        yield size
        total -= size


def equals(menu: Menu, demand: Demand, seconds: float, near: Mapping[int, int], limit: int) -> list[Composition]:
    """Return at most ``limit`` compositions whose step takes no longer than ``seconds``.

    ``near`` has the pipelines of each size that still exist: compositions that keep many of them come first.
    """
    value = menu.capacities(seconds * (1 + CLOSE))
    items = [
        (int(size), int(worth))
        for size, worth in zip(menu.sizes, value, strict=True)
        if worth > 0 and size <= demand.nodes
    ]
    # Sizes that exist now are chosen first, while all nodes are still free.
    items.sort(key=lambda item: (-near.get(item[0], 0), item[0]))
    table = np.full(demand.nodes + 1, NEVER)
    table[0] = 0
    tables = [table]
    for size, worth in reversed(items):
        tables.append(_with(tables[-1], size, worth))
    search = _Equals(items=items, tables=tables[::-1], demand=demand, limit=limit, found=[])
    search.go(0, demand.nodes, demand.micro_batches, {})
    return search.found


@dataclass(kw_only=True)
class _Equals:
    """Depth-first search for compositions. A branch is entered only if its nodes can compute enough micro-batches."""

    items: Items
    tables: list[Vector]  # for each place: the most micro-batches with the sizes from there on
    demand: Demand
    limit: int
    found: list[Composition]
    looked: int = 0  # branches entered

    def go(self, place: int, nodes: int, micro_batches: int, chosen: Composition) -> None:
        """Try all numbers of pipelines of the size at ``place``, with so many nodes and micro-batches left to cover."""
        self.looked += 1
        if nodes == 0:
            count = sum(chosen.values())
            if micro_batches <= 0 and self.demand.fewest <= count <= self.demand.micro_batches:
                self.found.append(dict(sorted(chosen.items())))
            return
        if place == len(self.items):
            return
        size, worth = self.items[place]
        counts = np.arange(nodes // size + 1)
        enough = self.tables[place + 1][nodes - counts * size] + counts * worth >= micro_batches
        for count in reversed(counts[enough].tolist()):
            if len(self.found) >= self.limit or self.looked > 50 * self.limit + 200:
                return
            more = {**chosen, size: count} if count else chosen
            self.go(place + 1, nodes - count * size, micro_batches - count * worth, more)
