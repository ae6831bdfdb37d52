"""Conversion of numbers, sizes and times to text for people, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby

from holdfast.errors import UsageError


def size_text(size: float) -> str:
    """Return a number of bytes with its unit.

    >>> size_text(12), size_text(1_240_000_000), size_text(999_900)
    ('12 B', '1.24 GB', '1 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":  # 999.5 would be shown as 1e+03
            break
        size /= 1000
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def parse_size(text: str) -> int:
    """Read a number of bytes with its unit. Raises UsageError if it is none.

    >>> parse_size("2GB"), parse_size("512 MiB"), parse_size("100")
    (2000000000, 536870912, 100)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kMGT]?)(i?)B?)?\s*", text, re.IGNORECASE)
    if found is None:
        raise UsageError(f"{text!r} is no number of bytes", hint="as in 2GB or 512MiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper()))


def seconds_text(seconds: float) -> str:
    """Return a duration with its unit.

    >>> seconds_text(0.00042), seconds_text(0.0123), seconds_text(12.345)
    ('0.42 ms', '12.3 ms', '12.3 s')
    """
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, name: str = "") -> float:
    """Read a duration and return its seconds; ``name`` is for the message. Raises UsageError if it is none.

    >>> parse_duration("90s"), parse_duration("1.5h"), parse_duration("2d")
    (90.0, 5400.0, 172800.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(s|m|h|d)", text)
    if not found:
        raise UsageError(
            f"{f'{name}={text}' if name else repr(text)} is not a duration", hint="as in 90s, 10m, 6h or 2d"
        )
    return float(found[1]) * _UNITS[found[2]]


def duration_code(seconds: float) -> str:
    """Return a duration as ``parse_duration`` reads it, in the largest unit that leaves no fraction.

    >>> duration_code(864000.0), duration_code(5400.0), duration_code(0.5)
    ('10d', '90m', '0.5s')
    """
    for unit in ("d", "h", "m"):
        if not seconds % _UNITS[unit]:
            return f"{int(seconds / _UNITS[unit])}{unit}"
    return f"{seconds:g}s"


def time_text(when: float, *, short: bool = False) -> str:
    """Return a time (seconds since 1970) on this machine's clock; ``short``: without the year."""
    return datetime.fromtimestamp(when).strftime("%m-%d %H:%M" if short else "%Y-%m-%d %H:%M") if when else ""


def count(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural where that is due.

    >>> count(1, "node"), count(1200, "micro-batch"), count(2, "copy")
    ('1 node', '1,200 micro-batches', '2 copies')
    """
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("h") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"


def a_kind(value: object) -> str:
    """Return what a value is, with an article.

    >>> a_kind(3), a_kind([]), a_kind(RuntimeError())
    ('an int', 'a list', 'a RuntimeError')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def some_of(names: Sequence[str], most: int = 16) -> str:
    """Return names as a text that does not grow with their number: of many only the first ones, and how many more.

    >>> some_of(["0.0", "0.1"]), some_of(["0.0", "0.1", "0.2", "0.3"], most=2)
    ('0.0, 0.1', '0.0, 0.1 and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ranges_text(numbers: Iterable[int], last: str = ", ") -> str:
    """Return numbers as text, with three or more consecutive ones drawn together; ``last`` joins the last part.

    >>> ranges_text([0, 1, 2, 3, 7, 8])
    '0-3, 7, 8'
    """
    parts: list[str] = []
    for _, pairs in groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return last.join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""
