"""Pictures of verdicts in boxes: restarts by case and framework, crashes by format and damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from holdfast.study.plots.look import GREY, entitle, headed, label_lines, sheet, shortened
from holdfast.study.restart_verdict import CONTROL, DIFFERS, IDENTICAL, NOT_TESTABLE, SAVING
from holdfast.study.rows import Results, Row, crash_text, failure, rows_of, runs_of

GOOD, BAD = "#deecfa", "#f2a55e"  # far enough from each other in print without colours
CELL = 0.3  # inches: the height of a box
BESIDE = 5  # most frameworks beside each other; more go below
VARIANTS = 3  # most variants beside each other: their names are longer
KEY = (
    "=  identical      n  the nth step is the first that differs\n"
    "w  same losses, other weights or state\n"
    "?  not testable: two undisturbed runs differ      ✗  failed"
)

CRASH_KEY = (
    "✓ n: each time the old or the new one loaded; damage was noticed\nor harmless.  "
    "✗ m of n: m times neither loaded; damage was loaded silently."
)


def draw_determinism(path: Path, results: Results) -> bool:
    """Draw cases down, frameworks across, a box for each save point; return whether there was anything to draw."""
    rows = rows_of(results, "determinism")
    if not rows:
        return False
    blocks = [*_blocks([row for row in rows if not row["variant"]], BESIDE)]
    blocks += [*_blocks([row for row in rows if row["variant"]], VARIANTS)]
    found = [[row for row in rows if runs_of(row) in block] for block in blocks]
    cases = [_cases(part) for part in found]
    places = [place for place in dict.fromkeys(row["save_at"] for row in rows) if place]
    heights = [CELL * len(part) for part in cases]
    with sheet(path, heights, room=0.9 + 1.05 * len(heights)) as panels:
        for axes, block, part, names in zip(panels, blocks, found, cases, strict=True):
            _draw_block(axes, block, names, part, places)
        entitle(panels[0], "Is the run after a restart identical?", KEY + _places_text(places))
    return True


def _places_text(places: Sequence[str]) -> str:
    """Return the save points of the boxes beside each other, in words.

    >>> _places_text(["step 0", "mid-epoch"])
    '\\nBoxes from the left: saved at step 0, mid-epoch'
    """
    if not places:
        return ""
    return f"\n{'Boxes from the left: saved' if len(places) > 1 else 'Saved'} at {', '.join(places)}"


def _blocks(rows: Sequence[Row], most: int) -> Iterator[list[str]]:
    runs = list(dict.fromkeys(runs_of(row) for row in rows))
    yield from (runs[start : start + most] for start in range(0, len(runs), most))


def _cases(rows: Sequence[Row]) -> list[str]:
    """Return the cases in order: the control, the saving itself, then the restarts."""
    names = list(dict.fromkeys(str(row["case"]) for row in rows))
    first = [name for name in (CONTROL, SAVING) if name in names]
    return first + [name for name in names if name not in first]


def _draw_block(axes: Axes, runs: Sequence[str], cases: Sequence[str], rows: Sequence[Row], places: list[str]) -> None:
    width = max(1, len(places))
    for row in rows:
        left = runs.index(runs_of(row)) * (width + 0.4)
        top = cases.index(row["case"])
        if row["save_at"] is None:
            _draw_box(axes, left, top, width, *mark_of(row))
        else:
            _draw_box(axes, left + places.index(row["save_at"]), top, 1, *mark_of(row))
    beside = VARIANTS if any(row["variant"] for row in rows) else BESIDE
    axes.set_xlim(-0.1, beside * (width + 0.4))
    axes.set_ylim(len(cases), 0)
    axes.set_yticks([n + 0.5 for n in range(len(cases))], [shortened(case) for case in cases])
    names = [shortened(run, 40).replace(", ", ",\n") for run in runs]
    middles = [n * (width + 0.4) + width / 2 for n in range(len(runs))]
    axes.set_xticks(middles, names, rotation=30, ha="left", rotation_mode="anchor")
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def mark_of(row: Row) -> tuple[str, str]:
    """Return a sign and a colour for a verdict, other ones for each, so that untested never looks tested.

    >>> mark_of({"verdict": "differs", "first_step": 2})[0], mark_of({"verdict": "not testable"})[0]
    ('3', '?')
    """
    if row["verdict"] == DIFFERS:
        return ("w" if row["first_step"] is None else str(row["first_step"] + 1)), BAD
    return {IDENTICAL: ("=", GOOD), NOT_TESTABLE: ("?", GREY)}.get(row["verdict"], ("✗", "white"))


def _draw_box(axes: Axes, left: float, top: float, width: float, text: str, color: str) -> None:
    edge, order = (GREY, 2) if color == "white" else ("white", 1)  # an empty box has a frame, above its neighbours'
    axes.add_patch(Rectangle((left, top), width, 1, facecolor=color, edgecolor=edge, linewidth=1.5, zorder=order))
    axes.text(left + width / 2, top + 0.52, text, ha="center", va="center", fontsize=9.5)


def draw_crashes(path: Path, results: Results) -> bool:
    """Draw formats down, kinds of damage across; return whether there was anything to draw."""
    rows = rows_of(results, "crash_safety")
    if not rows:
        return False
    kinds, entries = list(dict.fromkeys(str(row["what"]) for row in rows)), headed(rows)
    with sheet(path, [1.35 + CELL * len(entries)]) as (axes,):
        label_lines(axes, entries)
        for place, (_, entry) in enumerate(entries):
            for row in rows:
                if entry and (row["framework"], row["format"]) == (entry["framework"], entry["format"]):
                    _draw_box(axes, kinds.index(row["what"]), place - 0.5, 1, *_outcome(row))
        axes.set_xlim(0, len(kinds))
        axes.set_xticks([n + 0.5 for n in range(len(kinds))], kinds)
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        for side in axes.spines.values():
            side.set_visible(False)
        entitle(axes, "What a crash leaves", CRASH_KEY)
    return True


def _outcome(row: Row) -> tuple[str, str]:
    """Return a text and a colour for a row about a crash."""
    if failure(row):
        return "failed", "white"
    return crash_text(row), GOOD if row["verdict"] == "safe" else BAD
