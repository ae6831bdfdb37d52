"""Pictures of ``bench sync``: learning over time and over bytes, and the steps of synchronisations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.replicas.findings import grouped, title
from bench.replicas.processes import SyncOutcome
from bench.replicas.schedule import LOCAL, MATCHED, PUBLISHED
from bench.replicas.tasks import TASKS, LearningTask

STYLE: Any = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
COLORS = {
    "BSP": "#16324f",
    "PowerSGD": "#5aa0e0",
    "LocalSGD": "#8d99ae",
    "FedAvg": "#b08968",
    "RandomSync": "#cdb4db",
    "DiLoCo": "#2a9d8f",
    "SSP": "#6a4c93",
    "SelSync": "#d62839",
}
PUBLISHED_COLOR = "#e9a23b"  # with a fixed delta
# Lines that would lie on others: they are in the table, and in the picture of where synchronisations fall.
HIDDEN = {method.name for method in (LOCAL[5], PUBLISHED[0.25], PUBLISHED[0.5], *MATCHED)}
LEAST_MB = 0.3  # less was sent before the first synchronisation
DASHES = ("-", "--", "-.", ":", (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))


def draw(folder: Path, outcomes: Sequence[SyncOutcome], *, prefix: str, say: Callable[[str], None]) -> None:
    """Draw two pictures for each setting."""
    for place, methods in grouped(outcomes).items():
        task, split, rate = place
        name = "-".join([prefix, task, split.replace(", ", "-").replace(" ", "-"), str(rate or "loopback")])
        draw_learning(folder / f"{name}.png", methods, task=TASKS[task], heading=title(place))
        draw_places(folder / f"{name}-when.png", methods, heading=title(place))
        say(f"written: {folder / name}.png and {name}-when.png")


def draw_learning(path: Path, methods: dict[str, list[SyncOutcome]], *, task: LearningTask, heading: str) -> None:
    """Draw scores over seconds and over bytes; a line for each method, of its first seed."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.2), dpi=130, sharey=True)
        for name, (color, dash) in styles({k: v for k, v in methods.items() if k not in HIDDEN}).items():
            first = methods[name][0]
            left.plot(first.seconds, first.scores, color=color, linestyle=dash, label=name, linewidth=1.8)
            megabytes = [max(sent, 1) / 1e6 for sent in first.sent]
            right.plot(megabytes, first.scores, color=color, linestyle=dash, linewidth=1.8)
        for axes, label in ((left, "seconds"), (right, "MB sent by all workers")):
            axes.set(xlabel=label, xscale="log")
            axes.axhline(task.target, color="#999999", linewidth=1)
            axes.grid(alpha=0.25)
        right.set_xlim(left=LEAST_MB)
        left.set_ylabel(f"held-out {task.measure} of the averaged weights")
        left.annotate("target", (left.get_xlim()[0], task.target), xytext=(4, 3), textcoords="offset points")
        left.set_title(heading, loc="left", fontweight="bold")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=10)
        figure.tight_layout(rect=(0, 0.03 + 0.035 * -(-len(labels) // 4), 1, 1))
        figure.savefig(path)
        plt.close(figure)


def styles(methods: dict[str, list[SyncOutcome]]) -> dict[str, tuple[str, Any]]:
    """Return a colour for each kind of method, and a dash for each method of it."""
    seen: dict[str, int] = {}
    found: dict[str, tuple[str, Any]] = {}
    kinds = list(COLORS)
    for name in sorted(methods, key=lambda name: kinds.index(methods[name][0].run.kind)):
        run = methods[name][0].run
        as_published = "delta" in run.settings and "signal" not in run.settings
        color = PUBLISHED_COLOR if as_published else COLORS[run.kind]
        found[name] = (color, DASHES[seen.get(color, 0) % len(DASHES)])
        seen[color] = seen.get(color, 0) + 1
    return found


def draw_places(path: Path, methods: dict[str, list[SyncOutcome]], *, heading: str) -> None:
    """Draw a row for each method and a mark for each synchronisation; seeds are below each other."""
    shown = {name: style for name, style in styles(methods).items() if methods[name][0].run.kind != "SSP"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 1.6 + 0.42 * len(shown)), dpi=130, layout="constrained")
        for place, (name, (color, _)) in enumerate(shown.items()):
            _draw_row(axes, place, methods[name], color)
        counts = [statistics.median(len(each.synchronised) for each in methods[name]) for name in shown]
        labels = [f"{name} ({count:g})" for name, count in zip(shown, counts, strict=True)]
        axes.set_yticks(range(len(shown)), labels)
        axes.set(xlabel="step", xlim=(0, None), ylim=(len(shown) - 0.4, -0.6))
        axes.set_title(f"Where synchronisations fall: {heading}", loc="left", fontweight="bold", fontsize=12)
        figure.savefig(path)
        plt.close(figure)


def _draw_row(axes: Axes, place: int, runs: Sequence[SyncOutcome], color: str) -> None:
    height = 0.8 / len(runs)
    for n, run in enumerate(runs):
        middle = place - 0.4 + (n + 0.5) * height
        axes.eventplot([run.synchronised], lineoffsets=middle, linelengths=0.85 * height, colors=color, linewidths=1.1)
