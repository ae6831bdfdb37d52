"""The state of a framework's process between two requests."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from holdfast.study import adapters
from holdfast.study.adapters.base import Adapter, ModelInTraining, Wait


class Session:
    """The adapter, and the model that was made last."""

    adapter: Adapter
    pipes: tuple[IO[str], IO[str]]  # requests, answers

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._training: ModelInTraining | None = None

    def begin(self) -> None:
        """Import the framework at the first request, so that an error becomes an answer."""
        if not hasattr(self, "adapter"):
            self.adapter = adapters.find(self._framework)

    @property
    def training(self) -> ModelInTraining:
        """The model that was made last; raises ``RuntimeError`` if there is none."""
        if self._training is None:
            raise RuntimeError("no model was made yet")
        return self._training

    @training.setter
    def training(self, training: ModelInTraining | None) -> None:
        self._training = training

    def save(self, form: str, folder: Path) -> Wait | None:
        """Save the model into a folder; a save in the background returns a function that waits for its end."""
        return self.training.save(form, self.place(form, folder))

    def load(self, form: str, folder: Path) -> None:
        """Load what ``save`` has written into a folder."""
        self.training.load(form, self.place(form, folder))

    def place(self, form: str, folder: Path) -> Path:
        """Return the path of a save in a folder."""
        return folder / f"state{self.adapter.format(form).suffix}"
