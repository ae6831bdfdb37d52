"""The progress of a run: all that a joiner is told and a checkpoint keeps, beside layers and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """Progress of a run. It is the same on every worker whenever an operation is committed.

    >>> progress = Progress(step=3)
    >>> progress.take(Progress(step=4, saved=2).to_json())
    >>> progress.step, progress.saved
    (4, 2)
    """

    step: int = 0  # how many steps are committed; where replicas train apart, this one's
    label: dict[str, str] = field(default_factory=dict)  # what decides the weights (``run/label.py``)
    results: dict[str, Any] = field(default_factory=dict)  # evaluations and hashes that a joiner has missed
    profile: dict[str, Any] | None = None  # what the layers cost, as ``plan.profile.Profile`` writes it
    saved: int | None = None  # the step of the last checkpoint
    due: int | None = None  # the step of the next one; None: not decided yet
    resumed: int = 0  # how often the run was resumed
    seconds: float = 0.0  # trained before this start
    sync: dict[str, Any] | None = None  # when replicas that train apart last met, and what their policy knows

    def to_json(self) -> dict[str, Any]:
        """Return all that is set, as plain values; ``take`` reads them."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def take(self, values: Mapping[str, Any]) -> None:
        """Become what ``to_json`` gave elsewhere. Raises ``TypeError`` on fields that are not known."""
        self.__dict__.update(vars(Progress(**values)))
