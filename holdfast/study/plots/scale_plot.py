"""Picture of the slowest rank's seconds by the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from holdfast.study.plots.look import BLUE, DARK, RED, STEPS, entitle, sheet, shortened
from holdfast.study.rows import Results, Row, failure, middle, rows_of
from holdfast.words import count, size_text

LOOKS: Any = (  # of strategies, in turn
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": RED, "marker": "s", "linestyle": "--"},
    {"color": DARK, "marker": "^", "linestyle": "-."},
    {"color": "#2a9d8f", "marker": "D", "linestyle": ":"},
)
LOOK: Any = {"linewidth": 2, "markersize": 7, "markeredgecolor": "white"}
APART = 0.2  # share of a panel's height: the least between two texts
DODGE = 0.025  # share of the axis between strategies: equal times would hide each other


def draw_scale(path: Path, results: Results) -> bool:
    """Draw a panel for each framework; return whether there was anything to draw."""
    rows = rows_of(results, "scale")
    if not any(not failure(row) for row in rows):
        return False
    ranks, frameworks = sorted({int(row["ranks"]) for row in rows}), dict.fromkeys(row["framework"] for row in rows)
    looks = dict(zip(dict.fromkeys(row["strategy"] for row in rows), LOOKS * len(rows), strict=False))
    parts = [[row for row in rows if row["framework"] == framework] for framework in frameworks]
    heights = [1.4 + 0.19 * len(failed_words(part)) for part in parts]
    with sheet(path, heights, room=1.0) as panels:
        for axes, part in zip(panels, parts, strict=True):
            _draw_panel(axes, part, ranks, looks)
        panels[-1].set_xlabel("ranks")
        handles = [Line2D([], [], label=shortened(strategy, 30), **look, **LOOK) for strategy, look in looks.items()]
        panels[-1].figure.legend(handles=handles, loc="outside lower left", ncols=2)
        beyond = f"bytes written beyond one copy, with {count(ranks[-1], 'rank')}"
        entitle(panels[0], f"Seconds of the slowest rank; right: {beyond}")
    return True


def _draw_panel(axes: Axes, rows: Sequence[Row], ranks: Sequence[int], looks: dict[str, Any]) -> None:
    good, span = [row for row in rows if not failure(row)], max(1, ranks[-1] - ranks[0])
    failed = failed_words(rows)
    axes.set_title(shortened(rows[0]["framework"]), pad=6 + 13.5 * len(failed))
    beside: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 9.5}
    axes.annotate("\n".join(failed), (0, 1), (0, 5), **beside)
    axes.set_xticks(ranks)
    axes.set_xlim(ranks[0] - 0.09 * span, ranks[-1] + 0.09 * span)
    axes.grid(alpha=0.3)
    if not good:
        axes.set_yticks([])
        return
    axes.set_ylim(0, 1.15 * max(row["slowest_s"]["high"] for row in good) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=STEPS))
    _draw_lines(axes, good, looks, DODGE * span)
    _draw_twice(axes, [row for row in good if row["ranks"] == ranks[-1]], looks)


def failed_words(rows: Sequence[Row]) -> list[str]:
    """Return a line for each strategy that failed, with its numbers of ranks.

    >>> failed_words([{"strategy": "DCP", "ranks": ranks, "error": "gone"} for ranks in (2, 4)])
    ['✗ DCP: failed with 2, 4 ranks']
    """
    failed: dict[str, list[str]] = {}
    for row in rows:
        if failure(row):
            failed.setdefault(row["strategy"], []).append(str(row["ranks"]))
    return [
        f"✗ {shortened(strategy, 30)}: failed with {', '.join(ranks)} {'rank' if ranks == ['1'] else 'ranks'}"
        for strategy, ranks in failed.items()
    ]


def _draw_lines(axes: Axes, rows: Sequence[Row], looks: dict[str, Any], dodge: float) -> None:
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    for number, strategy in enumerate(strategies):
        ours = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: int(row["ranks"]))
        places = [row["ranks"] + dodge * (number - (len(strategies) - 1) / 2) for row in ours]
        axes.plot(places, [middle(row, "slowest_s") for row in ours], clip_on=False, **looks[strategy], **LOOK)
        low, high = ([row["slowest_s"][end] for row in ours] for end in ("low", "high"))
        axes.vlines(places, low, high, color=looks[strategy]["color"], linewidth=1)


def _draw_twice(axes: Axes, rows: Sequence[Row], looks: dict[str, Any]) -> None:
    """Draw, beside the last point of each strategy, its mark again and the bytes beyond one copy."""
    top = axes.get_ylim()[1]
    rows = sorted(rows, key=lambda row: middle(row, "slowest_s"))
    heights = apart([middle(row, "slowest_s") / top for row in rows], APART)
    for row, height in zip(rows, heights, strict=True):
        look = looks[row["strategy"]]
        text = f"+{size_text(row['duplicated'])}" if row["duplicated"] else "none"
        axes.plot(1.03, height, transform=axes.transAxes, clip_on=False, **look, **LOOK)
        axes.text(1.06, height, text, transform=axes.transAxes, va="center", fontsize=10)


def apart(heights: Sequence[float], least: float, top: float = 1.0) -> list[float]:
    """Return heights that are ``least`` apart: moved upwards from the lowest, then back below the top.

    >>> apart([0.25, 0.3, 1.0], 0.25), apart([0.9, 0.95], 0.25)
    ([0.25, 0.5, 1.0], [0.75, 1.0])
    """
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + least) if found else height)
    return [min(height, top - least * (len(found) - 1 - n)) for n, height in enumerate(found)]
