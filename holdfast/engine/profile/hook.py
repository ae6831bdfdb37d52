"""The place where training gives way to measuring: a ``Run`` asks here before it trains, evaluates or writes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.run.training import Training

logger = logging.getLogger(__name__)


class ScriptMeasured(SystemExit):
    """Ends the script where it would have begun to train. Exit code 0: the measuring is done, nothing failed."""

    def __init__(self) -> None:
        super().__init__(0)


class _Request:
    """A request to measure the next run that starts to train, and to end its script there."""

    def __init__(self, measure: Callable[[Training], None]) -> None:
        self.measure = measure
        self.is_granted = False  # whether a run has been measured for it


_requests: list[_Request] = []  # the innermost last
_measured: list[Training] = []  # runs that were measured: their weights and optimizers are used up


@contextmanager
def instead_of_training(measure: Callable[[Training], None]) -> Iterator[None]:
    """Within this context, give a ``Run`` that starts to train to ``measure`` and end its script there.

    ``measure`` is called on the spot, not afterwards: the script may close its data when it is left.

    >>> seen = []
    >>> with instead_of_training(seen.append):
    ...     try:
    ...         about_to_train("a run")
    ...     except SystemExit as end:
    ...         print(seen, end.code)
    ['a run'] 0
    >>> about_to_train("another run")  # elsewhere nothing happens
    """
    request = _Request(measure)
    _requests.append(request)
    try:
        yield
    finally:
        _requests.remove(request)


def about_to_train(run: Training) -> None:
    """Measure the run if that was requested, then raise ``ScriptMeasured``; else return at once.

    A ``Run`` calls this before its first step.
    """
    end_if_measured(run)
    if _requests:
        _requests[-1].is_granted = True
        _measured.append(run)  # before it is measured: that may fail half-way
        _requests[-1].measure(run)
        raise ScriptMeasured


def end_if_measured(run: Training) -> None:
    """Raise ``ScriptMeasured`` if the script has been measured.

    A script may go on after that (``finally:``, ``except:``). It ends again as soon as it needs its run.
    """
    if run in _measured or (_requests and _requests[-1].is_granted):
        raise ScriptMeasured


def may_write(run: Training, path: str | os.PathLike[str]) -> bool:
    """Return whether a run may write the file ``path``. A run that is to be measured may not, and the user is told.

    Raises ``ScriptMeasured`` if the script has been measured already.
    """
    end_if_measured(run)
    if _requests:
        logger.warning("%s is not written: the script is only measured", os.fspath(path))
    return not _requests
