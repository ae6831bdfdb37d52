"""Shares of a step's micro-batches: for pipelines by their speed, for equal workers in equal parts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from holdfast.errors import UsageError
from holdfast.plan.template import CLOSE, Template


def split(micro_batches: int, templates: Sequence[Template]) -> list[int]:
    """Return the number of micro-batches for each pipeline, so that the slowest pipeline ends as early as possible.

    ``micro_batches`` is the step's number, ``templates`` has one entry per pipeline. Each pipeline gets at least one.
    Raises UsageError if there are fewer micro-batches than pipelines.

    >>> from holdfast.plan.template import make_templates
    >>> from holdfast.plan.profile import uniform
    >>> made = make_templates(uniform(8), nodes=6, tolerate=1, minimum=2).by_nodes
    >>> split(12, [made[2], made[4]])
    [4, 8]
    """
    if micro_batches < len(templates):
        raise UsageError(
            f"{micro_batches} micro-batches cannot be shared by {len(templates)} pipelines",
            hint=f"the nearest number that can is {len(templates)}",
        )
    if len(templates) == 1:
        return [micro_batches]
    seconds = _least_seconds(micro_batches, templates)
    given = _shares(seconds, templates)
    _take_back(sum(given) - micro_batches, given, templates)
    return given


def _least_seconds(micro_batches: int, templates: Sequence[Template]) -> float:
    """Return the shortest step, in seconds, in which the pipelines together can compute all micro-batches.

    A pipeline that needs longer than that for a single micro-batch still counts with one: see ``_shares``.
    """
    low, high = 0.0, max(template.seconds(1) for template in templates)
    while sum(_shares(high, templates)) < micro_batches:
        low, high = high, 2 * high
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if sum(_shares(middle, templates)) >= micro_batches:
            high = middle
        else:
            low = middle
    return high


def _shares(seconds: float, templates: Sequence[Template]) -> list[int]:
    """Return how many micro-batches each pipeline can compute in a step of so many seconds, but at least one."""
    kinds = {id(template): template for template in templates}
    most = {kind: max(template.capacity(seconds), 1) for kind, template in kinds.items()}
    return [most[id(template)] for template in templates]


def _take_back(surplus: int, given: list[int], templates: Sequence[Template]) -> None:
    """Take ``surplus`` micro-batches away, each from the pipeline that is slowest at that moment."""
    order = [(-template.seconds(given[place]), place) for place, template in enumerate(templates) if given[place] > 1]
    heapq.heapify(order)
    for _ in range(surplus):
        _, place = heapq.heappop(order)
        given[place] -= 1
        if given[place] > 1:
            heapq.heappush(order, (-templates[place].seconds(given[place]), place))


def shares(micro_batches: int, workers: int) -> list[range]:
    """Return each worker's micro-batches of a step: consecutive ranges of equal length, give or take one.

    With more workers than micro-batches some ranges are empty.

    >>> shares(8, 3)
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    return [range(rank * micro_batches // workers, (rank + 1) * micro_batches // workers) for rank in range(workers)]
