"""What a framework's process keeps from one request to the next."""

from __future__ import annotations

from pathlib import Path

from holdfast.study.adapters.base import Adapter, Training, Wait


class Session:
    """The adapter, and the model that was made last."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._training: Training | None = None

    @property
    def training(self) -> Training:
        if self._training is None:
            raise RuntimeError("no model was made yet")
        return self._training

    @training.setter
    def training(self, training: Training | None) -> None:
        self._training = training

    def save(self, form: str, folder: Path) -> Wait | None:
        """The model goes into this folder, under the name that its format gives it."""
        return self.training.save(form, self.place(form, folder))

    def load(self, form: str, folder: Path) -> None:
        self.training.load(form, self.place(form, folder))

    def place(self, form: str, folder: Path) -> Path:
        return folder / f"state{self.adapter.format(form).suffix}"
