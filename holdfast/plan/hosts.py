"""Assignment of workers to the places of a layout, so that the loss of one host leaves a copy of every layer.

A layout says which places (stages of pipelines) there are. Hosts are failure domains of any size. The copies of a
layer, one in each pipeline, must be on enough different hosts; of all assignments that achieve this, the one that
moves the fewest bytes is searched, best first. The cheapest assignment without regard to hosts is a lower bound.
Where it puts too many copies on one host, each way to move one of them away is a branch of the search.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

from holdfast.plan.layout import Layout
from holdfast.words import count, ranges_text

# Assignments tried while looking for the fewest bytes; then as many again for any with enough hosts.
EFFORT = 120
EXACT = 2**52  # whole numbers up to here are exact in floating point

Domains = tuple[int, ...]  # for each place the hosts that it may be on, as a bit mask


def spread(
    layout: Layout,
    *,
    hosts: Sequence[str],
    held: Sequence[Collection[int]],
    sizes: Sequence[int],
    barred: Collection[int] = (),
) -> Layout:
    """Return the layout with workers exchanged so that each layer is on min(copies, tolerate + 1) hosts.

    Among such layouts it takes one that moves few bytes; if there is none, each layer is on as many hosts as possible.
    ``hosts`` and ``held`` give each rank's host and the layers that it holds now, ``sizes`` each layer's bytes. Ranks
    without a place may get one, except ``barred`` ones, which are about to leave.

    >>> from holdfast.plan.layout import Layout, PlacedPipeline
    >>> stages = (range(0, 2), range(2, 4))
    >>> lines = (PlacedPipeline(ranks=(0, 2), layers=stages), PlacedPipeline(ranks=(1, 3), layers=stages))
    >>> before = Layout(pipelines=lines, size=4, layers=4, tolerate=1, minimum=2, reason="2 pipelines of 2")
    >>> after = spread(before, hosts="aabb", held=[()] * 4, sizes=[1] * 4)
    >>> [line.ranks for line in after.pipelines], after.reason
    ([(0, 2), (3, 1)], '2 pipelines of 2; 2 workers change places, so that each layer is on 2 hosts')
    """
    given = [rank for line in layout.pipelines for rank in line.ranks]
    usable = sorted({*range(layout.size)} - {*barred} | {*given})
    names = sorted({hosts[rank] for rank in usable})
    wanted = min(len(layout.pipelines), layout.tolerate + 1)
    if wanted < 2:
        return layout
    if len(names) < 2:
        return replace(layout, reason=f"{layout.reason}; every copy is on host {names[0]}, the only one")
    places = [layers for line in layout.pipelines for layers in line.layers]
    task = AssignmentTask(
        cost=_costs(places, [held[rank] for rank in usable], sizes, [usable.index(rank) for rank in given]),
        host_of=np.array([names.index(hosts[rank]) for rank in usable]),
        groups=_groups(places, layout.layers),
    )
    taken = [usable[column] for column in _solve(task, min(wanted, len(names)), sizes)]
    return _with_ranks(layout, given, taken, hosts)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Neighbouring layers that are held by the same places."""

    layers: range
    places: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentTask:
    """An assignment problem: a row for each place, a column for each rank that may take one."""

    cost: NDArray[np.float64]
    host_of: NDArray[np.int64]
    groups: tuple[LayerGroup, ...]

    @cached_property
    def room(self) -> list[int]:
        """Number of ranks on each host."""
        return [int(number) for number in np.bincount(self.host_of)]

    @property
    def anywhere(self) -> list[int]:
        """Bit masks that allow every place on every host."""
        return [(1 << len(self.room)) - 1] * len(self.cost)

    def assign(self, domains: Sequence[int]) -> list[int] | None:
        """Return the column of each row in the cheapest assignment within these hosts; None if there is none."""
        width = len(self.room) // 8 + 1
        packed = np.frombuffer(b"".join(domain.to_bytes(width, "little") for domain in domains), dtype=np.uint8)
        allowed = np.unpackbits(packed.reshape(len(domains), width), axis=1, bitorder="little")
        try:
            _, columns = linear_sum_assignment(np.where(allowed[:, self.host_of], self.cost, np.inf))
        except ValueError:  # scipy's word for: no assignment is possible
            return None
        return [int(column) for column in columns]


def _groups(places: Sequence[range], layers: int) -> tuple[LayerGroup, ...]:
    cuts = sorted({0, layers, *(place.start for place in places), *(place.stop for place in places)})
    return tuple(
        LayerGroup(layers=range(first, stop), places=tuple(n for n, place in enumerate(places) if first in place))
        for first, stop in pairwise(cuts)
    )


def _costs(
    places: Sequence[range], held: Sequence[Collection[int]], sizes: Sequence[int], given: Sequence[int]
) -> NDArray[np.float64]:
    """Return the bytes that each rank lacks for each place, scaled, plus 1 for ranks that would leave their place."""
    has = np.array([[layer in layers for layer in range(len(sizes))] for layers in held], dtype=bool)
    needs = np.array([[layer in place for layer in range(len(sizes))] for place in places], dtype=bool)
    weights = [int(size) for size in sizes]
    while (
        sum(weights) * (len(places) + 1) ** 2 > EXACT
    ):  # sums must be exact: every worker computes the same assignment
        weights = [weight // 2 for weight in weights]
    bytes_of = np.array(weights, dtype=np.float64)
    cost: NDArray[np.float64] = (needs * bytes_of) @ (~has).T.astype(np.float64) * (len(places) + 1)
    cost += 1
    cost[np.arange(len(places)), given] -= 1
    return cost


# --- the search ----------------------------------------------------------------------------------


class HostSearch:
    """Best-first search for the cheapest assignment that has each group on at least ``needs`` hosts."""

    def __init__(self, task: AssignmentTask, needs: Sequence[int]) -> None:
        self.task = task
        self.needs = tuple(needs)
        self.looked_at = 0
        self._open: list[tuple[float, float, int, Domains, list[int]]] = []

    def run(self, effort: int) -> list[int] | None:
        """Return the column of each row; None if there is no such assignment or it was not found with this effort."""
        self._look_at(self.task.anywhere, greedy=False)
        for greedy in (False, True):
            if (
                greedy
            ):  # finding the fewest bytes takes too long: from here on, any assignment with enough hosts will do
                self._open = [(broken, bound, n, domains, columns) for bound, broken, n, domains, columns in self._open]
                heapq.heapify(self._open)
            while self._open and self.looked_at < effort * (1 + greedy):
                first, second, _, domains, columns = heapq.heappop(self._open)
                if (first if greedy else second) == 0:
                    return columns
                self._branch(domains, columns, greedy=greedy)
        return self._deal(effort) if self._open else None

    def _deal(self, effort: int) -> list[int] | None:
        """Fill the places one by one, most constrained first, without regard to bytes: for tight problems."""
        waiting = [self.task.anywhere]
        order = list(dict.fromkeys(place for group in self.task.groups for place in group.places))
        while waiting and effort > 0:
            domains = waiting.pop()
            effort -= 1
            if not self._narrow(domains):
                continue
            choices = [place for place in order if domains[place].bit_count() > 1]
            if not choices:
                return self.task.assign(domains)
            place = min(choices, key=lambda choice: domains[choice].bit_count())
            left = [room - domains.count(1 << host) for host, room in enumerate(self.task.room)]
            hosts = [host for host in range(len(left)) if domains[place] >> host & 1]
            hosts.sort(key=lambda host: (left[host], -host))  # the one with the most room left comes last: it is next
            waiting += [[*domains[:place], 1 << host, *domains[place + 1 :]] for host in hosts]
        return None

    def _branch(self, domains: Domains, columns: Sequence[int], *, greedy: bool) -> None:
        """Open one branch per place of a group that is on too few hosts: that place goes to a host not yet used.

        The branches exclude each other: in each, the places before keep to the hosts used so far.
        """
        host_of = self.task.host_of[columns].tolist()
        choices = []
        for group, need in zip(self.task.groups, self.needs, strict=True):
            used = _bits(host_of[place] for place in group.places)
            if used.bit_count() < need:
                choices.append((sum(bool(domains[p] & ~used) for p in group.places), used, group.places))
        _, used, places = min(choices)
        before = list(domains)
        for place in places:
            child = list(before)
            child[place] &= ~used
            self._look_at(child, greedy=greedy)
            before[place] &= used

    def _look_at(self, domains: list[int], *, greedy: bool) -> None:
        """Solve the assignment within these hosts, and queue it for branching."""
        if not self._narrow(domains):
            return
        self.looked_at += 1
        if (columns := self.task.assign(domains)) is not None:
            bound, broken = float(self.task.cost[range(len(columns)), columns].sum()), float(self._broken(columns))
            keys = (broken, bound) if greedy else (bound, broken)
            heapq.heappush(self._open, (*keys, -self.looked_at, tuple(domains), columns))

    def _broken(self, columns: list[int]) -> int:
        """Return how many hosts are missing, summed over all groups."""
        host_of = self.task.host_of[columns].tolist()
        used = [_bits(host_of[place] for place in group.places).bit_count() for group in self.task.groups]
        return sum(max(0, need - number) for number, need in zip(used, self.needs, strict=True))

    def _narrow(self, domains: list[int]) -> bool:
        """Remove hosts that a place can no longer be on. Returns False if some place has none left."""
        before: list[int] = []
        while before != domains:
            before = list(domains)
            if not (self._narrow_groups(domains) and self._narrow_hosts(domains)):
                return False
        return True

    def _narrow_groups(self, domains: list[int]) -> bool:
        """Where every open place of a group must bring a new host, remove the hosts that the group already has."""
        for group, need in zip(self.task.groups, self.needs, strict=True):
            sure, free = 0, []
            for place in group.places:
                if domains[place].bit_count() == 1:
                    sure |= domains[place]
                else:
                    free.append(place)
            left = sure.bit_count() + len(free)
            if left < need:
                return False
            if left == need:
                for place in free:
                    domains[place] &= ~sure
                    if not domains[place]:
                        return False
        return True

    def _narrow_hosts(self, domains: list[int]) -> bool:
        """Remove hosts whose ranks are all taken from the other places."""
        for host, room in enumerate(self.task.room):
            sure = domains.count(1 << host)
            if sure > room:
                return False
            if sure == room:
                for place, domain in enumerate(domains):
                    if domain != 1 << host:
                        domains[place] &= ~(1 << host)
        return all(domains)


def _bits(hosts: Iterable[int]) -> int:
    found = 0
    for host in hosts:
        found |= 1 << host
    return found


def _solve(task: AssignmentTask, wanted: int, sizes: Sequence[int]) -> list[int]:
    """Return an assignment with each layer on ``wanted`` hosts, or on as many as possible, large layers first."""
    needs = [1] * len(task.groups)
    for need in range(wanted, 0, -1):
        search = HostSearch(task, [min(need, len(group.places)) for group in task.groups])
        if (found := search.run(EFFORT)) is not None:
            needs = list(search.needs)
            break
    assert found is not None, "with one host for each layer, every assignment will do"
    if need == wanted:
        return found
    effort = EFFORT
    for number in sorted(range(len(needs)), key=lambda n: (-sum(sizes[i] for i in task.groups[n].layers), n)):
        search = HostSearch(task, [each + (n == number) for n, each in enumerate(needs)])
        better = search.run(effort // 2)
        if better is not None:
            needs, found = list(search.needs), better
        effort = max(0, effort - search.looked_at)
    return found


# --- the result ----------------------------------------------------------------------------------


def _with_ranks(layout: Layout, given: list[int], taken: list[int], hosts: Sequence[str]) -> Layout:
    left = iter(taken)
    lines = tuple(replace(line, ranks=tuple(next(left) for _ in line.ranks)) for line in layout.pipelines)
    after = replace(layout, pipelines=lines)
    before, now = _hosts_of_layers(layout, hosts), _hosts_of_layers(after, hosts)
    parts = [layout.reason] if layout.reason else []
    if moved := sum(one != other for one, other in zip(given, taken, strict=True)):
        if before == now:
            why = "so that fewer bytes move"
        elif min(now) > 1:
            why = f"so that each layer is on {count(min(now), 'host')}"
        else:
            why = "so that fewer layers are on one host only"
        parts.append(f"{count(moved, 'worker')} {'changes' if moved == 1 else 'change'} places, {why}")
    if alone := [layer for layer, number in enumerate(now) if number == 1]:
        parts.append(f"all copies of {'layer' if len(alone) == 1 else 'layers'} {ranges_text(alone)} are on one host")
    return replace(after, reason="; ".join(parts))


def _hosts_of_layers(layout: Layout, hosts: Sequence[str]) -> list[int]:
    return [len({hosts[rank] for rank in layout.holders(layer)}) for layer in range(layout.layers)]
