"""Picture of a step: a row per stage, bars for its operations, bubbles in between; as data, and as PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.pictures.plan_words import layers_text
from holdfast.plan.planner import Pipeline
from holdfast.plan.template import Template, TemplateStage
from holdfast.plan.timeline import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("forward", "backward", "send", "tail", "bubble")
COLORS = dict(zip(KINDS, ("#8ec1ea", "#1f5f99", "#f2a33a", "#b9b9b9", "#f4f1ea"), strict=True))
NAMES = {"tail": "gradients summed, update"}  # kinds that the legend calls otherwise
BARS = 300_000  # operations simulated for one picture at most: bounds its time and memory
DRAWN = 6_000  # bars of a panel above which an SVG contains a bitmap, to stay small
PANELS = 4  # kinds of pipelines drawn at most, so that the picture fits on a page
ROWS = 24  # stages drawn of a pipeline at most, so that the picture fits on a page

Bar = tuple[float, float]  # begin, end


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One step of a pipeline's first lane, in seconds from its begin."""

    template: Template
    micro_batches: int  # of this lane, as drawn
    bars: tuple[dict[str, list[Bar]], ...]  # for each stage, the bars of each of the KINDS
    idle: tuple[float, ...]  # for each stage, the share of the step that is bubble
    filled: float  # end of the first stage's first backward
    done: float  # end of the last backward; only gradient sums and updates follow
    end: float  # end of the step


def chart(pipeline: Pipeline) -> Chart:
    """Return what the devices of a pipeline's first lane do in a step. The other lanes do the same at the same time.

    The step of a long pipeline with very many micro-batches is drawn with fewer (``Chart.micro_batches``), but
    ``idle`` is for all of them.
    """
    template = pipeline.template
    times = [stage.times for stage in template.stages]
    drawn = min(_in_a_lane(pipeline), max(1, BARS // (2 * len(times))))
    bars: list[dict[str, list[Bar]]] = [{kind: [] for kind in KINDS} for _ in times]
    for span in simulate(times, drawn):
        bars[span.stage][span.kind].append((span.start, span.computed))
        if span.end > span.computed:
            bars[span.stage]["send"].append((span.computed, span.end))
    for row, stage in zip(bars, template.stages, strict=True):
        last = _last(row)
        row["tail"] = [(last, last + _tail(pipeline, stage))] if _tail(pipeline, stage) else []
    end = max(_last(row) for row in bars)
    for row in bars:
        row["bubble"] = _between(row, end)
    return Chart(
        template=template,
        micro_batches=drawn,
        bars=tuple(bars),
        idle=tuple(idle_shares(pipeline)),
        filled=bars[0]["backward"][0][1],
        done=max(row["backward"][-1][1] for row in bars),
        end=end,
    )


def _in_a_lane(pipeline: Pipeline) -> int:
    return max(1, ceil(pipeline.micro_batches / pipeline.template.lanes))


def _tail(pipeline: Pipeline, stage: TemplateStage) -> float:
    """Return the seconds after a stage's last backward: gradient sums and update."""
    return stage.update + (0.0 if pipeline.alone else stage.exchange)


def _last(row: dict[str, list[Bar]]) -> float:
    return max(bars[-1][1] for bars in row.values() if bars)


def _between(row: dict[str, list[Bar]], end: float) -> list[Bar]:
    """Return the bubbles: the times that no other bar covers."""
    gaps, now = [], 0.0
    for begin, until in [*sorted(bar for bars in row.values() for bar in bars), (end, end)]:
        if begin > now + 1e-12:
            gaps.append((now, begin))
        now = until
    return gaps


def idle_shares(pipeline: Pipeline) -> list[float]:
    """Return for each stage the share of the pipeline's step in which it does nothing."""
    number, whole = _in_a_lane(pipeline), pipeline.seconds
    busy = [number * stage.times.total + _tail(pipeline, stage) for stage in pipeline.template.stages]
    return [max(0.0, 1 - seconds / whole) for seconds in busy]


def some(count: int, most: int) -> list[int]:
    """Return at most ``most`` numbers below ``count``, evenly spread, with the first and the last.

    >>> some(4, 8), some(100, 5)
    ([0, 1, 2, 3], [0, 25, 50, 74, 99])
    """
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / (most - 1)) for number in range(most)]


def save(path: Path, *, title: str, panels: Sequence[tuple[str, Pipeline]]) -> None:
    """Write panels (heading, pipeline) one below the other, as PNG or SVG by the path's ending.

    At most ``PANELS`` are drawn, and at most ``ROWS`` stages of each; headings say what they stand for.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    charts = [(heading, chart(pipeline)) for heading, pipeline in panels[:PANELS]]
    heights = [min(len(one.bars), ROWS) + 2.2 for _, one in charts]
    # Text as text makes an SVG small. With a fixed salt and without a date, the same plan gives the same file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "holdfast"}):
        figure, grid = plt.subplots(
            len(charts),
            1,
            squeeze=False,
            sharex=True,
            figsize=(10, 1.3 + 0.34 * sum(heights)),
            dpi=130,
            layout="constrained",
            gridspec_kw={"height_ratios": heights},
        )
        longest = max(one.end for _, one in charts)
        for axes, (heading, one) in zip(grid[:, 0], charts, strict=True):
            _panel(axes, heading, one, longest)
        grid[-1, 0].set_xlabel("seconds of one step")
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _panel(axes: Axes, heading: str, one: Chart, longest: float) -> None:
    rows = some(len(one.bars), ROWS)
    bitmap = sum(len(one.bars[stage][kind]) for stage in rows for kind in KINDS) > DRAWN
    for kind in KINDS:
        style: dict[str, Any] = {"facecolors": COLORS[kind], "label": NAMES.get(kind, kind), "rasterized": bitmap}
        if kind == "bubble":
            style |= {"hatch": "////", "edgecolor": "#d5cfc0", "linewidth": 0}
        else:
            edged = kind in ("forward", "backward") and not bitmap  # sends are too thin for edges
            style |= {"edgecolor": "white", "linewidth": 0.5 if edged else 0.0}
        for row, stage in enumerate(rows):
            bars = [(begin, end - begin) for begin, end in one.bars[stage][kind]]
            axes.broken_barh(bars, (row - 0.4, 0.8), **style)
            style.pop("label", None)  # one entry in the legend is enough
    if not bitmap:
        _number(axes, one, rows, longest)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, longest)
    axes.set_yticks(range(len(rows)), [_label(one, stage) for stage in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    if len(rows) < len(one.bars):
        heading += f"; {len(rows)} of {len(one.bars)} stages drawn"
    axes.set_title(heading, loc="left", fontsize=10)


def _label(one: Chart, stage: int) -> str:
    at = one.template.stages[stage]
    return f"node {at.node}, layers {layers_text(at)}, {one.idle[stage]:.0%} idle"


def _number(axes: Axes, one: Chart, rows: Sequence[int], longest: float) -> None:
    """Write the number of its micro-batch into each bar that is wide enough."""
    for row, stage in enumerate(rows):
        for kind in ("forward", "backward"):
            for number, (begin, end) in enumerate(one.bars[stage][kind]):
                if end - begin > longest * 0.016:
                    color = "white" if kind == "backward" else "black"
                    axes.text((begin + end) / 2, row, str(number), ha="center", va="center", fontsize=7, color=color)
