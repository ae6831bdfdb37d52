"""Picture of the size and the time to save of each format, by model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from holdfast.study.plots.look import (
    BLUE,
    DARK,
    GREY,
    RED,
    STEPS,
    Entry,
    entitle,
    headed,
    label_lines,
    log_ticks,
    sheet,
    shortened,
)
from holdfast.study.rows import Results, Row, failure, middle, rows_of
from holdfast.words import seconds_text

MARKS = (("o", 5.5), ("s", 5), ("^", 5.5), ("D", 4.4), ("P", 5.5), ("v", 5.5))  # of models, in turn: they look equal
COLORS = (BLUE, DARK, "#f0b955", RED, "#2a9d8f", "#6a4c93")  # neighbours differ in print without colours, too
MARK: Any = {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.5}
LARGE = 112.0  # per cent: what is larger stands at the edge, with its number
LEAST = 1e-4  # seconds: rows are rounded to it, and a logarithm of nothing has no place
LINE, MORE = 0.26, 0.035  # inches of a line, and for each model: their marks lie below each other in it


def draw_formats(path: Path, results: Results) -> bool:
    """Draw two panels with the same lines, sizes and times; return whether there was anything to draw."""
    rows = rows_of(results, "formats")
    good = [row for row in rows if not failure(row)]
    if not good:
        return False
    entries, models = headed(rows), list(dict.fromkeys(str(row["model"]) for row in rows))
    with sheet(path, [1.5 + (LINE + MORE * len(models)) * len(entries)], columns=2) as (sizes, times):
        for axes in (sizes, times):
            label_lines(axes, entries)
            _draw_bands(axes, len(entries))
        times.tick_params(labelleft=False)
        for number, model in enumerate(models):
            ours, shift = [row for row in good if row["model"] == model], (number + 0.5) / len(models) - 0.5
            places = [place_of(entries, row) + 0.84 * shift for row in ours]  # equal ones must not hide each other
            marker, size = MARKS[number % len(MARKS)]
            style: Any = {"marker": marker, "markersize": size, "color": COLORS[number % len(COLORS)], **MARK}
            sizes.plot([min(_percent(row), LARGE) for row in ours], places, label=shortened(model), **style)
            times.plot([_seconds(row) for row in ours], places, **style)
        _set_sizes(sizes, [_percent(row) for row in good])
        _set_times(times, [_seconds(row) for row in good])
        _draw_notes(sizes, _larger(entries, good))
        _draw_notes(times, _failed(entries, rows))
        _draw_key(sizes, any(map(failure, rows)))
        entitle(sizes, "Formats and sizes")
    return True


def _draw_bands(axes: Axes, lines: int) -> None:
    """Shade every other line, so that the marks of a line are seen as one."""
    axes.grid(axis="x", which="both", alpha=0.3)
    for place in range(0, lines, 2):
        axes.axhspan(place - 0.5, place + 0.5, color=GREY, alpha=0.3, linewidth=0, zorder=0)


def _percent(row: Row) -> float:
    return 100 * float(row["of_raw_bytes"])


def _seconds(row: Row) -> float:
    return max(LEAST, middle(row, "save_s"))


def _set_sizes(axes: Axes, percents: Sequence[float]) -> None:
    """Set the axis of sizes, never so narrow that a thousandth looks large."""
    axes.axvline(100, color="black", linestyle="--", linewidth=1, zorder=1)
    axes.set_xlim(min(98.0, min(percents) - 1), min(max(102.0, max(percents)), LARGE) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=STEPS))
    axes.set_title("Size")
    axes.set_xlabel("% of raw bytes")


def _set_times(axes: Axes, seconds: Sequence[float]) -> None:
    low, high = min(seconds) / 1.6, max(seconds) * 1.6
    if high < 6.25 * low:  # too short for two round numbers
        low, high = low / 1.6, high * 1.6
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(log_ticks(low, high, most=3))
    axes.xaxis.set_minor_locator(LogLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))
    axes.set_title("Time to save")
    axes.set_xlabel("on the disk (log.)")


def _draw_key(axes: Axes, is_failed: bool) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if is_failed:
        handles.append(Line2D([], [], marker="$✗$", color="black", linestyle="", label="failed"))
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=5, columnspacing=1.0, handletextpad=0.2)


def place_of(entries: Sequence[Entry], row: Row) -> int:
    """Return the line of a format."""
    wanted = row["framework"], row["format"]
    return next(n for n, (_, each) in enumerate(entries) if each and (each["framework"], each["format"]) == wanted)


def _larger(entries: Sequence[Entry], rows: Sequence[Row]) -> dict[int, str]:
    """Return the sizes that lie beyond the edge, by line, in the order of the models."""
    found: dict[int, list[str]] = {}
    for row in rows:
        if _percent(row) > LARGE:
            found.setdefault(place_of(entries, row), []).append(f"{row['of_raw_bytes']:.0%}")
    return {place: f"→ {', '.join(words)}" for place, words in found.items()}


def _failed(entries: Sequence[Entry], rows: Sequence[Row]) -> dict[int, str]:
    """Return the models that a format failed with, by line."""
    found: dict[int, list[str]] = {}
    for row in rows:
        if failure(row):
            found.setdefault(place_of(entries, row), []).append(str(row["model"]))
    return {place: f"✗ {', '.join(words)}" for place, words in found.items()}


def _draw_notes(axes: Axes, notes: dict[int, str]) -> None:
    """Write notes behind the right end of lines, where no mark is."""
    for place, text in notes.items():
        axes.text(
            1.02, place, shortened(text, 16), transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=9.5
        )
