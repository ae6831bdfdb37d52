"""Checks of a user's settings. Each raises ``UsageError`` with a sentence."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from holdfast.errors import UsageError


def whole(name: str, value: object, *, least: int) -> None:
    """Raise ``UsageError`` if ``value`` is no whole number, or less than ``least``. ``name``: of the setting.

    >>> whole("every", 0, least=1)
    Traceback (most recent call last):
    holdfast.errors.UsageError: every=0 is no whole number from 1 on (1, 2, 3 …)
    """
    if type(value) is not int or value < least:
        raise UsageError(
            f"{name}={value!r} is no whole number from {least} on", hint=f"{least}, {least + 1}, {least + 2} …"
        )


def to_whole(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` as an int. Raises ``UsageError`` as ``whole`` does, but takes NumPy's whole numbers too.

    >>> import numpy as np
    >>> to_whole("seed", np.int64(3), least=0)
    3
    """
    if not isinstance(value, bool):
        with suppress(TypeError):  # no whole number: ``whole`` says so
            value = operator.index(value)
    whole(name, value, least=least)
    return int(value)


def function(name: str, value: object, *, hint: str) -> None:
    """Raise ``UsageError`` with the hint if ``value`` cannot be called."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, not of type {type(value).__name__}", hint=hint)


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise ``UsageError`` if ``value`` is no number above ``low`` and at most ``high``. NaN is refused too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise UsageError(f"{name}={value!r} is not above {low:g} and at most {high:g}")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ``UsageError`` if ``value`` is none of the known words."""
    if value not in known:
        raise UsageError(f"{name}={value!r} is not known", hint=" | ".join(map(repr, known)))
