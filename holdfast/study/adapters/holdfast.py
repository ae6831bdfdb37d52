"""Holdfast's own checkpoints, of the same model as PyTorch's."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from holdfast.checkpoint import async_save, load, save
from holdfast.study.adapters.base import Adapter, Lesson, ModelInTraining, SaveFormat, Shapes, Wait
from holdfast.study.adapters.pytorch import TorchTraining, meet

BACKGROUND = SaveFormat(name="holdfast async", background=True)


class HeldTraining(TorchTraining):
    """PyTorch's model, saved by holdfast."""

    usual_format = SaveFormat(name="holdfast")

    def save(self, form: str, path: Path) -> Wait | None:
        if form == BACKGROUND.name:
            return async_save(path, self._tree()).wait
        save(path, self._tree())
        return None

    def load(self, form: str, path: Path) -> None:
        load(path, self._tree())

    def save_ranked(self, strategy: str, path: Path, rank: int, ranks: int) -> None:
        """Save on all ranks; holdfast itself shares the writing among them."""
        self.save(self.usual_format.name, path / "state")

    def _tree(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


class Holdfast(Adapter):
    """A ``Run`` saves and restores itself: there are no parts that a script could forget."""

    name = "holdfast"
    formats = (HeldTraining.usual_format, BACKGROUND)
    strategies = ("holdfast",)
    usual_means = "all of it: a Run saves itself, and its random numbers depend on seed and step alone"

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("holdfast", "torch")}

    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        return HeldTraining(shapes, seed)

    def lesson(self, seed: int, variant: str = "") -> Lesson:
        from holdfast.study.adapters.holdfast_lesson import HeldLesson

        return HeldLesson(seed)

    def join(self, rank: int, ranks: int, address: str) -> None:
        meet(rank, ranks, address)


ADAPTER = Holdfast()
