"""The settings that trainers of other libraries hand on to their ``Loop``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from holdfast.engine.engine import Weight
from holdfast.engine.numerics import Numerics
from holdfast.recovery.resume import Checkpoints


class LoopSettings(TypedDict, total=False):
    """Settings of a trainer that are those of ``holdfast.Loop``, beside ``global_batch``."""

    seed: int
    weight: Weight | None
    numerics: Literal["exact", "fast"] | Numerics
    checkpoint: str | os.PathLike[str] | Checkpoints | None


def divided(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is given for the ``Loop``, with its numerics in full, and what is not.

    >>> settings, others = divided({"seed": 3, "cpu": True})
    >>> settings["seed"], settings["numerics"].mode, others
    (3, 'exact', {'cpu': True})
    """
    settings = {name: value for name, value in given.items() if name in LoopSettings.__annotations__}
    settings["numerics"] = Numerics.of(given.get("numerics", "exact"))
    return settings, {name: value for name, value in given.items() if name not in settings}
