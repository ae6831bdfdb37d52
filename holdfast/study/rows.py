"""Access to the rows of a study's results, for advice, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

Row = Mapping[str, Any]
Results = Mapping[str, Any]

AXES = ("cost", "formats", "scale", "determinism", "crash_safety", "limits")


def rows_of(results: Results, axis: str) -> list[Row]:
    """Return all rows of an axis, failed ones too; an axis that was not measured has none."""
    return list(results.get(axis) or ())


def failure(row: Row) -> str:
    """Return why a row has no numbers; an empty text if it has.

    >>> failure({"error": "gone"}), failure({"verdict": "failed", "says": "over"}), failure({"verdict": "safe"})
    ('gone', 'over', '')
    """
    return str(row.get("error") or (row["says"] if row.get("verdict") == "failed" else ""))


def error_text(words: str, most: int | None = None) -> str:
    """Return an error without TensorFlow's internals, cut after a word at ``most`` letters.

    >>> error_text("DataLossError: {{function_node x_device_/job:0}} Bad CRC in shard 0", 24)
    'DataLossError: Bad CRC …'
    """
    plain = re.sub(r"\{\{.*?(\}\}|$)\s*|\s*\[Op:.*", "", words)
    return plain if most is None else shorten(plain, most, placeholder=" …", break_on_hyphens=False)


def measured(results: Results, axis: str) -> list[Row]:
    """Return the rows of an axis that have numbers.

    >>> measured({"cost": [{"id": "a", "bytes": 1}, {"id": "b", "error": "it failed"}]}, "cost")
    [{'id': 'a', 'bytes': 1}]
    """
    return [row for row in rows_of(results, axis) if not failure(row)]


def middle(row: Row, name: str) -> float:
    """Return the median of a number of a row."""
    return float(row[name]["median"])


def overlap(one: Row, other: Row, name: str) -> bool:
    """Return whether the ranges of a number overlap, so that two rows cannot be told apart by it.

    >>> fast, slow = {"s": {"low": 1.0, "high": 2.0}}, {"s": {"low": 1.9, "high": 3.0}}
    >>> overlap(fast, slow, "s"), overlap(fast, {"s": {"low": 2.1, "high": 3.0}}, "s")
    (True, False)
    """
    return bool(one[name]["low"] <= other[name]["high"] and other[name]["low"] <= one[name]["high"])


def name_of(row: Row) -> str:
    """Return the name of a format or strategy, with its framework if the name does not tell it.

    >>> name_of({"framework": "jax", "format": "orbax"}), name_of({"framework": "holdfast", "format": "holdfast async"})
    ('orbax (jax)', 'holdfast async')
    """
    own = str(row["format"] if "format" in row else row["strategy"])
    quoted = f"“{own}”" if "," in own else own
    return own if own.startswith(row["framework"]) else f"{quoted} ({row['framework']})"


def blows(row: Row) -> int:
    """Return how often a format was hit; a save that was over before its kill is a try, but no hit."""
    return int(row.get("killed", row.get("tries")))


def bad_of(row: Row) -> int:
    """Return how many hits a format did not withstand."""
    return sum(int(row.get(name) or 0) for name in ("mixed", "nothing", "silent"))


def crash_text(row: Row) -> str:
    """Return a short text: how many hits went well, or how many did not.

    >>> crash_text({"verdict": "safe", "tries": 20}), crash_text({"verdict": "unsafe", "killed": 20, "nothing": 6})
    ('✓ 20', '✗ 6 of 20')
    """
    return f"✗ {bad_of(row)} of {blows(row)}" if bad_of(row) else f"✓ {blows(row)}"


def runs_of(row: Row) -> str:
    """Return a framework's name, with the variant of its lesson.

    >>> runs_of({"framework": "pytorch", "variant": "worker processes"})
    'pytorch, worker processes'
    """
    return ", ".join(filter(None, (row["framework"], row["variant"])))


def main_model(results: Results) -> str | None:
    """Return the model that advice is for: the largest whose cost was measured."""
    rows = measured(results, "cost")
    return str(max(rows, key=lambda row: float(row["bytes"]))["model"]) if rows else None


def main_costs(results: Results) -> list[Row]:
    """Return the cost rows of the main model, the least lost training time first."""
    rows = [row for row in measured(results, "cost") if row["model"] == main_model(results)]
    return sorted(rows, key=lambda row: middle(row, "lost_s"))


def same_format(rows: list[Row], row: Row, **also: Any) -> Row | None:
    """Return the first of ``rows`` about the same format as ``row``, with the fields ``also``."""
    wanted = {"framework": row["framework"], "format": row["format"], **also}
    return next((each for each in rows if all(each.get(name) == value for name, value in wanted.items())), None)
