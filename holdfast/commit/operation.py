"""Operations: things that all workers do together, exactly once, even if some workers are lost meanwhile.

A training step, an evaluation, a checkpoint, a meeting of replicas and the end of a script are operations. Each is an
object, defined beside the code that does the work. It is *attempted* (computed and reduced, changing nothing that
lasts), *voted* on in one small exchange, and then *applied* by each worker that sees the vote succeed, or *dropped*.
docs/recovery.md argues why that commits each operation exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol, get_args

import torch
import xxhash

from holdfast.cluster import tags
from holdfast.cluster.compose import CALL_ON_EVERY_WORKER, hint_of_joiners
from holdfast.cluster.group import Group
from holdfast.errors import UsageError

Kind = Literal["step", "evaluation", "save", "end", "checkpoint", "hash", "sync", "prediction", "check"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Operation(Protocol):
    """One operation. A subclass that has nothing to apply, or nothing to drop, inherits these empty methods."""

    @property
    def kind(self) -> Kind:
        """The kind of operation. The vote fails with ``UsageError`` if workers mean different kinds."""
        ...

    @property
    def step(self) -> int | None:
        """The step after which it comes, where replicas train apart and may have made different numbers of steps."""
        return None

    @property
    def asked(self) -> str:
        """What is asked for in more words, such as the optimizers that step. The vote fails if workers differ in it."""
        return ""

    def attempt(self, group: Group) -> list[float]:
        """Do this worker's part; return its values, zero where others compute them. May raise ``Broken``.

        It must change nothing that lasts. It may be called again, with another group, after ``drop``.
        """
        ...

    @property
    def shares(self) -> Sequence[range] | None:
        """The values that each rank has computed in the last attempt; None: they are few, and any rank may have any."""
        return None

    def apply(self, value: float) -> None:
        """Make the result of the last attempt final: all have voted for it. ``value``: the sum of all values."""
        return

    def drop(self) -> None:
        """Forget the last attempt, as if it had never happened."""
        return


class End(Operation):
    """The end of a script. Its vote keeps every worker until all have committed everything before it."""

    kind: Kind = "end"

    def attempt(self, group: Group) -> list[float]:
        return []


class Begin(Operation):
    """The first operation of a run whose steps are not voted on. After it, the survivors' state is the run's state."""

    kind: Kind = "sync"

    def attempt(self, group: Group) -> list[float]:
        return []


def name_of(operation: Operation) -> str:
    """Return the operation's kind and step as text."""
    return operation.kind if operation.step is None else f"{operation.kind} after step {operation.step}"


def mark_of(operation: Operation) -> int:
    """Return the operation's kind, its step and what is asked for as a number.

    It is small enough that the sum of thousands of its squares is exact in float64.
    """
    asked = xxhash.xxh3_64_intdigest(operation.asked.encode()) if operation.asked else 0
    return 1 + KINDS.index(operation.kind) + 16 * (((operation.step or 0) + asked) % 2**16)


def refuse_to_differ(marks: float, squares: float, size: int, joiners: Collection[str] = ()) -> None:
    """Raise ``UsageError`` on all workers if they voted on different operations.

    ``marks`` is the sum of all marks, ``squares`` that of their squares, ``size`` the number of workers; ``joiners``
    came after the begin: what their scripts keep in plain variables is not what the others' have. All marks are equal
    exactly if marks² = squares · size (Cauchy-Schwarz), so a sum is enough to find a difference.

    >>> refuse_to_differ(7 + 7, 49 + 49, 2)
    >>> refuse_to_differ(6 + 8, 36 + 64, 2)
    Traceback (most recent call last):
    holdfast.errors.UsageError: workers disagree on what comes next (call run.steps, step.commit, evaluate, predict, \
save_model and sha256 on every worker alike, not only on the first)
    """
    if marks**2 != squares * size:
        raise UsageError(
            "workers disagree on what comes next", hint=hint_of_joiners(joiners) if joiners else CALL_ON_EVERY_WORKER
        )


def agree(
    operation: Operation,
    group: Group,
    device: torch.device,
    *,
    size: int,
    asked: str = "",
    joiners: Collection[str] = (),
) -> None:
    """Find out in an attempt whether all workers do the same, before they exchange results of some size.

    ``asked``: what is asked for, such as the names of measures. ``joiners``: as for ``refuse_to_differ``. Raises
    ``UsageError`` if one does something else, has another ``size`` or asks for something else. A worker whose others do
    not agree on anything at the moment waits here until the coordinator stops the run: it sees from their heartbeats
    that they do different things.
    """
    mark = mark_of(operation)
    text = xxhash.xxh3_64_intdigest(asked.encode()) % 2**20  # small enough for exact squares, as a mark is
    told = torch.tensor([mark, mark**2, size, size**2, text, text**2], dtype=torch.float64, device=device)
    group.sum(told, tag=tags.AGREE)
    marks, squares, sizes, size_squares, texts, text_squares = told.tolist()
    refuse_to_differ(marks, squares, group.size, joiners)
    if sizes**2 != size_squares * group.size or texts**2 != text_squares * group.size:
        raise UsageError(
            f"workers ask for different things ({operation.kind})",
            hint="the same data, measures and weights on every worker",
        )
