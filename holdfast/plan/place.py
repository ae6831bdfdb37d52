"""Assignment of nodes to the places of pipelines: the one that moves the fewest bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.plan.profile import LayerCost
from holdfast.plan.timeline import Vector

NodeName = str


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The node of each place, the bytes that nodes have to be sent in all, and the nodes left over."""

    nodes: tuple[NodeName, ...]
    moved_bytes: int
    spares: tuple[NodeName, ...]


def place(
    places: Sequence[range], nodes: Sequence[NodeName], held: Mapping[NodeName, range], layers: Sequence[LayerCost]
) -> Assignment:
    """Return the assignment that moves the fewest bytes.

    Each place is a range of layers. A node is sent the layers of its place that it does not hold yet (``held``).
    A node that holds just the layers of a place stays there: that is never worse, for what a holder of A lacks for C
    is at most what it lacks for B plus what a holder of B lacks for C. The other nodes are a minimum-cost assignment.

    >>> from holdfast.plan.profile import uniform
    >>> held = {"a": range(0, 2), "b": range(2, 4), "c": range(0, 1)}
    >>> place([range(0, 1), range(1, 4)], ["a", "b", "c"], held, uniform(4, weight_bytes=1).layers)
    Assignment(nodes=('c', 'b'), moved_bytes=3, spares=('a',))
    """
    sums = np.concatenate([[0], np.cumsum([layer.state_bytes for layer in layers])])
    taken: dict[int, NodeName] = {}
    left = sorted(nodes, key=lambda node: (natural(node), node))
    waiting: defaultdict[range, list[NodeName]] = defaultdict(list)
    for node in reversed(left):
        waiting[held.get(node, range(0))].append(node)
    for number, wanted in enumerate(places):
        if waiting.get(wanted):
            taken[number] = waiting[wanted].pop()
    stay = set(taken.values())
    left = [node for node in left if node not in stay]
    open_places = [number for number in range(len(places)) if number not in taken]
    moved = 0
    if open_places:
        cost = _missing([places[number] for number in open_places], [held.get(node, range(0)) for node in left], sums)
        rows, columns = _assign(cost)
        # Before any node holds a layer, all load from the seed or a checkpoint: nothing moves between nodes.
        moved = int(cost[rows, columns].sum()) if any(held.values()) else 0
        taken.update({open_places[row]: left[column] for row, column in zip(rows, columns, strict=True)})
    used = set(taken.values())
    return Assignment(
        nodes=tuple(taken[number] for number in range(len(places))),
        moved_bytes=moved,
        spares=tuple(node for node in left if node not in used),
    )


def _missing(places: Sequence[range], held: Sequence[range], sums: Vector) -> Vector:
    """Return the bytes that each node lacks for each place. Most ranges repeat, so each pair is computed once."""
    wanted, row = _kinds(places)
    there, column = _kinds(held)
    first, stop = wanted[:, :1], wanted[:, 1:]
    has_first = np.maximum(first, there[:, 0])
    has_stop = np.minimum(stop, there[:, 1])
    lacking = sums[stop] - sums[first] - (sums[np.maximum(has_first, has_stop)] - sums[has_first])
    spread: Vector = lacking[row][:, column]
    return spread


def _kinds(ranges: Sequence[range]) -> tuple[Vector, Vector]:
    """Return the different ranges, and the index among them of each given one."""
    kinds, which = np.unique([(each.start, each.stop) for each in ranges], axis=0, return_inverse=True)
    return kinds, which.reshape(-1)


def _assign(cost: Vector) -> tuple[Vector, Vector]:
    if (cost == cost[:, :1]).all():  # all nodes are alike: a fresh start
        return np.arange(cost.shape[0]), np.arange(cost.shape[0])
    # Imported only when needed: it takes a third of a second.
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    rows, columns = linear_sum_assignment(cost)
    return rows, columns


def natural(node: NodeName) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that orders names as people do, numbers by their value.

    >>> sorted(["n10", "n9", "n1"], key=natural)
    ['n1', 'n9', 'n10']
    """
    parts: list[tuple[int, int | str]] = []
    word = ""
    for letter in node:
        if word and letter.isdecimal() != word[-1].isdecimal():
            parts.append(_part(word))
            word = ""
        word += letter
    return (*parts, _part(word)) if word else tuple(parts)


def _part(word: str) -> tuple[int, int | str]:
    return (0, int(word)) if word.isdecimal() else (1, word)
