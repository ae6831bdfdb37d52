"""The demo's picture: the loss curves of both runs and, in pipelines, the layers of each worker over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from holdfast.cluster.membership import worker_order
from holdfast.demo.places import StagePlace
from holdfast.demo.story import Story

LIGHT, DARK, RED = "#9ecbf5", "#16324f", "#d62839"
PIPELINES = ("#9ecbf5", "#f6c58f", "#b5dba0", "#d7bde2")  # in turn
TITLE_SIZE, LONG_TITLE = 17, 50  # points; letters from which on a title is wider than the picture
NARROW = 0.035  # share of the width: a narrower bar has no room for its text


def plot_losses(path: Path, *, undisturbed: Story, disturbed: Story, title: str) -> None:
    """Write a PNG: a thick light curve, a thin dark curve on it, and a cross for each kill."""
    rows = _spells(disturbed)
    heights = [5.5, 0.6 + 0.27 * len(rows)] if rows else [5.5]
    with plt.rc_context({"font.size": 14, "axes.spines.top": False, "axes.spines.right": False}):
        figure, grid = plt.subplots(
            len(heights),
            squeeze=False,
            sharex=True,
            figsize=(8, sum(heights)),
            dpi=150,
            layout="constrained",
            height_ratios=heights,
        )
        axes = grid[0, 0]
        _curve(axes, undisturbed, color=LIGHT, linewidth=9, label="undisturbed")
        _curve(axes, disturbed, color=DARK, linewidth=2, label="with kills")
        _mark_kills(axes, disturbed)
        axes.set_title(
            title, fontsize=TITLE_SIZE if len(title) < LONG_TITLE else 14, fontweight="bold", loc="left", pad=14
        )
        grid[-1, 0].set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=14)
        if rows:
            _draw_places(grid[1, 0], rows, disturbed)
        figure.savefig(path)
        plt.close(figure)


def _curve(axes: Axes, story: Story, *, color: str, linewidth: float, label: str) -> None:
    steps = sorted(story.losses)
    losses = [story.losses[step] for step in steps]
    axes.plot(steps, losses, color=color, linewidth=linewidth, label=label, solid_capstyle="round")


def _mark_kills(axes: Axes, story: Story) -> None:
    deaths = [death for death in story.deaths if death.step in story.losses]
    if not deaths:
        return
    lowest, highest = min(story.losses.values()), max(story.losses.values())
    floor = lowest - 0.15 * (highest - lowest)  # the numbers stand in a row of their own, below the curves
    axes.set_ylim(bottom=floor)
    steps, losses = [d.step for d in deaths], [story.losses[d.step] for d in deaths]
    axes.vlines(steps, floor, losses, color=RED, linewidth=1, linestyle=":")
    axes.plot(steps, losses, "X", color=RED, markersize=12, label="kill -9, ms to the next step", zorder=5)
    style: dict[str, Any] = {"color": RED, "ha": "center", "rotation": 0 if len(deaths) <= 8 else 90}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    for death in deaths:
        text = "?" if death.recovered_ms is None else f"{death.recovered_ms:.0f}"
        axes.annotate(text, (death.step, floor), xytext=(0, 6), textcoords="offset points", bbox=box, **style)


# --- who held which layers ------------------------------------------------------------------------

Spell = tuple[int, int, StagePlace]  # the first step, the step after the last, and the place in between


def _spells(story: Story) -> dict[str, list[Spell]]:
    """Return the places of each worker with their steps; empty if every worker held the whole model."""
    rows: dict[str, list[Spell]] = {}
    if not any(arrangement.is_cut for arrangement in story.arrangements):
        return rows
    ends = [arrangement.step for arrangement in story.arrangements[1:]] + [story.steps]
    for arrangement, end in zip(story.arrangements, ends, strict=True):
        for place in arrangement.places:
            spells = rows.setdefault(place.worker, [])
            if spells and spells[-1][1:] == (arrangement.step, place):  # it has stayed where it was
                spells[-1] = (spells[-1][0], end, place)
            else:
                spells.append((arrangement.step, end, place))
    return {worker: rows[worker] for worker in sorted(rows, key=worker_order)}


def _draw_places(axes: Axes, rows: dict[str, list[Spell]], story: Story) -> None:
    """Draw a row for each worker; the colour is its pipeline, the text its layers."""
    for row, spells in enumerate(rows.values()):
        for first, stop, place in spells:
            color = PIPELINES[place.pipeline % len(PIPELINES)]
            axes.barh(row, stop - first, left=first, height=0.8, color=color, edgecolor="white")
            if stop - first > NARROW * story.steps:
                middle = (first + stop) / 2
                axes.text(middle, row, place.layers_text, ha="center", va="center", fontsize=9, color=DARK)
    names = list(rows)
    for death in story.deaths:
        if death.worker in names:
            axes.plot(death.step, names.index(death.worker), "X", color=RED, markersize=9, zorder=5)
    axes.set_yticks(range(len(rows)), names, fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_title("layers of each worker; each colour is a pipeline", loc="left", fontsize=13)
