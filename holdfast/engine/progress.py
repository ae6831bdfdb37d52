"""The progress of a run: all that a joiner is told and a checkpoint keeps, beside layers and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """Progress of a run. It is the same on every worker whenever an operation is committed, but for the rows.

    >>> progress = Progress(step=3)
    >>> progress.take(Progress(step=4, saved=2).to_json())
    >>> progress.step, progress.saved
    (4, 2)
    """

    step: int = 0  # how many steps are committed; where replicas train apart, this one's
    last: dict[str, Any] | None = None  # the last committed step; None before the first
    parts: list[dict[str, Any]] = field(default_factory=list)  # updates committed in the step that a ``Loop`` is in
    extra: int = 0  # updates committed beyond one for each step
    label: dict[str, str] = field(default_factory=dict)  # what decides the weights (``run/label.py``)
    results: dict[str, Any] = field(default_factory=dict)  # evaluations and hashes that a joiner has missed
    profile: dict[str, Any] | None = None  # what the layers cost, as ``plan.profile.Profile`` writes it
    saved: int | None = None  # the step of the last checkpoint
    due: int | None = None  # the step of the next one; None: not decided yet
    resumed: int = 0  # how often the run was resumed
    seconds: float = 0.0  # trained before this start
    rows: list[dict[str, Any]] = field(default_factory=list)  # last rows of the journal: the next first worker writes
    start: str = ""  # the generation that began at a checkpoint, or from nothing: steps since then are trained once
    data: dict[str, Any] | None = None  # positions in a stream, as its feed tells them; None: data have no positions
    left: dict[str, int] = field(default_factory=dict)  # loops that the script has left, and the steps it had then
    loop: str = ""  # the loop that the script is in, or was in last
    check: int | None = None  # the step after which workers compare what they hold; None: not decided yet
    sync: dict[str, Any] | None = None  # when replicas that train apart last met, and what their policy knows

    @property
    def update(self) -> int:
        """Number of committed updates: of the next one, by which its data and random numbers are found."""
        return self.step + self.extra

    @property
    def commits(self) -> int:
        """Number of updates committed in the step that a ``Loop`` is in; 0 between two steps."""
        return len(self.parts)

    def made(self, loss: float, facts: Mapping[str, Any], *, in_parts: bool = False) -> None:
        """Note that a step is committed. Its loss and ``facts`` are kept for scripts that ask for the last step.

        ``in_parts``: of a ``Loop``, whose steps may have several updates; from the second one on no step is added.
        """
        if in_parts and self.parts:
            self.extra += 1
        else:
            self.step += 1
        self.last = {"number": self.step - 1, "loss": loss, **facts}
        self.parts = [*self.parts, self.last] if in_parts else []

    def to_json(self) -> dict[str, Any]:
        """Return all that is set, as plain values; ``take`` reads them."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def shared(self) -> dict[str, Any]:
        """Return what ``to_json`` gives, without what each worker has for itself, for a checkpoint.

        Those are the journal's rows, with the seconds that it has measured, and the last step of a replica that trains
        apart, with its own loss.
        """
        own = {"rows"} if self.sync is None else {"rows", "last", "parts"}
        return {name: value for name, value in self.to_json().items() if name not in own}

    def take(self, values: Mapping[str, Any]) -> None:
        """Become what ``to_json`` gave elsewhere. Raises ``TypeError`` on fields that are not known."""
        self.__dict__.update(vars(Progress(**values)))
