"""The one place where training gives way to measuring: a ``Run`` asks here before it trains, evaluates or writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.run.run import Run


class Measured(SystemExit):
    """Ends the script where it would have begun to train. No failure: the measuring is done."""

    def __init__(self) -> None:
        super().__init__(0)


class _Wish:
    """Somebody wants to measure the next run that starts to train, and the script to end there."""

    def __init__(self, measure: Callable[[Run], None]) -> None:
        self.measure = measure
        self.is_granted = False


_wishes: list[_Wish] = []
_measured: list[Run] = []  # used up: their weights are nobody's any more


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
    >>> about_to_train("another run")  # elsewhere nothing happens
    """
    wish = _Wish(measure)
    _wishes.append(wish)
    try:
        yield
    finally:
        _wishes.remove(wish)


def about_to_train(run: Run) -> None:
    """Called by a ``Run`` before its first step; returns at once unless somebody wants to measure it."""
    end_if_measured(run)
    if _wishes:
        _wishes[-1].is_granted = True
        _measured.append(run)  # before it is measured: that may fail half-way
        _wishes[-1].measure(run)
        raise Measured


def end_if_measured(run: Run) -> None:
    """A script that goes on after it was measured (``finally:``, ``except:``) ends again where it needs its run."""
    if run in _measured or (_wishes and _wishes[-1].is_granted):
        raise Measured


def may_write(run: Run, path: str | os.PathLike[str]) -> bool:
    """Whether a run may write a file: not one that is measured, before, while or after."""
    end_if_measured(run)
    if _wishes:
        print(f"holdfast: {os.fspath(path)} is not written: the script is only measured", file=sys.stderr)
    return not _wishes
