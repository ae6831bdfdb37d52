"""Picture of a step in characters: a row per stage; a character shows what the stage does most of that time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from holdfast.pictures.plan_words import layers_text
from holdfast.pictures.step_chart import KINDS, NAMES, Bar, Chart, some

STAGES = 12  # rows of a picture at most, so that several fit on a screen
# Each kind has a character of its own, for terminals without colour.
LOOK = dict(zip(KINDS, (("░", "cyan"), ("█", "blue"), ("▸", "yellow"), ("=", "magenta"), ("·", "dim")), strict=True))
CUT = " ┆ "  # where a part of the step is left out

TAIL = 0.1  # share of the width for the gradient sums and the update at the end of a step

Window = tuple[float, float, int]  # begin, end, characters


def drawing(one: Chart, width: int) -> list[Text]:
    """Return the lines of the picture: the stages, the time axis, and a note about what is not drawn."""
    rows = some(len(one.bars), STAGES)
    labels = [label(one, stage) for stage in rows]
    margin = max(map(len, labels)) + 1
    parts = windows(one, width - margin - len(" 100%"))
    lines = []
    for name, stage in zip(labels, rows, strict=True):
        line = Text(name.ljust(margin))
        for number, part in enumerate(parts):
            line.append(CUT if number else "", "dim")
            for kind in strip(one.bars[stage], part):
                line.append(*LOOK[kind])
        lines.append(line.append(f"{one.idle[stage]:5.0%}"))
    lines.append(Text(" " * margin + CUT.join(_axis(part) for part in parts) + " idle", "dim"))
    if parts[-1][1] < one.end:
        lines.append(Text(f"not drawn: until {one.end:.3g} s gradients are summed and the update is made", "dim"))
    return lines


def legend() -> Text:
    """Return a line with the character of each kind."""
    line = Text()
    for kind, (character, style) in LOOK.items():
        line.append(character * 2, style).append(f" {NAMES.get(kind, kind)}   ")
    line.rstrip()
    return line


def label(one: Chart, stage: int) -> str:
    """Return the name of a row: its node and layers."""
    at = one.template.stages[stage]
    return f"node {at.node} layers {layers_text(at)}"


def windows(one: Chart, width: int) -> list[Window]:
    """Return the parts of a step that are drawn: all of it if a forward is then a character wide, else begin and end.

    The begin of a deep pipeline is drawn smaller than that, to have room for the first backward. Of a long tail only
    the begin is drawn: nothing new happens in it.
    """
    last = min(one.end, one.done * (1 + TAIL))
    shortest = min(end - begin for row in one.bars for begin, end in row["forward"][:1])
    half = (width - len(CUT)) // 2
    per_character = max(shortest, one.filled * 1.2 / half)
    if last <= per_character * width:
        return [(0.0, last, width)]
    last = min(last, one.done + per_character * half * TAIL)
    return [(0.0, per_character * half, half), (last - per_character * half, last, half)]


def strip(row: dict[str, list[Bar]], window: Window) -> list[str]:
    """Return for each character the kind that takes the largest part of its time."""
    begin, end, characters = window
    edges = np.linspace(begin, end, characters + 1)
    taken = np.array([occupied(row[kind], edges) for kind in KINDS])
    return [KINDS[number] for number in taken.argmax(axis=0)]


def occupied(bars: Sequence[Bar], edges: np.ndarray) -> np.ndarray:
    """Return how much of the time between neighbouring edges the bars cover.

    >>> occupied([(0.5, 2.0)], np.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    if not bars:
        return np.zeros(len(edges) - 1)
    points = np.array(bars)
    lengths = points[:, 1] - points[:, 0]
    covered = np.cumsum(lengths)
    totals = np.stack([covered - lengths, covered], axis=1)
    return np.diff(np.interp(edges, points.ravel(), totals.ravel()))


def _axis(window: Window) -> str:
    begin, end, characters = window
    return f"{begin:.3g} s".ljust(characters - 10) + f"{end:.3g} s".rjust(10)
