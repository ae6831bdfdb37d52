"""The errors of holdfast. Each class has the exit code that commands end with."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from types import TracebackType


class HoldfastError(Exception):
    """An error with a sentence on what is wrong, and a hint on what to do.

    >>> str(HoldfastError("the disk is full", hint="free some space"))
    'the disk is full (free some space)'
    """

    exit_code = 1
    refused = False  # whether it concerns this worker alone, which cannot join: the others train on without it

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        if sys.excepthook is sys.__excepthook__:  # not a notebook's, nor one that the user has chosen
            sys.excepthook = _show


def wants_traceback() -> bool:
    """Whether errors of holdfast are shown with their traceback: HOLDFAST_TRACEBACK=1, a debugger, or ``python -i``."""
    asked = os.environ.get("HOLDFAST_TRACEBACK", "0") not in ("", "0")
    return asked or sys.gettrace() is not None or bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show the exception that ends a script: one of holdfast as a sentence, with its exit code; others as ever.

    ``python train.py`` so says the same as ``holdfast run train.py``. It takes the place of ``sys.excepthook`` when the
    first error of holdfast is made, so that a script without one keeps what it had.
    """
    if not isinstance(error, HoldfastError) or wants_traceback():
        sys.__excepthook__(kind, error, trace)
    else:
        from holdfast.screen import visible

        print(f"holdfast: {visible(str(error))}", file=sys.stderr, flush=True)
    if isinstance(error, HoldfastError) and not sys.flags.interactive:
        raise SystemExit(error.exit_code)  # Python takes the exit code from here


class UsageError(HoldfastError, ValueError):
    """Holdfast was called with an argument or a setting that it cannot work with."""

    exit_code = 2


class CheckpointError(HoldfastError):
    """A checkpoint is missing, incomplete, damaged, or does not fit what it is loaded into."""

    exit_code = 4


class NoCheckpoint(CheckpointError):
    """There is no checkpoint where one was asked for: no folder, an empty one, or a save that was not completed.

    A script that may begin anew catches this one alone: a damaged checkpoint must not be taken for none.

    >>> from holdfast.checkpoint import load
    >>> try:
    ...     load("runs/new", {"step": 0})
    ... except NoCheckpoint:
    ...     print("from the begin")
    from the begin
    """


class TooFewWorkers(HoldfastError):
    """The workers that are left cannot hold the model."""

    exit_code = 3


class Drift(HoldfastError):
    """Workers hold different values of what must be equal."""


class LossNotFinite(HoldfastError):
    """The loss became NaN or infinite. Doing the step again would give the same."""


class Broken(Exception):
    """The current generation cannot finish its operation, because a worker was lost. It never reaches the user.

    ``unreached``: members whose machines do not answer, as far as this worker can tell. ``refused``: those that refuse.
    """

    def __init__(self, reason: str, *, unreached: Collection[str] = (), refused: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.unreached, self.refused = tuple(unreached), tuple(refused)
