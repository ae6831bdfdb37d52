"""Draws layouts.svg: the layers of each worker before a loss, after it, and after a join, as a run lays them out.

python docs/images/layouts.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from holdfast.plan.lay_out import lay_out
from holdfast.plan.layout import Layout
from holdfast.plan.planner import Shortage
from holdfast.plan.profile import uniform
from holdfast.words import count

LAYERS, MICRO_BATCHES, MEMORY = 12, 16, int(1.8e9)
WORKERS = [f"w{number}" for number in range(7)]
LOST, JOINED = "w2", "w7"
COLORS = ("#8ec1ea", "#f2c078", "#a8d5a2")  # of pipelines
EMPTY, LINE = "#f4f1ea", "#ffffff"

Held = Mapping[str, frozenset[int]]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One layout of the picture: what its workers held before it, and the colours of the pipelines they were in."""

    title: str
    workers: Sequence[str]
    held: Held
    before: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        found = lay_out(
            layers=LAYERS,
            workers=self.workers,
            held=self.held,
            leaving=(),
            micro_batches=MICRO_BATCHES,
            tolerate=1,
            stages=None,
            profile=replace(uniform(LAYERS), memory=MEMORY),
            hosts={},
        )
        assert not isinstance(found, Shortage), found.reason
        return found

    @property
    def places(self) -> dict[str, frozenset[int]]:
        lines = self.layout.pipelines
        return {
            self.workers[rank]: frozenset(layers)
            for line in lines
            for rank, layers in zip(line.ranks, line.layers, strict=True)
        }

    @property
    def colors(self) -> dict[str, str]:
        """Colour of each worker: a pipeline keeps the colour that most of its workers had."""
        found: dict[str, str] = {}
        for line in self.layout.pipelines:
            free = [color for color in COLORS if color not in found.values()]
            names = [self.workers[rank] for rank in line.ranks]
            color = max(free, key=lambda color: sum(self.before.get(name) == color for name in names))
            found |= dict.fromkeys(names, color)
        return found

    @property
    def moved(self) -> int:
        return sum(len(layers - self.held.get(worker, frozenset())) for worker, layers in self.places.items())


def draw(axes: Axes, scene: Scene, *, at_first: bool) -> None:
    row = 0.0
    layout = scene.layout
    for line, share in zip(layout.pipelines, layout.shares(MICRO_BATCHES), strict=True):
        top = row
        for rank, layers in zip(line.ranks, line.layers, strict=True):
            worker = scene.workers[rank]
            before = scene.held.get(worker, frozenset())
            axes.text(-0.4, row + 0.5, worker, ha="right", va="center", fontsize=11)
            for layer in range(LAYERS):
                cell = Rectangle((layer, row), 1, 0.86, facecolor=EMPTY, edgecolor=LINE, linewidth=1.5)
                if layer in layers:
                    cell.set_facecolor(scene.colors[worker])
                    if layer not in before and not at_first:
                        cell.set(hatch="////", edgecolor="#333333", linewidth=0)
                elif layer in before:
                    cell.set(facecolor="white", edgecolor="#999999", linestyle=":", linewidth=1.2)
                axes.add_patch(cell)
            row += 1
        middle = (top + row) / 2 - 0.07
        axes.text(LAYERS + 0.3, middle, count(len(share), "micro-batch"), va="center", fontsize=10)
        row += 0.35
    moved = "" if at_first else f": {count(scene.moved, 'layer')} sent"
    axes.set_title(f"{scene.title}{moved}", loc="left", fontsize=12)
    axes.set_xlim(0, LAYERS)
    axes.set_ylim(8.2, 0)
    axes.set_xticks([layer + 0.5 for layer in range(LAYERS)], [str(layer) for layer in range(LAYERS)], fontsize=9)
    axes.set_yticks([])
    axes.set_xlabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def main() -> None:
    start = Scene(title="7 workers", workers=WORKERS, held={}, before={})
    left = [worker for worker in WORKERS if worker != LOST]
    lost = Scene(title=f"{LOST} is lost", workers=left, held={w: start.places[w] for w in left}, before=start.colors)
    joined = Scene(title=f"{JOINED} joins", workers=[*left, JOINED], held=lost.places, before=lost.colors)
    # Text as text makes an SVG small; a salt and no date make the same layouts the same file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "holdfast"}):
        figure, grid = plt.subplots(1, 3, figsize=(12.5, 4), layout=ConstrainedLayoutEngine(wspace=0.09))
        for axes, scene in zip(grid, (start, lost, joined), strict=True):
            draw(axes, scene, at_first=scene is start)
            print(f"{scene.title}: {scene.layout.reason}; {count(scene.moved, 'layer')} sent")
        patches = [
            Patch(color=COLORS[0], label="held; each colour is a pipeline"),
            Patch(facecolor="white", edgecolor="#333333", hatch="////", label="is sent to this worker"),
            Patch(facecolor="white", edgecolor="#999999", linestyle=":", label="held before, then released"),
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        figure.savefig(Path(__file__).with_name("layouts.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
