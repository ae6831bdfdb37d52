"""The study's pictures: narrow enough for a phone, and readable without colours. An axis without rows has none."""

from __future__ import annotations

from pathlib import Path

from holdfast.study.plots.cost_plot import draw_cost
from holdfast.study.plots.formats_plot import draw_formats
from holdfast.study.plots.interval_plot import draw_interval
from holdfast.study.plots.scale_plot import draw_scale
from holdfast.study.plots.verdicts_plot import draw_crashes, draw_determinism
from holdfast.study.rows import Results

Pictures = dict[str, tuple[Path, str]]  # by the key of its table: the file, and a description
DRAWN = {
    "interval": ("interval.png", draw_interval, "Share of time that trains against the interval between saves"),
    "cost": ("cost.png", draw_cost, "Time of a save by format, in its parts, and lost training, against the raw disk"),
    "formats": ("formats.png", draw_formats, "Size and time to save by format and model"),
    "scale": ("scale.png", draw_scale, "Seconds of the slowest rank against ranks, and bytes beyond one copy"),
    "determinism": ("determinism.png", draw_determinism, "Parts left out against frameworks: is the restart identical"),
    "crash_safety": ("crash.png", draw_crashes, "Formats against kills, bit flips and truncations"),
}


def draw(results: Results, folder: Path) -> Pictures:
    """Draw all pictures into a folder, and return them; pictures of an earlier study are removed."""
    made: Pictures = {}
    for key, (name, picture, shows) in DRAWN.items():
        (folder / name).unlink(missing_ok=True)
        if picture(folder / name, results):
            made[key] = folder / name, shows
    return made
