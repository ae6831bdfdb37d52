"""What a framework's process keeps from one request to the next."""

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
        """Imports the framework, with the first request: what goes wrong is an answer then."""
        if not hasattr(self, "adapter"):
            self.adapter = adapters.find(self._framework)

    @property
    def training(self) -> ModelInTraining:
        if self._training is None:
            raise RuntimeError("no model was made yet")
        return self._training

    @training.setter
    def training(self, training: ModelInTraining | None) -> None:
        self._training = training

    def save(self, form: str, folder: Path) -> Wait | None:
        """The model goes into this folder, under the name that its format gives it."""
        return self.training.save(form, self.place(form, folder))

    def load(self, form: str, folder: Path) -> None:
        self.training.load(form, self.place(form, folder))

    def place(self, form: str, folder: Path) -> Path:
        return folder / f"state{self.adapter.format(form).suffix}"
