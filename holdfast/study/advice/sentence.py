"""One piece of advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.study.rows import Row


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``rests_on``: the rows whose numbers it names or weighs."""

    axis: str
    sentence: str
    rests_on: Sequence[Row]

    def __post_init__(self) -> None:
        assert self.rests_on, f"nothing to rest on: {self.sentence}"

    def to_json(self) -> dict[str, Any]:
        ids = dict.fromkeys(str(row["id"]) for row in self.rests_on)
        return {"axis": self.axis, "sentence": self.sentence, "rests_on": list(ids)}
