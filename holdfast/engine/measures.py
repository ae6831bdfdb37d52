"""Measures of a data set: weighted means of functions of a micro-batch, all in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.checks import function, takes
from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.cluster.talk import Shared, add_up
from holdfast.data.fetch import Dataset
from holdfast.engine.engine import Engine, weight_of
from holdfast.engine.walk import Passed, evaluation_order, walk
from holdfast.errors import UsageError
from holdfast.words import a_kind

Measure = Callable[[Any, Any], Any]  # of output and target, or of model and batch: a number, or (number, weight)


def check_measures(measures: Mapping[str, Measure], *arguments: str) -> None:
    """Raise ``UsageError`` if these are not functions by name. ``arguments``: what they are called with."""
    if not measures:
        raise UsageError("there is nothing to measure: the dictionary is empty", hint="as in {'accuracy': accuracy}")
    for name, measure in measures.items():
        if not isinstance(name, str):
            raise UsageError(f"{name!r} is no name of a measure", hint="as in {'accuracy': accuracy}")
        function(name or "measure", measure, hint="as in {'accuracy': lambda output, target: …}")
        takes(name or "measure", measure, *arguments)


def evaluate(engine: Engine, data: Dataset, measures: Mapping[str, Measure], group: Group) -> dict[str, float]:
    """Return the weighted mean of each measure over a data set. All workers of the group call it, and share the work.

    Values are kept for each micro-batch and added up along the tree, so the means do not depend on who computed what.
    Raises ``Broken``, and ``UsageError`` for empty data or a measure that gives no number.
    """
    count = evaluation_order(engine, data).micro_batches(0)
    # Rows: for each measure its values, and the weights of these. Zero where others compute them.
    table = torch.zeros(2 * len(measures), count, dtype=torch.float64)

    def use(passed: Passed) -> None:
        weight = None if engine.weight is None else weight_of(engine.weight(passed.batch))
        for number, (name, measure) in enumerate(measures.items()):
            value, own = _value_of(name, measure(*passed.pair))
            counts = own if own is not None else float(passed.samples) if weight is None else weight
            # What has no weight does not count, even if it is NaN, as a mean over nothing is.
            table[2 * number, passed.index] = value * counts if counts else 0.0
            table[2 * number + 1, passed.index] = counts

    walk(engine, data, group, use)
    if group.team.size > 1:  # each rank has the value of its part, or all have the same
        said = group.team.exchange("the measures", table.tolist())
        table = torch.tensor(said, dtype=torch.float64).sum(0) / group.team.size
    shared = Shared(rows=table.tolist(), shares=engine.layout.shares_of_losses(count))
    nothing = torch.zeros(0, dtype=torch.float64, device=engine.model.device)
    sums = add_up(group, shared, nothing, tag=tags.SUM)
    return {name: _mean(sums[2 * number], sums[2 * number + 1]) for number, name in enumerate(measures)}


def _mean(value: float, weight: float) -> float:
    return value / weight if weight else float("nan")


def _value_of(name: str, given: Any) -> tuple[float, float | None]:
    """Return a measure's value, and the weight that it gives it; None: that of the micro-batch."""
    value, own = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as e:
        called = f"measure '{name}'" if name else "the measure"
        raise UsageError(
            f"{called} gave {a_kind(value)}, not a number",
            hint="the mean over the micro-batch, or (mean, weight); run.predict gives outputs themselves",
        ) from e
    return number, None if own is None else weight_of(own)
