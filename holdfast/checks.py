"""Checks of a user's settings. Each raises ``UsageError`` with a sentence."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from holdfast.errors import UsageError

P = ParamSpec("P")
Kind = TypeVar("Kind")


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


def takes(name: str, value: Any, *arguments: str) -> None:
    """Raise ``UsageError`` if a function cannot be called with these arguments, as far as its signature tells.

    >>> takes("loss", lambda output: output, "output", "target")
    Traceback (most recent call last):
    holdfast.errors.UsageError: loss cannot be called with (output, target) (loss(output, target) is what a run calls)
    """
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function of C has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as e:
        given = f"({', '.join(arguments)})"
        raise UsageError(f"{name} cannot be called with {given}", hint=f"{name}{given} is what a run calls") from e


def to_norm(name: str, value: Any) -> float | None:
    """Return a norm to clip to, or None. Raises ``UsageError`` if it is neither.

    >>> to_norm("clip_norm", 0)
    Traceback (most recent call last):
    holdfast.errors.UsageError: clip_norm=0 is no norm to clip to (a number above 0, or None)
    """
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf
    ):
        raise UsageError(f"{name}={value!r} is no norm to clip to", hint="a number above 0, or None")
    return None if value is None else float(value)


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise ``UsageError`` if ``value`` is no number above ``low`` and at most ``high``. NaN is refused too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise UsageError(f"{name}={value!r} is not above {low:g} and at most {high:g}")


def truth(name: str, value: object) -> None:
    """Raise ``UsageError`` if ``value`` is neither True nor False: a text such as "no" would count as True.

    >>> truth("strict", "no")
    Traceback (most recent call last):
    holdfast.errors.UsageError: strict='no' is neither True nor False
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is neither True nor False")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ``UsageError`` if ``value`` is none of the known words."""
    if value not in known:
        raise UsageError(f"{name}={value!r} is not known", hint=" | ".join(map(repr, known)))


def near(name: str, known: Sequence[str]) -> str:
    """Return a hint for an argument that is not known: what it may be meant for.

    >>> near("colate", ["dataset", "collate"])
    'collate=…'
    """
    return [*(f"{other}=…" for other in get_close_matches(name, known, n=1)), "docs/run.md has them all"][0]


def in_words(*, hint: Callable[[str, Sequence[str]], str] = near) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor refuse wrong names, missing ones and too many values without one, with ``UsageError``.

    ``hint``: a function of a wrong name and the known ones.
    """

    def wrap(init: Callable[P, None]) -> Callable[P, None]:
        arguments = list(inspect.signature(init).parameters.values())
        known = [each.name for each in arguments[1:]]
        unnamed = [each.name for each in arguments if each.kind is not each.KEYWORD_ONLY]  # ``self`` among them
        needed = [each.name for each in arguments[1:] if each.default is each.empty]

        @functools.wraps(init)
        def checked(*args: P.args, **named: P.kwargs) -> None:
            kind = type(args[0]).__name__
            if len(args) > len(unnamed):
                one = f"{next(each for each in known if each not in unnamed)}=…"
                raise UsageError(f"the arguments of a {kind} are given by name", hint=f"{kind}({one})")
            for name in named:
                if name not in known:
                    raise UsageError(f"a {kind} has no argument {name!r}", hint=hint(name, known))
            for name in needed:
                if name not in named and name not in unnamed[: len(args)]:
                    raise UsageError(f"a {kind} needs {name}=", hint=f"{kind}({name}=…)")
            init(*args, **named)

        return checked

    return wrap


def by_name(kind: type[Kind]) -> type[Kind]:
    """Let a dataclass of settings refuse arguments as ``in_words`` does.

    >>> from dataclasses import dataclass
    >>> @by_name
    ... @dataclass(kw_only=True)
    ... class Placement:
    ...     stages: int = 1
    >>> Placement(stage=2)
    Traceback (most recent call last):
    holdfast.errors.UsageError: a Placement has no argument 'stage' (stages=…)
    """
    kind.__init__ = in_words()(kind.__init__)  # type: ignore[method-assign]
    return kind
