"""The one place where training gives way to measuring: ``Run.steps`` asks here before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.run import Run

_instead: list[Callable[[Run], None]] = []


class Measured(SystemExit):
    """Ends the script where it would have begun to train. No failure: the measuring is done."""

    def __init__(self) -> None:
        super().__init__(0)


@contextmanager
def instead_of_training(measure: Callable[[Run], None]) -> Iterator[None]:
    """Within this, a ``Run`` that starts to train is given to ``measure``, and its script ends there.

    Measured on the spot, not afterwards: the script may take its data away when it is left.

    >>> seen = []
    >>> with instead_of_training(seen.append):
    ...     try:
    ...         about_to_train("a run")
    ...     except SystemExit as end:
    ...         print(seen, end.code)
    ['a run'] 0
    >>> about_to_train("a run")  # elsewhere nothing happens
    """
    _instead.append(measure)
    try:
        yield
    finally:
        _instead.remove(measure)


def about_to_train(run: Run) -> None:
    """Called by a ``Run`` before its first step; returns at once unless somebody wants to measure it."""
    if _instead:
        _instead[-1](run)
        raise Measured
