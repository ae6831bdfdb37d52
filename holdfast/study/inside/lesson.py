"""A lesson in a fresh process: to its end, or until it is saved, or from where it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.study.adapters.base import STEPS
from holdfast.study.inside.session import Session


def train(
    session: Session,
    *,
    seed: int,
    variant: str = "",
    restore: tuple[str, int, list[str]] | None = None,
    saves: list[tuple[int, str, list[str]]] = (),  # type: ignore[assignment]
) -> dict[str, Any]:
    """``restore``: (folder, step, parts) to begin from. ``saves``: (step, folder, parts), in the order of their steps;
    it trains on after each. The losses are those of the steps from the first one on."""
    lesson = session.adapter.lesson(seed, variant)
    step = 0
    if restore is not None:
        folder, step, parts = restore
        lesson.restore(Path(folder), frozenset(parts))
    first, losses = step, []
    for at, folder, parts in saves:
        losses += lesson.train(at - step)
        step = at
        lesson.save(Path(folder), frozenset(parts))
    losses += lesson.train(STEPS - step)
    return {"first": first, "losses": losses, "digests": lesson.digests()}
