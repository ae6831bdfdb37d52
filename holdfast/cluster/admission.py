"""Admission: which workers cannot take part in a run, and why. Pure: it only remembers names and labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.cluster.labels import Label, difference
from holdfast.cluster.membership import GIVEN_UP, Member
from holdfast.cluster.muster import Worker


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a worker cannot take part."""

    code: int
    text: str
    refused: bool = False  # it differs from the others


class Admission:
    """The names that were given to processes, and the labels of what they train.

    >>> admission = Admission()
    >>> worker = Worker(
    ...     name="0.1", address="", port=0, incarnation="a", label={}, host="", fresh=True, heard=0.0
    ... )
    >>> admission.note(worker)
    >>> admission.is_another("0.1", "a"), admission.is_another("0.1", "b"), admission.is_another("0.2", "b")
    (False, True, False)
    """

    def __init__(self) -> None:
        self._labels: dict[str, Label] = {}  # those that differ, and fit together; by the first worker that had each
        self._names: dict[str, str] = {}  # the incarnation of each worker that was ever heard of

    def note(self, worker: Worker) -> None:
        """Note that a worker has its name."""
        self._names[worker.name] = worker.incarnation

    def note_members(self, members: Iterable[Member]) -> None:
        """Note the names of a generation's members."""
        self._names |= {member.worker: member.incarnation for member in members}

    def is_another(self, name: str, incarnation: str) -> bool:
        """Whether a name belongs to another process: an agent that was started anew counts its workers from 0 again."""
        return self._names.get(name, incarnation) != incarnation

    def compare(self, worker: Worker, *, alone: bool) -> Refusal | None:
        """Return how a newcomer differs from the others. ``alone``: nobody is left who trains something else."""
        if alone:
            self._labels.clear()
        for name, label in self._labels.items():
            if worker.label == label:
                worker.label = label
                return None
            if (said := difference(worker.label, label)) is not None:
                return _differs(worker.name, name, said)
        self._labels[worker.name] = worker.label
        return None


def unlike(joiner: Worker, member: Worker) -> Refusal | None:
    """Return why a joiner cannot take part beside a member; None if it can."""
    said = difference(joiner.label, member.label)
    return None if said is None else _differs(joiner.name, member.name, said)


def given_up(name: str, reason: str = "it counted as lost") -> Refusal:
    """Return why a worker cannot come back."""
    return Refusal(code=GIVEN_UP, text=f"worker {name} was given up: {reason}")


def _differs(name: str, other: str, said: str) -> Refusal:
    text = f"worker {name} does not train the same as {other}: {said}"
    return Refusal(code=2, text=f"{text} (start every worker with the same script and settings)", refused=True)
