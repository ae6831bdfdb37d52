"""Which units of state a worker holds, as they should be."""

from __future__ import annotations

from collections.abc import Iterable


class Holdings:
    """The units that count as this worker's. Memory alone is not enough: a copy that broke off leaves it unfilled.

    >>> holdings = Holdings([0, 1, 2])
    >>> holdings.take_back({0}, torn={2})
    >>> sorted(holdings.held), sorted(holdings.undone)
    ([0, 1], [0, 2])
    """

    def __init__(self, units: Iterable[int]) -> None:
        self.held: set[int] = set(units)
        self.undone: set[int] = set()  # taken back since the last vote that succeeded: right but for rounding

    def take_back(self, undone: set[int], *, torn: set[int]) -> None:
        """Note an undone update. What is torn is neither old nor new: it must come from somebody else."""
        self.undone |= undone | torn
        self.held -= torn

    def arrived(self, unit: int, *, exact: bool = True) -> None:
        """Note that a unit has come, complete, from somebody who holds it. ``exact``: its copy was never taken back."""
        self.held.add(unit)
        self.undone.discard(unit) if exact else self.undone.add(unit)
