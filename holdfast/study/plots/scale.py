"""What more ranks make of a save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from holdfast.study.plots.look import BLUE, DARK, RED, entitle, sheet, shortened
from holdfast.study.rows import Results, Row, failure, middle, rows_of
from holdfast.words import size_text

LOOKS: Any = (  # of strategies, in turn
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": RED, "marker": "s", "linestyle": "--"},
    {"color": DARK, "marker": "^", "linestyle": "-."},
    {"color": "#2a9d8f", "marker": "D", "linestyle": ":"},
)
LOOK: Any = {"linewidth": 2, "markersize": 7, "markeredgecolor": "white"}
APART = 0.19  # of a panel's height: the least between two texts


def draw_scale(path: Path, results: Results) -> bool:
    """A panel for each framework. Whether there was anything to draw."""
    rows = rows_of(results, "scale")
    if not any(not failure(row) for row in rows):
        return False
    ranks, frameworks = (
        sorted({int(row["ranks"]) for row in rows}),
        list(dict.fromkeys(row["framework"] for row in rows)),
    )
    looks = dict(zip(dict.fromkeys(row["strategy"] for row in rows), LOOKS * len(rows), strict=False))
    with sheet(path, [1.9, *[1.45] * (len(frameworks) - 1)]) as panels:
        for axes, framework in zip(panels, frameworks, strict=True):
            ours = [row for row in rows if row["framework"] == framework]
            _draw_lines(axes, [row for row in ours if not failure(row)], looks)
            _draw_twice(axes, [row for row in ours if row["ranks"] == ranks[-1] and not failure(row)])
            failed = [f"{row['strategy']}, {row['ranks']} ranks" for row in ours if failure(row)]
            axes.set_title(shortened(framework))
            if failed:
                words = f"✗ failed: {shortened('; '.join(failed), 36)}"
                axes.set_title(words, loc="right", fontsize=9.5, fontweight="normal")
            axes.set_xticks(ranks)
            axes.set_xlim(ranks[0] - 0.15, ranks[-1] + 0.15)
        panels[-1].set_xlabel("ranks")
        handles = [Line2D([], [], label=shortened(strategy, 30), **look, **LOOK) for strategy, look in looks.items()]
        panels[-1].figure.legend(handles=handles, loc="outside lower left", ncols=2)
        entitle(
            panels[0], f"Seconds of the slowest rank; right: bytes written\nbeyond one copy, with {ranks[-1]} ranks"
        )
    return True


def _draw_lines(axes: Axes, rows: Sequence[Row], looks: dict[str, Any]) -> None:
    for strategy, look in looks.items():
        ours = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: int(row["ranks"]))
        ranks = [row["ranks"] for row in ours]
        axes.plot(ranks, [middle(row, "slowest_s") for row in ours], **look, **LOOK)
        low, high = ([row["slowest_s"][end] for row in ours] for end in ("low", "high"))
        axes.vlines(ranks, low, high, color=look["color"], linewidth=1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_twice(axes: Axes, rows: Sequence[Row]) -> None:
    """Beside the last point of each strategy: bytes beyond one copy."""
    top = axes.get_ylim()[1]
    rows = sorted(rows, key=lambda row: middle(row, "slowest_s"))
    heights = apart([middle(row, "slowest_s") / top for row in rows], APART)
    for row, height in zip(rows, heights, strict=True):
        text = f"+{size_text(row['duplicated'])}" if row["duplicated"] else "none"
        axes.text(1.02, height, text, transform=axes.transAxes, va="center", fontsize=10)


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Moves what is too close upwards, from the lowest on.

    >>> apart([0.25, 0.3, 1.0], 0.25)
    [0.25, 0.5, 1.0]
    """
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + least) if found else height)
    return found
