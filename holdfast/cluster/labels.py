"""Labels: named facts about a training, which workers show each other so that none joins that trains something else.

The cluster does not know what the facts mean. ``run/label.py`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHOWN = 4  # differences that a sentence names; an edited script may cause many more
ROWS = 20  # differences that a table shows: they fit on a screen
CELL = 48  # characters of a value in a table, so that a row fits on a line
_BEFORE = 12  # characters that a cut value shows before the first one that differs

Label = dict[str, str]  # what a fact is about, as in "the optimizer's lr" → its value


@dataclass(frozen=True, kw_only=True)
class Change:
    """A fact that has changed: its name, and its values before and now."""

    setting: str
    then: str
    now: str


def changes(now: Mapping[str, str], then: Mapping[str, str]) -> list[Change]:
    """Return the facts that two labels have with different values, in the order of ``now``.

    A fact that only one of them has is not compared, for the reasons that ``difference`` gives.

    >>> changes({"seed": "0", "new": "1"}, {"seed": "7"})
    [Change(setting='seed', then='7', now='0')]
    """
    return [
        Change(setting=name, then=then[name], now=now[name]) for name in now if name in then and now[name] != then[name]
    ]


def table(found: Sequence[Change]) -> str:
    """Return changes as lines of text with three columns.

    >>> print(table(changes({"seed": "1", "clip_norm": "0.5"}, {"seed": "0", "clip_norm": "None"})))
      setting    then  now
      seed       0     1
      clip_norm  None  0.5
    """
    rows = [("setting", "then", "now"), *((one.setting, *_excerpts(one.then, one.now)) for one in found[:ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:{widths[0]}}  {then:{widths[1]}}  {now}".rstrip() for name, then, now in rows]
    more = [f"  … and {len(found) - ROWS} more"] if len(found) > ROWS else []
    return "\n".join(lines + more)


def _excerpts(then: str, now: str) -> tuple[str, str]:
    """Return two values in one line each, cut so that the place where they begin to differ is seen."""
    a, b = " ".join(then.split()), " ".join(now.split())
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(same - _BEFORE, 0) if max(len(a), len(b)) > CELL else 0
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    shown = ("…" if start else "") + text[start:]
    return shown if len(shown) <= CELL else shown[: CELL - 1] + "…"


def difference(label: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return in words what differs between two labels, the value of ``label`` first; None if nothing does.

    A fact that only one of them has is not compared: a module that one worker alone imports, such as one that draws
    pictures, or a fact that a checkpoint of an older version does not have.

    >>> difference({"seed": "0", "clip_norm": "1"}, {"clip_norm": "2", "seed": "1", "torch": "2.13"})
    'seed is 0 against 1; clip_norm is 1 against 2'
    """
    found = changes(label, other)
    if not found:
        return None
    said = [f"{one.setting} is {one.now} against {one.then}" for one in found[:SHOWN]]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "; ".join(said + more)
