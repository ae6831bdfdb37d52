"""The loss curves of both runs in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from holdfast.demo.story import Story

LIGHT, DARK, RED = "#9ecbf5", "#16324f", "#d62839"


def plot_losses(path: Path, *, undisturbed: Story, disturbed: Story, title: str) -> None:
    """Writes a PNG: one thick light curve, one thin dark curve on it, and a cross for each kill."""
    with plt.rc_context({"font.size": 14, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(8, 5.5), dpi=150, layout="constrained")
        _curve(axes, undisturbed, color=LIGHT, linewidth=9, label="undisturbed")
        _curve(axes, disturbed, color=DARK, linewidth=2, label="with kills")
        _mark_kills(axes, disturbed)
        axes.set_title(title, fontsize=17, fontweight="bold", loc="left", pad=14)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=14)
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
