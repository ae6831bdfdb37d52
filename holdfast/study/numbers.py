"""Texts for the numbers of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from holdfast.words import seconds_text

UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def duration_text(seconds: float) -> str:
    """Return a time of any length in its two largest units.

    >>> [duration_text(each) for each in (0.0123, 12.5, 60, 754, 21600, 100_000)]
    ['12.3 ms', '12.5 s', '1 min', '12 min 34 s', '6 h', '1 d 4 h']
    """
    if seconds < 59.5:
        return seconds_text(seconds)
    for (unit, size), (finer, part) in pairwise(UNITS):
        count, rest = divmod(round(seconds / part), size // part)
        if count:
            return f"{count} {unit}" + (f" {rest} {finer}" if rest else "")
    return seconds_text(seconds)


def spread_text(spread: Mapping[str, float] | None) -> str:
    """Return a spread of seconds: the median, and the range in brackets, in the same unit.

    >>> spread_text({"median": 0.012, "low": 0.01, "high": 0.2}), spread_text({"median": 7.5, "low": 7.5, "high": 7.5})
    ('12 ms (10 to 200)', '7.5 s')
    """
    if spread is None:
        return ""
    unit, size = ("s", 1.0) if abs(spread["median"]) >= 0.1 else ("ms", 1e3)
    return _ranged(spread, size, f" {unit}")


def ratio_text(spread: Mapping[str, float] | None) -> str:
    """Return a spread of ratios.

    >>> ratio_text({"median": 2.5, "low": 2.25, "high": 2.9})
    '2.5x (2.25 to 2.9)'
    """
    return "" if spread is None else _ranged(spread, 1.0, "x")


def plain_text(spread: Mapping[str, float] | None) -> str:
    """Return a spread without a unit, which stands elsewhere."""
    return "" if spread is None else _ranged(spread, 1.0, "")


def _ranged(spread: Mapping[str, float], size: float, unit: str) -> str:
    median, low, high = (_number(size * spread[name]) for name in ("median", "low", "high"))
    return f"{median}{unit}" + ("" if low == high else f" ({low} to {high})")


def _number(value: float) -> str:
    """Return a number with three figures, never as a power.

    >>> _number(1234.5), _number(0.00123), _number(7.0)
    ('1,234', '0.00123', '7')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def share_text(share: float) -> str:
    """Return a share in per cent, with enough figures to tell it from all and from nothing.

    >>> share_text(0.99713), share_text(0.00042), share_text(0.081), share_text(2.2e-7)
    ('99.71%', '0.042%', '8.1%', 'less than 0.001%')
    """
    if 0 < share < 1e-5:
        return "less than 0.001%"
    return f"{share:.2%}" if share > 0.9 else f"{100 * share:.2g}%"


def listed(words: Sequence[str], most: int | None = None) -> str:
    """Return words in a list; beyond ``most`` only their number.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a', 'a, b and c', 'a, b and 2 more')
    """
    if most is not None and len(words) > most + 1:
        words = [*words[:most], f"{len(words) - most} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
