"""The errors of holdfast. Each class has the exit code that commands end with."""

from __future__ import annotations

from collections.abc import Collection


class HoldfastError(Exception):
    """An error with a sentence on what is wrong, and a hint on what to do.

    >>> str(HoldfastError("the disk is full", hint="free some space"))
    'the disk is full (free some space)'
    """

    exit_code = 1
    refused = False  # whether it concerns this worker alone, which cannot join: the others train on without it

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)


class UsageError(HoldfastError, ValueError):
    """Holdfast was called with an argument or a setting that it cannot work with."""

    exit_code = 2


class CheckpointError(HoldfastError):
    """A checkpoint is missing, incomplete, damaged, or does not fit what it is loaded into."""

    exit_code = 4


class TooFewWorkers(HoldfastError):
    """The workers that are left cannot hold the model."""

    exit_code = 3


class LossNotFinite(HoldfastError):
    """The loss became NaN or infinite. Doing the step again would give the same."""


class Broken(Exception):
    """The current generation cannot finish its operation, because a worker was lost. It never reaches the user.

    ``unreached``: members whose machines do not answer, as far as this worker can tell. ``refused``: those that refuse.
    """

    def __init__(self, reason: str, *, unreached: Collection[str] = (), refused: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.unreached, self.refused = tuple(unreached), tuple(refused)
