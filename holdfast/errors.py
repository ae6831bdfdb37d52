"""What can go wrong, in words a user can act on. Each class carries the exit code of the command."""

from __future__ import annotations


class HoldfastError(Exception):
    """An error with a sentence that says what is wrong and a hint that says what to do.

    >>> str(HoldfastError("the disk is full", hint="free some space"))
    'the disk is full (free some space)'
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)


class UsageError(HoldfastError, ValueError):
    """Holdfast was called with something it cannot work with."""

    exit_code = 2


class CheckpointError(HoldfastError):
    """A checkpoint is missing, incomplete, damaged, or does not fit what it is loaded into."""

    exit_code = 4


class TooFewWorkers(HoldfastError):
    """The workers that are left cannot hold the model."""

    exit_code = 3


class LossNotFinite(HoldfastError):
    """The loss became NaN or infinite; redoing the step would give the same."""


class Broken(Exception):
    """The current generation cannot finish its operation: somebody was lost. Never reaches the user."""
