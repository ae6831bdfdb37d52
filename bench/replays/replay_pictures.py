"""Pictures of ``bench replay``: time over steps since the checkpoint, and over the budget of the log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from bench.replays.budget import Point

STYLE: Any = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}
COLORS = ("#16324f", "#2a9d8f", "#d62839")
LABEL = "seconds from the kill to the step's commit"


def draw_steps(path: Path, seconds: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """Draw a line for each way through medians, with ranges, and at the last way how many times the first it took."""
    path.parent.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 5.2), dpi=140, layout="constrained")
        for (name, by_steps), color, marker in zip(seconds.items(), COLORS, "os^", strict=False):
            steps = sorted(by_steps)
            middle = [statistics.median(by_steps[n]) for n in steps]
            below = [m - min(by_steps[n]) for m, n in zip(middle, steps, strict=True)]
            above = [max(by_steps[n]) - m for m, n in zip(middle, steps, strict=True)]
            axes.errorbar(steps, middle, yerr=[below, above], color=color, marker=marker, capsize=4, label=name)
        _write_gains(axes, list(seconds.values()))
        axes.set(xlabel="steps since the checkpoint", ylabel=LABEL, xlim=(0, None), ylim=(0, None))
        axes.set_title("A loss that no replica makes good", loc="left", fontweight="bold")
        axes.set_xticks(sorted({steps for by_steps in seconds.values() for steps in by_steps}))
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, loc="upper left")
        figure.savefig(path)
        plt.close(figure)


def _write_gains(axes: Axes, ways: Sequence[Mapping[int, Sequence[float]]]) -> None:
    """Write beside each point of the last way its median ratio to the first way's in the same round."""
    for steps, theirs in ways[-1].items():
        times = statistics.median(a / b for a, b in zip(theirs, ways[0][steps], strict=True))
        at = (steps, statistics.median(theirs))
        axes.annotate(f"{times:.1f}x", at, xytext=(-8, 6), textcoords="offset points", ha="right", color=COLORS[2])


def draw_budgets(path: Path, points: Sequence[Point], *, steps: int) -> None:
    """Draw bytes on the left and time on the right, predicted and measured; a dot for each stage that was lost."""
    path.parent.mkdir(exist_ok=True)
    names = [f"{point.budget / 1e6:.3g}" for point in points]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), dpi=140, layout="constrained")
        places = range(len(points))
        left.plot(
            places, [p.predicted_bytes / 1e6 for p in points], "_", color=COLORS[2], ms=42, mew=3, label="predicted"
        )
        left.bar(places, [p.measured_bytes / 1e6 for p in points], width=0.5, color="#9ecbf5", label="measured")
        left.set(ylabel="MB of records in a step")
        left.set_title("Bytes", loc="left", fontweight="bold")
        _draw_times(right, points)
        right.set(ylabel=LABEL, ylim=(0, None))
        right.set_title(f"Time, {steps} steps after the checkpoint", loc="left", fontweight="bold")
        for axes in (left, right):
            axes.set_xticks(list(places), names)
            axes.set_xlabel("budget, MB a step")
            axes.set_xlim(-0.6, len(points) - 0.4)
            axes.grid(axis="y", alpha=0.25)
            axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def _draw_times(axes: Axes, points: Sequence[Point]) -> None:
    for place, point in enumerate(points):
        for stage, (predicted, measured) in enumerate(zip(point.predicted_s, point.measured_s, strict=True)):
            at = place + 0.16 * (stage - (len(point.measured_s) - 1) / 2)
            axes.plot(at, predicted, "_", color=COLORS[2], ms=9, mew=2)
            axes.plot(at, measured, "o", color="#5aa0e0", ms=6)
    style: Any = {"linewidth": 2, "alpha": 0.9}
    means = [[statistics.mean(values) for values in (p.predicted_s, p.measured_s)] for p in points]
    axes.plot(
        range(len(points)), [m[0] for m in means], "--", color=COLORS[2], label="predicted: mean, each stage", **style
    )
    axes.plot(
        range(len(points)), [m[1] for m in means], "-", color=COLORS[0], label="measured: mean, each stage", **style
    )
