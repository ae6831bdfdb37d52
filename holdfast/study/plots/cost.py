"""Where the time of a save goes, against the limit that the disk sets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from holdfast.study.plots.look import BLUE, DARK, GREY, LINE, RED, SAND, entitle, headed, label_lines, sheet, shortened
from holdfast.study.rows import Results, Row, failure, main_model, measured, middle, rows_of
from holdfast.words import seconds_text

PARTS = {"serialise": (DARK, ""), "write": (BLUE, "////"), "fsync": (SAND, "...."), "not split": (GREY, "xx")}
LOST: Any = {"marker": "D", "color": RED, "markeredgecolor": "white", "markersize": 7}
OUTLIER = 5.0  # times the median: such bars are cut, and say how long they are


def draw_cost(path: Path, results: Results) -> bool:
    """Whether there was anything to draw."""
    model = main_model(results)
    if model is None:
        return False
    entries = headed([row for row in rows_of(results, "cost") if row["model"] == model])
    raw = [row for row in measured(results, "limits") if (row["model"], row["name"]) == (model, "raw disk")]
    limit = end_of_axis([row for _, row in entries if row and not failure(row)])
    with sheet(path, [1.55 + LINE * len(entries)]) as (axes,):
        label_lines(axes, entries)
        axes.set_xlim(0, 1.2 * limit)
        for place, (_, row) in enumerate(entries):
            if row is not None:
                _draw_row(axes, place, row, limit)
        handles: list[Patch | Line2D] = [
            Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name) for name, (color, hatch) in PARTS.items()
        ]
        handles.append(Line2D([], [], linestyle="", label="lost training", **LOST))
        if raw:
            handles.append(_draw_limit(axes, raw[0]))
        axes.set_xlabel("seconds until it is on the disk")
        entitle(axes, shortened(f"What a checkpoint of {model} costs", 50))
        axes.figure.legend(handles=handles, loc="outside lower left", ncols=3)
    return True


def end_of_axis(rows: Sequence[Row]) -> float:
    """The longest time that is drawn whole: one that takes many times as long would leave no room for the others.

    >>> end_of_axis([{key: {"median": n} for key in ("durable_s", "lost_s")} for n in (1, 2, 3, 90)])
    3.0
    """
    times = [max(middle(row, "durable_s"), middle(row, "lost_s")) for row in rows]
    return max(time for time in times if time <= OUTLIER * statistics.median(times))


def _draw_row(axes: Axes, place: int, row: Row, limit: float) -> None:
    if failure(row):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(0.01 * limit, place, "✗ failed", va="center", color=RED, zorder=6, bbox=box)
        return
    durable, lost = middle(row, "durable_s"), middle(row, "lost_s")
    begin = 0.0
    for name, seconds in _pieces(row, durable):
        color, hatch = PARTS[name]
        width = min(begin + seconds, limit) - min(begin, limit)
        axes.barh(place, width, left=begin, height=0.72, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
        begin += seconds
    marker = LOST if lost <= limit else {**LOST, "marker": ">"}  # out of the picture
    axes.plot(min(max(lost, 0.0), limit), place, zorder=5, clip_on=False, **marker)
    text = seconds_text(durable) if durable <= limit else f"→ {seconds_text(durable)}"
    axes.text(min(max(durable, lost), limit) + 0.03 * limit, place, text, va="center", fontsize=9.5)


def _pieces(row: Row, durable: float) -> list[tuple[str, float]]:
    """The parts of a save, as far as they are known, and what remains.

    >>> _pieces({"parts": {"serialise": None, "write": 1.0, "fsync": 0.5}}, 2.0)
    [('write', 1.0), ('fsync', 0.5), ('not split', 0.5)]
    """
    found = [(name, seconds) for name, seconds in (row["parts"] or {}).items() if seconds]
    rest = durable - sum(seconds for _, seconds in found)
    return [*found, ("not split", rest)] if rest > 0.02 * durable else found


def _draw_limit(axes: Axes, raw: Row) -> Line2D:
    seconds = middle(raw, "seconds")
    label = f"raw disk, {seconds_text(seconds)}"
    return axes.axvline(seconds, color="black", linestyle="--", linewidth=1.3, zorder=4, label=label)
