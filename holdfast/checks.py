"""Checks of a user's settings. Each raises ``UsageError`` with a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import UsageError


def whole(name: str, value: object, *, least: int) -> None:
    """Raise ``UsageError`` if ``value`` is no whole number, or less than ``least``. ``name``: of the setting.

    >>> whole("every", 0, least=1)
    Traceback (most recent call last):
    holdfast.errors.UsageError: every=0 is no whole number from 1 on
    """
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r} is no whole number from {least} on")


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise ``UsageError`` if ``value`` is no number above ``low`` and at most ``high``. NaN is refused too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise UsageError(f"{name}={value!r} is not above {low:g} and at most {high:g}")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ``UsageError`` if ``value`` is none of the known words."""
    if value not in known:
        raise UsageError(f"{name}={value!r} is not known", hint=" | ".join(map(repr, known)))
