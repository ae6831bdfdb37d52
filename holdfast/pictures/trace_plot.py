"""Picture of throughput over time: a panel for each system with the ideal behind it, and the number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.simulate.outcome import SystemOutcome
from holdfast.simulate.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 400  # stretches of time; about a pixel each, so shorter events show as a dent
LONGEST = 110  # characters of a title line: more would not fit
OURS, OTHERS, IDEAL, NODES = "#d62839", "#3a6ea5", "#dfe4ea", "#9aa5b1"


def plot(path: Path, trace: Trace, model: str, outcomes: Sequence[SystemOutcome], ideal: SystemOutcome) -> None:
    """Write the picture as PNG or SVG by the path's ending; systems that cannot run are named in the title.

    Raises HoldfastError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    running = [one for one in outcomes if one.runs and one.system != "ideal"] or [ideal]
    rows = len(running)
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(
            rows + 1,
            1,
            figsize=(9.5, 1.5 + 1.15 * rows),
            dpi=130,
            layout="constrained",
            sharex=True,
            height_ratios=[2.0] * rows + [1.2],
        )
        for axes, outcome in zip(panels, running, strict=False):
            _throughput(axes, outcome, ideal)
        _nodes(panels[-1], trace)
        panels[0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.97), fontsize=10)
        figure.suptitle(_title(trace, model, outcomes), fontsize=10.5, x=0.01, ha="left")
        figure.supylabel("throughput (samples/s)", fontsize=11)
        try:
            figure.savefig(path)
        except OSError as e:  # a full disk, say: check_path has tried the folder before
            raise HoldfastError(f"the plot {path} cannot be written: {e.strerror or e}") from e
        finally:
            plt.close(figure)


def _title(trace: Trace, model: str, outcomes: Sequence[SystemOutcome]) -> str:
    cannot = [f"{outcome.system}: {outcome.note}" for outcome in outcomes if not outcome.runs]
    lines = [f"{model} along {trace.name}", *cannot]
    return "\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]}…" for line in lines)


def _throughput(axes: Axes, outcome: SystemOutcome, ideal: SystemOutcome) -> None:
    start, end = outcome.segments[0].start, outcome.segments[-1].end
    edges = [(start + (end - start) * number / BINS) / 3600 for number in range(BINS + 1)]
    best = ideal.over_time(BINS)
    axes.stairs(best, edges, fill=True, color=IDEAL, label=f"ideal, on average {ideal.samples_per_s:.4g}")
    axes.stairs(outcome.over_time(BINS), edges, fill=True, color=OURS if outcome.system == "holdfast" else OTHERS)
    axes.set_ylim(0, 1.05 * max(best) if any(best) else 1)
    share = f"\n{outcome.samples_per_s / ideal.samples_per_s:.1%} of ideal" if ideal.samples_per_s else ""
    text = f"{outcome.system}\n{outcome.samples_per_s:.4g} samples/s{share}"
    axes.text(1.01, 0.5, text, transform=axes.transAxes, va="center", fontsize=10.5)


def _nodes(axes: Axes, trace: Trace) -> None:
    spans = list(trace.spans())
    edges = [start / 3600 for start, _, _ in spans] + [trace.end / 3600]
    axes.stairs([count for _, _, count in spans], edges, fill=True, color=NODES)
    axes.text(1.01, 0.5, "nodes", transform=axes.transAxes, va="center", fontsize=10.5)
    axes.set_xlabel("time (hours)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(trace.start / 3600, trace.end / 3600)
