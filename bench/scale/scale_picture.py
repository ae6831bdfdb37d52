"""The picture of ``bench scale``: counts and times over the number of workers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.scale.real_workers import Measured

STYLE: Any = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
COLORS = ("#16324f", "#2a9d8f")


def draw(
    path: Path,
    real: Mapping[int, Measured],
    *,
    formed: Mapping[int, Sequence[float]],
    losses: Mapping[int, Sequence[float]],
) -> None:
    """Draw messages, bytes, the coordinator's processor time, and the time to the next commit.

    ``formed`` and ``losses``: the coordinator's seconds with simulated connections, by the number of workers.
    """
    path.parent.mkdir(exist_ok=True)
    sizes = sorted(real)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(11, 7.4), dpi=130, layout="constrained")
        (messages, size), (coordinator, commit) = grid
        for name, label, color in (("vote", "a vote", COLORS[0]), ("group", "a regroup", COLORS[1])):
            for axes, what in ((messages, "messages"), (size, "bytes")):
                values = [real[n].per_worker(f"{name}_{what}") for n in sizes]
                axes.plot(sizes, values, "o-", color=color, label=label)
        messages.plot(sizes, [n - 1 for n in sizes], ":", color="gray", label="to everybody")
        messages.set_ylim(0, 12)
        size.set_ylim(0, None)
        medians = [statistics.median(loss.coordinator_ms for loss in real[n].losses) for n in sizes]
        begins = [real[n].forming_ms for n in sizes]
        for what, near, far, color in (("begin", begins, formed, COLORS[1]), ("loss", medians, losses, COLORS[0])):
            coordinator.plot(sizes, near, "o-", color=color, label=f"a {what}, real workers")
            ms = [1000 * statistics.median(seconds) for seconds in far.values()]
            coordinator.plot(list(far), ms, "s--", color=color, label=f"a {what}, simulated connections")
        coordinator.set_yscale("log")
        times = [statistics.median(loss.ms for loss in real[n].losses) for n in sizes]
        commit.plot(sizes, times, "o-", color=COLORS[0], label="all workers on this machine")
        commit.set_ylim(0, None)
        titles: tuple[str, ...] = (
            "Messages that a worker sends",
            "Bytes of them",
            "Processor ms of the coordinator",
        )
        titles = (*titles, "ms from a kill to the next commit")
        for axes, title in zip((messages, size, coordinator, commit), titles, strict=True):
            _finish(axes, title, [*sizes, *losses] if axes is coordinator else sizes)
        figure.savefig(path)
        plt.close(figure)


def _finish(axes: Axes, title: str, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [f"{n:,}" for n in sizes], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=10)
