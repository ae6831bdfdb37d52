"""A piece of advice: the type that all themes return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.study.rows import Row


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A sentence of advice on an axis. ``rests_on``: the rows whose numbers it names or weighs; at least one."""

    axis: str
    sentence: str
    rests_on: Sequence[Row]

    def __post_init__(self) -> None:
        assert self.rests_on, f"nothing to rest on: {self.sentence}"

    def to_json(self) -> dict[str, Any]:
        """Return it as ``report.json`` has it, with ids in place of rows."""
        ids = dict.fromkeys(str(row["id"]) for row in self.rests_on)
        return {"axis": self.axis, "sentence": self.sentence, "rests_on": list(ids)}
