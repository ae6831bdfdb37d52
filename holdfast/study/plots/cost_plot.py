"""Picture of a save's cost by format, against the limit of the disk."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from holdfast.study.plots.look import BLUE, DARK, GREY, RED, SAND, STEPS, entitle, headed, label_lines, sheet, shortened
from holdfast.study.rows import Results, Row, failure, main_model, measured, middle, rows_of
from holdfast.words import seconds_text

PARTS = {"serialise": (DARK, ""), "write": (BLUE, "////"), "fsync": (SAND, "...."), "not split": (GREY, "xx")}
LOST: Any = {"linewidth": 1.5, "marker": "D", "color": RED, "markeredgecolor": "white", "markersize": 6.5}
BOX: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line of the raw disk would cross texts
OUTLIER = 5.0  # times the median; longer bars are cut, and say how long they are
SLACK = 0.02  # share of the whole; a smaller rest is no part of its own
LINE = 0.33  # inches of a format: a bar, and below it what is lost
BAR, BELOW = -0.13, 0.3  # lines below a format's place: the middle of its bar, and that of its lost time
ROOM = 1.36  # times the longest bar: its number stands behind it


def draw_cost(path: Path, results: Results) -> bool:
    """Draw the picture; return whether there was anything to draw."""
    model = main_model(results)
    if model is None:
        return False
    entries = headed([row for row in rows_of(results, "cost") if row["model"] == model])
    shown = [row for _, row in entries if row and not failure(row)]
    raw = [row for row in measured(results, "limits") if (row["model"], row["name"]) == (model, "raw disk")]
    limit = max([end_of_axis(shown), *(middle(row, "seconds") for row in raw)])
    with sheet(path, [1.7 + LINE * len(entries)]) as (axes,):
        label_lines(axes, entries)
        axes.set_xlim(0, ROOM * limit)
        ticks = MaxNLocator(5, steps=STEPS).tick_values(0, limit)
        axes.set_xticks([tick for tick in ticks if 0 <= tick <= 1.05 * limit])
        for place, (_, row) in enumerate(entries):
            if row is not None:
                _draw_row(axes, place, row, limit)
        _draw_keys(axes, shown, limit, [_draw_limit(axes, each) for each in raw[:1]])
        entitle(axes, shortened(f"What a checkpoint of {model} costs", 90))
    return True


def _draw_keys(axes: Axes, shown: Sequence[Row], limit: float, lines: list[Line2D]) -> None:
    """Draw the legend. Bars and diamonds are different seconds, so both are explained."""
    used = {name for row in shown for name, _ in pieces(row)}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name)
        for name, (color, hatch) in PARTS.items()
        if name in used
    ]
    handles += [Line2D([], [], label="training time lost", **LOST), *lines]
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=3)
    axes.text(1.02, 0, "◆ lost", transform=axes.get_yaxis_transform(), va="center", color=RED, fontweight="bold")
    cut = any(max(middle(row, "durable_s"), middle(row, "lost_s")) > limit for row in shown)
    beyond = "\n→: goes on beyond the axis." if cut else ""
    axes.set_xlabel(f"seconds. Bar: until it is on the disk.\n◆ and right column: training time lost.{beyond}")


def end_of_axis(rows: Sequence[Row]) -> float:
    """Return the longest time that is drawn whole: outliers would leave no room for the others.

    >>> end_of_axis([{key: {"median": n} for key in ("durable_s", "lost_s")} for n in (1, 2, 3, 90)])
    3.0
    """
    times = [max(middle(row, "durable_s"), middle(row, "lost_s")) for row in rows]
    times = [time for time in times if time > 0] or [1.0]  # a fast disk and a small model: no time at all
    return max(time for time in times if time <= OUTLIER * statistics.median(times))


def _draw_row(axes: Axes, place: int, row: Row, limit: float) -> None:
    """Draw a format: a bar with its number at its end, and below it the lost time, with a column of numbers."""
    if failure(row):
        axes.text(0.02 * limit, place, "✗ failed", va="center", color=RED, zorder=6, bbox=BOX)
        return
    durable, lost, begin = middle(row, "durable_s"), middle(row, "lost_s"), 0.0
    for name, seconds in pieces(row):
        color, hatch = PARTS[name]
        width = min(begin + seconds, limit) - min(begin, limit)
        look: Any = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(place + BAR, width, left=min(begin, limit), height=0.5, **look)
        begin += seconds
    text = seconds_text(durable) if durable <= limit else f"→ {seconds_text(durable)}"
    axes.text(min(durable, limit) + 0.03 * limit, place + BAR, text, va="center", fontsize=9.5, zorder=6, bbox=BOX)
    marker = LOST if lost <= limit else {**LOST, "marker": ">"}  # out of the picture
    axes.plot([0, min(lost, limit)], [place + BELOW] * 2, markevery=[1], zorder=5, clip_on=False, **marker)
    axes.text(1.02, place, seconds_text(lost), transform=axes.get_yaxis_transform(), va="center", color=RED)


def pieces(row: Row) -> list[tuple[str, float]]:
    """Return the known parts of a save, and the rest.

    Medians need not add up: their error is spread over the parts, so that the bar ends where its number says.

    >>> pieces({"durable_s": {"median": 2.0}, "parts": {"serialise": None, "write": 1.0, "fsync": 0.5}})
    [('write', 1.0), ('fsync', 0.5), ('not split', 0.5)]
    >>> pieces({"durable_s": {"median": 2.0}, "parts": {"serialise": 3.0, "write": 1.0, "fsync": 0.0}})
    [('serialise', 1.5), ('write', 0.5)]
    """
    durable = middle(row, "durable_s")
    found = [(name, seconds) for name, seconds in (row["parts"] or {}).items() if seconds]
    known = sum(seconds for _, seconds in found)
    if durable - known > SLACK * durable:
        return [*found, ("not split", durable - known)]
    return [(name, seconds * durable / known) for name, seconds in found]


def _draw_limit(axes: Axes, raw: Row) -> Line2D:
    seconds = middle(raw, "seconds")
    label = f"raw disk, {seconds_text(seconds)}"
    return axes.axvline(seconds, color="black", linestyle="--", linewidth=1.3, zorder=4, label=label)
