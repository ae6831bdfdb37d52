"""Parts of a plan as text: pipelines, layers, nodes, losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from holdfast.plan.outlook import Hit, Hits
from holdfast.plan.planner import NodeName
from holdfast.plan.template import TemplateStage
from holdfast.words import ranges_text


def runs(values: Iterable[int]) -> str:
    """Return numbers as text, with equal neighbours drawn together.

    >>> runs([5, 5, 5, 4])
    '3×5 4'
    """
    pairs = [(value, len(list(same))) for value, same in groupby(values)]
    return " ".join(f"{value}" if number == 1 else f"{number}×{value}" for value, number in pairs)  # noqa: RUF001


def pipelines_text(sizes: Iterable[int]) -> str:
    """Return how many pipelines there are of each size.

    >>> pipelines_text([3, 2, 3])
    '1 of 2, 2 of 3'
    """
    return ", ".join(f"{number} of {size}" for size, number in sorted(Counter(sizes).items()))


def gap_text(gap: float) -> str:
    """Return how far a template can be from the best one.

    >>> gap_text(0.0), gap_text(0.0042)
    ('proven', 'within 0.42%')
    """
    return "proven" if gap <= 0 else f"within {100 * gap:.2g}%"


def layers_text(stage: TemplateStage) -> str:
    """Return the layers of a stage, the last one included."""
    return f"{stage.first}" if stage.stop == stage.first + 1 else f"{stage.first}-{stage.stop - 1}"


def names_text(pipelines: Sequence[Sequence[NodeName]], most: int = 3) -> str:
    """Return the nodes of at most ``most`` pipelines; names with consecutive numbers are drawn together.

    >>> names_text([["n8", "n9", "n10", "n2"], ["a", "b"], ["c"]], most=2)
    'n8…n10 n2 | a b | …'
    """
    shown = []
    for nodes in pipelines[:most]:
        parts = [part for run in _successive(nodes) for part in ([f"{run[0]}…{run[-1]}"] if len(run) > 2 else run)]
        shown.append(" ".join(parts if len(parts) < 9 else [*parts[:3], "…", parts[-1]]))
    return " | ".join([*shown, "…"] if len(pipelines) > most else shown)


def _successive(nodes: Sequence[NodeName]) -> list[list[NodeName]]:
    """Return runs of names that differ only in a number that counts up."""
    runs: list[list[NodeName]] = []
    for node in nodes:
        name = node.rstrip("0123456789")
        number = node[len(name) :]
        if runs and number and runs[-1][-1] == f"{name}{int(number) - 1}":
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def hits_text(cases: Sequence[Hits]) -> str:
    """Describe losses with the same outcome: all of them if each hits one node, else the first.

    >>> hits_text([(Hit(3, 8, (0,)),), (Hit(3, 8, (2,)),), (Hit(1, 8, (0,)),)])
    'node 0 or 2 of a pipeline of 3; a pipeline of 1'
    >>> hits_text([(Hit(3, 8, (0, 1)), Hit(2, 8, (0, 1))), (Hit(3, 8, (0, 2)), Hit(2, 8, (0, 1)))])
    'nodes 0, 1 of a pipeline of 3 and a whole pipeline of 2; or 1 loss like it'
    """
    if all(len(hits) == 1 and len(hits[0].positions) == 1 for hits in cases):
        positions: dict[int, set[int]] = {}
        for (hit,) in cases:
            positions.setdefault(hit.nodes, set()).update(hit.positions)
        return "; ".join(_node_text(nodes, sorted(at)) for nodes, at in positions.items())
    same = Counter(cases[0])
    first = " and ".join(_hit_text(hit, number) for hit, number in same.items())
    others = len(cases) - 1
    return f"{first}; or {others} {'loss' if others == 1 else 'losses'} like it" if others else first


def _node_text(nodes: int, positions: Sequence[int]) -> str:
    if nodes < 2:
        return "a pipeline of 1" if nodes else "a spare node"
    if len(positions) == nodes:
        return f"any node of a pipeline of {nodes}"
    return f"node {ranges_text(positions, last=' or ')} of a pipeline of {nodes}"


def _hit_text(hit: Hit, number: int) -> str:
    one = "a" if number == 1 else f"each of {number}"
    plural = "" if number == 1 else "s"
    if hit.nodes == 0:
        return "a spare node" if number == 1 else f"{number} spare nodes"
    if len(hit.positions) == hit.nodes:
        whole = "a whole pipeline" if number == 1 else f"{number} whole pipelines"
        return f"{whole} of {hit.nodes}"
    nodes = "node" if len(hit.positions) == 1 else "nodes"
    return f"{nodes} {ranges_text(hit.positions)} of {one} pipeline{plural} of {hit.nodes}"
