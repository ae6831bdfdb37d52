"""How large each format is, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from holdfast.study.plots.look import BLUE, DARK, RED, Entry, entitle, headed, label_lines, sheet, shortened
from holdfast.study.rows import Results, Row, failure, middle, rows_of
from holdfast.words import seconds_text

MARKS = ("o", "s", "^", "D", "P", "v")  # of models, in turn
COLORS = (BLUE, "#e9a23b", DARK, RED, "#2a9d8f", "#6a4c93")
LARGE = 112.0  # per cent: what is larger stands at the edge, with its number
LINE = 0.3  # inches: several marks lie beside each other in a line


def draw_formats(path: Path, results: Results) -> bool:
    """Whether there was anything to draw."""
    rows = rows_of(results, "formats")
    if not any(not failure(row) for row in rows):
        return False
    entries, models = headed(rows), list(dict.fromkeys(str(row["model"]) for row in rows))
    with sheet(path, [1.2 + LINE * len(entries), 0.7 + LINE * len(entries)]) as (sizes, times):
        for axes in (sizes, times):
            label_lines(axes, entries)
            axes.grid(alpha=0.3)
        times.set_xscale("log")
        for number, model in enumerate(models):
            ours = [row for row in rows if row["model"] == model]
            shift = (number + 0.5) / len(models) - 0.5
            style: Any = {"marker": MARKS[number % len(MARKS)], "color": COLORS[number % len(COLORS)], "linestyle": ""}
            style |= {"label": shortened(model), "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
            _draw_points(sizes, entries, ours, shift, lambda row: min(100 * float(row["of_raw_bytes"]), LARGE), style)
            _draw_points(times, entries, ours, shift, lambda row: middle(row, "save_s"), style)
        _draw_notes(sizes, _larger(entries, rows))
        _draw_notes(times, _failed(entries, rows))
        sizes.axvline(100, color="black", linestyle="--", linewidth=1)
        sizes.set_title("Size (% of the raw bytes)")
        times.set_title("Time to save, on the disk (logarithmic)")
        times.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))
        entitle(sizes, "Formats and sizes")
        handles, labels = sizes.get_legend_handles_labels()
        sizes.figure.legend(handles, labels, loc="outside lower left", ncols=4, columnspacing=1.0, handletextpad=0.2)
    return True


def _draw_points(
    axes: Axes, entries: Sequence[Entry], rows: Sequence[Row], shift: float, value: Callable[[Row], float], style: Any
) -> None:
    """A mark in the line of each format, at the model's own height, so that equal ones do not hide each other."""
    points = [(value(row), place_of(entries, row) + 0.92 * shift) for row in rows if not failure(row)]
    axes.plot([x for x, _ in points], [y for _, y in points], **style)


def place_of(entries: Sequence[Entry], row: Row) -> int:
    """The line of a format."""
    wanted = row["framework"], row["format"]
    return next(n for n, (_, each) in enumerate(entries) if each and (each["framework"], each["format"]) == wanted)


def _larger(entries: Sequence[Entry], rows: Sequence[Row]) -> dict[int, list[str]]:
    """What lies beyond the edge, by line."""
    found: dict[int, list[str]] = {}
    for row in rows:
        if not failure(row) and 100 * row["of_raw_bytes"] > LARGE:
            found.setdefault(place_of(entries, row), []).append(f"{row['model']} → {row['of_raw_bytes']:.0%}")
    return found


def _failed(entries: Sequence[Entry], rows: Sequence[Row]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for row in rows:
        if failure(row):
            found.setdefault(place_of(entries, row), []).append(f"{row['model']} ✗ failed")
    return found


def _draw_notes(axes: Axes, notes: dict[int, list[str]]) -> None:
    """Words at the right end of a line."""
    for place, words in notes.items():
        text = shortened(", ".join(words), 40)
        axes.text(0.96, place, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9.5)
