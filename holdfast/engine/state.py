"""The whole state of a run, layer by layer: for a joiner, and for the hash that proves exactness."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from holdfast import codec
from holdfast.engine.model import LayeredModel
from holdfast.engine.update import Update
from holdfast.errors import CheckpointError


class State:
    """Reads and writes the model's and the optimizer's state in parts; the last part is what they share.

    ``progress`` is whatever else a joiner needs to know, such as the step.
    """

    def __init__(self, model: LayeredModel, update: Update, progress: dict[str, Any], *, exact: bool = True) -> None:
        self.model = model
        self.update = update
        self.progress = progress
        self._exact = exact

    def __len__(self) -> int:
        return len(self.model.layers) + 1

    def read(self, part: int) -> Any:
        if part == len(self.model.layers):
            return {"settings": self.update.settings(), "progress": self.progress}
        parameters, buffers = self.model.parts()[part]
        trained = [p for p in parameters if p.requires_grad]
        # Buffers are copied: a forward pass may change them before what is sent has arrived.
        copies = [buffer.clone() for buffer in buffers]
        return {"parameters": parameters, "buffers": copies, "slots": self.update.slots(trained)}

    @torch.no_grad()
    def write(self, part: int, value: Any) -> None:
        if part == len(self.model.layers):
            self.update.set_settings(value["settings"])
            self.progress.clear()
            self.progress.update(value["progress"])
            return
        parameters, buffers = self.model.parts()[part]
        for mine, theirs in zip([*parameters, *buffers], [*value["parameters"], *value["buffers"]], strict=True):
            mine.copy_(theirs)
        self.update.set_slots([p for p in parameters if p.requires_grad], value["slots"])

    # --- checkpoints -----------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """What a checkpoint of a run holds: what other tools expect, and what only we need."""
        return {
            **self.targets(),
            "scheduler": self.update.settings()["scheduler"],
            "step": self.progress["step"],
            "run": {"progress": self.progress, "transient": self._transient(), "made_of": self._made_of()},
        }

    def targets(self) -> dict[str, Any]:
        """What a checkpoint fills: model and optimizer in place, the rest as values for ``restore``."""
        model, optimizer = self.model.module, self.update.optimizer
        return {"model": model, "optimizer": optimizer, "scheduler": None, "step": None, "run": None}

    @torch.no_grad()
    def restore(self, filled: dict[str, Any]) -> None:
        """Takes over the values that were read with ``targets``."""
        run = filled["run"]
        for what, before, now in zip(("optimizer", "scheduler"), run["made_of"], self._made_of(), strict=True):
            if before != now:
                raise CheckpointError(f"the {what} was a {before} and is a {now}", hint="resume with the same one")
        if self.update.scheduler is not None:
            self.update.scheduler.load_state_dict(filled["scheduler"])
        for name, buffer in self._transient().items():
            if name not in run["transient"]:
                raise CheckpointError(f"the checkpoint has no buffer {name}", hint="resume with the same model")
            buffer.copy_(run["transient"][name])
        self.progress.clear()
        self.progress.update(filled["run"]["progress"])

    def _made_of(self) -> list[str]:
        return [type(self.update.optimizer).__name__, type(self.update.scheduler).__name__]

    def _transient(self) -> dict[str, torch.Tensor]:
        """Buffers that a module does not want to be saved; a run that goes on exactly needs them all the same."""
        if not self._exact:  # there they may differ between workers
            return {}
        saved = self.model.module.state_dict()
        return {name: buffer for name, buffer in self.model.module.named_buffers() if name not in saved}

    # --- the proof -------------------------------------------------------------------------------

    def sha256(self, *, weights_only: bool = False) -> str:
        """Over names, shapes and bytes of weights and buffers, and of the optimizer's slots."""
        digest = hashlib.sha256()
        for name, tensor in self.model.module.state_dict().items():
            _digest(digest, [name, tensor])
        if not weights_only:
            names = [n for n, p in self.model.module.named_parameters() if p.requires_grad]
            for name, slots in zip(names, self.update.slots(self.model.trainable), strict=True):
                _digest(digest, [name, dict(sorted(slots.items()))])
        return digest.hexdigest()


def _digest(digest: hashlib._Hash, value: Any) -> None:
    text, tensors = codec.flatten(value)
    digest.update(text)
    for tensor in tensors:
        digest.update(as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, whatever its dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
