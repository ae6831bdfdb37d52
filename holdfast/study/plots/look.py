"""Style and common elements of the study's pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from holdfast.study.rows import Row

WIDTH, DPI = 5.5, 180  # inches: a phone shows it at about 70 pixels to the inch
DARK, BLUE, SAND, GREY, RED = "#16324f", "#5aa0e0", "#f6c58f", "#c9d2db", "#d62839"
STEPS = (1, 2, 5, 10)  # steps of ticks: people read these best
STYLE: Any = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
}
Entry = tuple[str, Row | None]  # a label and its row; a heading has None


@contextmanager
def sheet(path: Path, heights: Sequence[float], *, columns: int = 1, room: float = 0.0) -> Iterator[list[Axes]]:
    """Make panels of these heights (inches) below and beside each other, and save them at the end.

    ``room``: inches for legends and titles around them.
    """
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(heights),
            columns,
            squeeze=False,
            figsize=(WIDTH, sum(heights) + room),
            dpi=DPI,
            layout="constrained",
            height_ratios=heights,
        )
        try:
            yield list(grid.flat)
            figure.savefig(path)
        finally:
            plt.close(figure)


def entitle(axes: Axes, title: str, key: str = "") -> None:
    """Set the title above everything and, at the bottom, how to read the picture; both at the left edge."""
    axes.figure.suptitle(fill(title, 52), x=0.01, ha="left", fontsize=12, fontweight="bold")
    if key:
        axes.figure.supxlabel(key, x=0.01, ha="left", fontsize=9.5)


def headed(rows: Sequence[Row], key: str = "format") -> list[Entry]:
    """Return a heading for each framework, with its formats below.

    >>> headed([{"framework": "jax", "format": "orbax"}, {"framework": "jax", "format": "orbax"}])
    [('jax', None), ('orbax', {'framework': 'jax', 'format': 'orbax'})]
    """
    found: list[Entry] = []
    seen: set[tuple[str, str]] = set()
    for framework in dict.fromkeys(row["framework"] for row in rows):
        found.append((framework, None))
        for row in rows:
            if row["framework"] == framework and (framework, row[key]) not in seen:
                seen.add((framework, row[key]))
                found.append((row[key], row))
    return found


def label_lines(axes: Axes, entries: Sequence[Entry]) -> None:
    """Write the labels of entries at the left, from the top."""
    axes.set_yticks(range(len(entries)), [shortened(label) for label, _ in entries])
    for tick, (_, row) in zip(axes.get_yticklabels(), entries, strict=True):
        tick.set_fontweight("normal" if row else "bold")
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def log_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return at most ``most`` round numbers for the ticks of a logarithmic axis.

    Powers of ten alone would leave a short axis without a number, so steps of 1, 2, 5 are tried first.

    >>> log_ticks(0.06, 0.7), log_ticks(0.001, 2.0, most=3)
    ([0.1, 0.2, 0.5], [0.001, 0.1])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        ticks = [float(f"{step}e{power}") for power in powers[::every] for step in steps]
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) <= most:
            break
    return found


def shortened(text: str, most: int = 24) -> str:
    """Return a label of at most ``most`` letters, with dollar signs escaped: they would begin a formula.

    >>> shortened("a" * 30, 4), shortened("x$y")
    ('aaa…', 'x\\\\$y')
    """
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.replace("$", r"\$")
