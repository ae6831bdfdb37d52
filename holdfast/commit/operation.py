"""Operations: what all workers do together, exactly once, whoever is lost on the way.

A training step, an evaluation, a checkpoint, a meeting of replicas, the end: each is an object that lives with what
it does. It is *attempted* (computed and reduced, changing nothing that lasts), *voted* on in one small exchange, and
*applied* by whoever sees the vote succeed, or *dropped*. docs/recovery.md argues why that commits each exactly once.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from holdfast.cluster.group import Group
from holdfast.errors import UsageError

Kind = Literal["step", "evaluation", "save", "end", "checkpoint", "hash", "sync"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Operation(Protocol):
    """One operation. A subclass that has nothing to apply, or to drop, leaves these methods as they are."""

    @property
    def kind(self) -> Kind:
        """What it is: all workers must mean the same."""
        ...

    @property
    def step(self) -> int | None:
        """After which step it comes, where workers may have made different numbers of them."""
        return None

    def attempt(self, group: Group) -> list[float]:
        """Do this worker's part; return its values, zero where others compute them. ``Broken`` may fly through it.

        Nothing that lasts may change. May be called again, with another group, after ``drop``.
        """
        ...

    def apply(self, value: float) -> None:
        """Make the last attempt last: all have voted for it. ``value`` is the sum of all workers' values."""
        return

    def drop(self) -> None:
        """Forget the last attempt, as if it had never been."""
        return


class End(Operation):
    """The end of a script: nobody leaves before all have committed what came before it."""

    kind: Kind = "end"

    def attempt(self, group: Group) -> list[float]:
        return []


class Begin(Operation):
    """The first operation where steps are not voted on: from here on what survivors hold is the run's state."""

    kind: Kind = "sync"

    def attempt(self, group: Group) -> list[float]:
        return []


def name_of(operation: Operation) -> str:
    """Return what all workers must mean, in words."""
    return operation.kind if operation.step is None else f"{operation.kind} after step {operation.step}"


def mark_of(operation: Operation) -> int:
    """Return the same as a number. Its square is exact, and so is the sum of thousands of them."""
    return 1 + KINDS.index(operation.kind) + 16 * ((operation.step or 0) % 2**16)


def refuse_to_differ(marks: float, squares: float, size: int) -> None:
    """Raise ``UsageError``, on all workers, if the sums of everybody's mark and of their squares show different marks.

    >>> refuse_to_differ(7 + 7, 49 + 49, 2)
    >>> refuse_to_differ(6 + 8, 36 + 64, 2)
    Traceback (most recent call last):
    holdfast.errors.UsageError: workers disagree on what comes next (call run.steps, evaluate, save_model and sha256 \
on every worker, not only on the first)
    """
    if marks**2 != squares * size:
        raise UsageError(
            "workers disagree on what comes next",
            hint="call run.steps, evaluate, save_model and sha256 on every worker, not only on the first",
        )
