"""The fixed binary tree along which a step's gradients are summed.

Node (level, k) stands for micro-batches [k·2^level, (k+1)·2^level), cut off at the step's last one.
Floating-point sums depend on their order; this order depends on the number of micro-batches alone, so
whoever computes the leaves, the root is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, order=True)
class Node:
    level: int
    index: int

    def span(self, leaves: int) -> range:
        """The leaves below.

        >>> Node(1, 2).span(5)
        range(4, 5)
        """
        return range(self.index << self.level, min((self.index + 1) << self.level, leaves))


def lift(node: Node, leaves: int) -> Node:
    """The highest node with the same leaves: at the right edge a node may be its parent's only child.

    >>> lift(Node(0, 4), 5)
    Node(level=2, index=1)
    """
    while node.index % 2 == 0 and node.index > 0 and (node.index + 1) << node.level >= leaves:
        node = Node(node.level + 1, node.index // 2)
    return node


class Adder(Generic[Value]):
    """Adds up consecutive nodes in tree order, holding as few partial sums as possible.

    ``add(left, right)`` returns the sum and may reuse ``left``. What is left over when the nodes of a
    worker are in are its *roots*, the largest subtrees that it owns whole.

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
        node = lift(node, self.leaves)
        while self.stack and node.index % 2 == 1 and self.stack[-1][0] == Node(node.level, node.index - 1):
            _, left = self.stack.pop()
            value = self._add(left, value)
            node = lift(Node(node.level + 1, node.index // 2), self.leaves)
        self.stack.append((node, value))


def roots(share: range, leaves: int) -> list[Node]:
    """The largest subtrees whose leaves all lie in ``share``, left to right.

    >>> roots(range(2, 5), 8)
    [Node(level=1, index=1), Node(level=0, index=4)]
    """
    adder: Adder[None] = Adder(leaves, lambda left, right: None)
    for leaf in share:
        adder.push(Node(0, leaf), None)
    return [node for node, _ in adder.stack]


def tree_sum(values: Sequence[float]) -> float:
    """The sum of numbers along the tree.

    >>> tree_sum([1.0, 2.0, 3.0])
    6.0
    """
    adder: Adder[float] = Adder(len(values), lambda left, right: left + right)
    for leaf, value in enumerate(values):
        adder.push(Node(0, leaf), value)
    return adder.stack[0][1] if adder.stack else 0.0
