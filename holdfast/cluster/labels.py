"""Labels: named facts about a training, which workers show each other so that none joins that trains something else.

The cluster does not know what the facts mean. ``run/label.py`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping

SHOWN = 4  # differences that a sentence names; an edited script may cause many more

Label = dict[str, str]  # what a fact is about, as in "the optimizer's lr" → its value


def difference(label: Mapping[str, str], other: Mapping[str, str], *, joint: str = " against ") -> str | None:
    """Return in words what differs between two labels, the value of ``label`` first; None if nothing does.

    A fact that only one of them has is not compared: a module that one worker alone imports, such as one that draws
    pictures, or a fact that a checkpoint of an older version does not have.

    >>> difference({"seed": "0", "clip_norm": "1"}, {"clip_norm": "2", "seed": "1", "torch": "2.13"})
    'seed is 0 against 1; clip_norm is 1 against 2'
    """
    names = [name for name in label if name in other and label[name] != other[name]]
    if not names:
        return None
    said = [f"{name} is {label[name]}{joint}{other[name]}" for name in names[:SHOWN]]
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "; ".join(said + more)
