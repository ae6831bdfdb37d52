"""The fixed binary tree along which a step's gradients are summed.

Node (level, k) is the sum over micro-batches [k·2^level, (k+1)·2^level), cut off at the step's last one.
Floating-point sums depend on their order. This order depends only on the number of micro-batches, so the root is the
same to the last bit whichever workers compute the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, order=True)
class Node:
    """A node of the tree: number ``index`` from the left, ``level`` above the leaves."""

    level: int
    index: int

    def span(self, leaves: int) -> range:
        """Return the leaves below, of so many in all.

        >>> Node(1, 2).span(5)
        range(4, 5)
        """
        return range(self.index << self.level, min((self.index + 1) << self.level, leaves))


def lift(node: Node, leaves: int) -> Node:
    """Return the highest node with the same leaves: at the right edge a node may be its parent's only child.

    >>> lift(Node(0, 4), 5)
    Node(level=2, index=1)
    """
    while node.index % 2 == 0 and node.index > 0 and (node.index + 1) << node.level >= leaves:
        node = Node(node.level + 1, node.index // 2)
    return node


class Adder(Generic[Value]):
    """Adds up consecutive nodes in tree order, holding as few partial sums as possible.

    ``add(left, right)`` returns the sum and may reuse ``left``. When all nodes of a worker have been pushed, ``stack``
    holds its *roots*: the sums of the largest subtrees whose leaves are all its own.

    >>> adder = Adder(5, lambda left, right: f"({left}+{right})")
    >>> for leaf in range(5): adder.push(Node(0, leaf), str(leaf))
    >>> [value for _, value in adder.stack]
    ['(((0+1)+(2+3))+4)']
    """

    def __init__(self, leaves: int, add: Callable[[Value, Value], Value]) -> None:
        self.leaves = leaves
        self.stack: list[tuple[Node, Value]] = []
        self._add = add

    def push(self, node: Node, value: Value) -> None:
        """Add the value of the next node to the right."""
        node = lift(node, self.leaves)
        while self.stack and node.index % 2 == 1 and self.stack[-1][0] == Node(node.level, node.index - 1):
            _, left = self.stack.pop()
            value = self._add(left, value)
            node = lift(Node(node.level + 1, node.index // 2), self.leaves)
        self.stack.append((node, value))


def combine(
    parts: Iterable[tuple[Node, Value]], leaves: int, add: Callable[[Value, Value], Value]
) -> list[tuple[Node, Value]]:
    """Add up nodes wherever both children of a node are there; return what is left, from left to right.

    The parts may come in any order: a node's value is always that of its left child plus that of its right one.

    >>> combine([(Node(0, 3), "3"), (Node(0, 0), "0"), (Node(0, 2), "2")], 4, lambda left, right: f"({left}+{right})")
    [(Node(level=0, index=0), '0'), (Node(level=1, index=1), '(2+3)')]
    """
    found: dict[Node, Value] = {}
    for node, value in parts:
        node = lift(node, leaves)
        while (sibling := Node(node.level, node.index ^ 1)) in found:
            other = found.pop(sibling)
            value = add(other, value) if node.index % 2 else add(value, other)
            node = lift(Node(node.level + 1, node.index // 2), leaves)
        found[node] = value
    return sorted(found.items(), key=lambda item: item[0].index << item[0].level)


def roots(share: range, leaves: int) -> list[Node]:
    """Return the largest subtrees whose leaves all lie in ``share``, left to right.

    >>> roots(range(2, 5), 8)
    [Node(level=1, index=1), Node(level=0, index=4)]
    """
    adder: Adder[None] = Adder(leaves, lambda left, right: None)
    for leaf in share:
        adder.push(Node(0, leaf), None)
    return [node for node, _ in adder.stack]


def tree_sum(values: Sequence[float]) -> float:
    """Return the sum of numbers, added in the order of the tree; 0.0 for none.

    >>> tree_sum([1.0, 2.0, 3.0])
    6.0
    """
    adder: Adder[float] = Adder(len(values), lambda left, right: left + right)
    for leaf, value in enumerate(values):
        adder.push(Node(0, leaf), value)
    return adder.stack[0][1] if adder.stack else 0.0
