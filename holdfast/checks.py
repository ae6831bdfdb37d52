"""What a user gives in settings, refused in words where it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import UsageError


def whole(name: str, value: object, *, least: int) -> None:
    """Refuses what is no whole number, or too small.

    >>> whole("every", 0, least=1)
    Traceback (most recent call last):
    holdfast.errors.UsageError: every=0 is no whole number from 1 on
    """
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r} is no whole number from {least} on")


def between(name: str, value: object, low: float, high: float) -> None:
    """Refuses what is not above ``low`` and at most ``high``; nan is never."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise UsageError(f"{name}={value!r} is not above {low:g} and at most {high:g}")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is not known", hint=" | ".join(map(repr, known)))
