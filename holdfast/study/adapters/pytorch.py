"""PyTorch: torch.save, safetensors and torch.distributed.checkpoint (DCP), as their documentations have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer does: better once than in every fork that is killed
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast.study.adapters.base import (
    BATCH,
    EVERY_RANK,
    RANK_ZERO,
    STATES,
    Adapter,
    Lesson,
    ModelInTraining,
    SaveFormat,
    Shapes,
    StatePart,
    Wait,
)

MOMENTUM = "momentum_buffer"  # SGD's name for it
DCP = "DCP"


class TorchTraining(ModelInTraining):
    """A module, and torch's SGD."""

    usual_format = SaveFormat(name="torch.save", suffix=".pt")

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self.model = _module(shapes)
        self._parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter][MOMENTUM] = torch.zeros_like(parameter)
        widest = max(parameter[0].numel() for parameter in self.model.parameters())
        self._x = torch.from_numpy(np.random.default_rng(seed).standard_normal((BATCH, widest), np.float32))
        self.reset(seed)

    def step(self) -> float:
        loss: Any = torch.zeros(())
        for weight in self.model.parameters():
            if weight.ndim > 1:
                rows = weight.flatten(1)
                loss = loss + (self._x[:, : rows.shape[1]] @ rows.T).square().mean()
            else:
                loss = loss + weight.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all weights and momentum as tensors, which share the model's memory."""
        names = [state + name for name in self._parameters for state in STATES]
        return {name: self._tensor(name) for name in names}

    def _tensor(self, name: str) -> torch.Tensor:
        state, parameter = name.split("/", 1)
        found = self._parameters[parameter]
        return found.detach() if state == "weights" else self.optimizer.state[found][MOMENTUM]

    def arrays(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self.tensors().items()}

    def put(self, arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            self._tensor(name).copy_(torch.from_numpy(array))

    def save(self, form: str, path: Path) -> Wait | None:
        match form:
            case "torch.save":
                torch.save(self._state(), path)
            case "torch.save, renamed":
                self._save_renamed(path)
            case "safetensors":
                save_file(self.tensors(), path)
            case "DCP":
                _dcp().save(self.model, self.optimizer, path)
            case "DCP async":
                return _dcp().async_save(self.model, self.optimizer, path)
        return None

    def _save_renamed(self, path: Path) -> None:
        beside = path.with_suffix(".new")
        with beside.open("wb") as file:
            torch.save(self._state(), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # or a power cut may take the new name back
        os.fsync(folder)
        os.close(folder)

    def load(self, form: str, path: Path) -> None:
        if form == "safetensors":
            loaded = load_file(path)
            for name, tensor in self.tensors().items():
                tensor.copy_(loaded[name])
        elif form.startswith(DCP):
            _dcp().load(self.model, self.optimizer, path)
        else:
            loaded = torch.load(path, weights_only=True)
            self.model.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])

    def save_ranked(self, strategy: str, path: Path, rank: int, ranks: int) -> None:
        if strategy == DCP:
            self.save(DCP, path / "state")
        else:
            super().save_ranked(strategy, path, rank, ranks)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _dcp() -> ModuleType:
    """Import DCP only when it is needed: it takes seconds, and lessons do without."""
    from holdfast.study.adapters import pytorch_dcp

    return pytorch_dcp


def _module(shapes: Shapes) -> nn.Module:
    """Make a module with parameters of these names; dots make modules inside modules.

    >>> [name for name, _ in _module([("a.b.weight", (2, 3)), ("a.bias", (2,)), ("c", (1,))]).named_parameters()]
    ['c', 'a.bias', 'a.b.weight']
    """
    root = nn.Module()
    for name, shape in shapes:
        *path, last = name.split(".")
        module = root
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, nn.Parameter(torch.zeros(*shape)))
    return root


def meet(rank: int, ranks: int, address: str) -> None:
    """Make a Gloo group with the other ranks, in place of the one before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    host, port = address.rsplit(":", 1)
    store = dist.TCPStore(host, int(port), ranks, is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


class PyTorch(Adapter):
    """torch, with torchdata's loader and safetensors."""

    name = "pytorch"
    formats = (
        TorchTraining.usual_format,
        SaveFormat(name="torch.save, renamed", suffix=".pt"),
        SaveFormat(name="safetensors", suffix=".safetensors"),
        SaveFormat(name=DCP),
        SaveFormat(name="DCP async", background=True),
    )
    strategies = (RANK_ZERO, EVERY_RANK, DCP)
    parts = (
        StatePart(name="model", what="model.state_dict()"),
        StatePart(name="optimizer", what="optimizer.state_dict()"),
        StatePart(name="scheduler", what="scheduler.state_dict()"),
        StatePart(name="loader", what="state_dict() of torchdata's StatefulDataLoader"),
        StatePart(name="average", what="state_dict() of the AveragedModel"),
        StatePart(name="torch rng", what="torch.get_rng_state(), set again after the loader's iterator was made"),
        StatePart(name="numpy rng", what="np.random.get_state()"),
        StatePart(name="python rng", what="random.getstate()"),
    )
    usual = frozenset({"model", "optimizer"})
    usual_means = "model and optimizer, as in the tutorial on general checkpoints"
    variants = ("", "worker processes")

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("torch", "safetensors", "torchdata")}

    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        return TorchTraining(shapes, seed)

    def lesson(self, seed: int, variant: str = "") -> Lesson:
        from holdfast.study.adapters.pytorch_lesson import TorchLesson

        return TorchLesson(seed, workers=2 if variant else 0)

    def join(self, rank: int, ranks: int, address: str) -> None:
        meet(rank, ranks, address)


ADAPTER = PyTorch()
