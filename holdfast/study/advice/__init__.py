"""Advice that follows from a study: sentences, each with the rows that it rests on, the most important first."""

from __future__ import annotations

from typing import Any

from holdfast.study.advice.cost_advice import on_compression, on_durability, on_stalls
from holdfast.study.advice.crash_advice import on_damage, on_kills
from holdfast.study.advice.format_advice import on_format, on_frameworks
from holdfast.study.advice.interval_advice import on_interval
from holdfast.study.advice.restart_advice import on_restart
from holdfast.study.advice.scale_advice import on_scale
from holdfast.study.rows import Results

THEMES = (
    on_format,
    on_interval,
    on_restart,
    on_kills,
    on_durability,
    on_frameworks,
    on_damage,
    on_scale,
    on_compression,
    on_stalls,
)


def advise(results: Results) -> list[dict[str, Any]]:
    """Return all advice: objects with ``axis``, ``sentence`` and ``rests_on``, the ids of at least one row."""
    return [each.to_json() for theme in THEMES for each in theme(results)]
