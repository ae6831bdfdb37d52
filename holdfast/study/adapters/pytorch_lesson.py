"""A small run in PyTorch, with all the randomness that scripts have."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from holdfast.study.adapters.base import EPOCH, Lesson, bits, digest

ROWS, WIDTH, CLASSES = 8, 16, 4  # samples of a batch, their numbers, and their classes
FILE = "checkpoint.pt"


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise from numpy's generator, mirrored by Python's, each time anew."""

    def __init__(self) -> None:
        source = np.random.default_rng(0)
        self._inputs = source.standard_normal((EPOCH * ROWS, WIDTH), np.float32)
        self._targets = source.integers(CLASSES, size=EPOCH * ROWS)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = self._inputs[index] + 0.1 * np.random.standard_normal(WIDTH)
        if random.random() < 0.5:
            sample = sample[::-1].copy()
        return torch.from_numpy(sample.astype(np.float32)), int(self._targets[index])


def small_net() -> nn.Sequential:
    """Make the net of the lessons of PyTorch and holdfast."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, CLASSES))


def digest_of(tensors: Iterator[torch.Tensor]) -> str:
    """Return one hash of all tensors."""
    return digest(np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors]))


class TorchLesson(Lesson):
    """A training run as a careful user of PyTorch writes it."""

    def __init__(self, seed: int, *, workers: int = 0) -> None:
        # Not above: holdfast's lesson shares the rest, where torchdata need not be installed.
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self._model = small_net()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: 0.9**step)
        average: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self._average = AveragedModel(self._model, multi_avg_fn=average)
        self._loader = StatefulDataLoader(Augmented(), batch_size=ROWS, shuffle=True, num_workers=workers)
        self._batches: Iterator[Any] | None = None

    def train(self, steps: int) -> list[str]:
        return [bits(self._step(*self._next_batch())) for _ in range(steps)]

    def _next_batch(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss: Any = nn.functional.cross_entropy(self._model(inputs), targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._scheduler.step()
        self._average.update_parameters(self._model)
        return float(loss)

    def digests(self) -> dict[str, str]:
        slots = self._optimizer.state.values()
        return {
            "weights": digest_of(iter(self._model.parameters())),
            "optimizer": digest_of(slot["momentum_buffer"] for slot in slots),
            "average": digest_of(iter(self._average.parameters())),
        }

    def save(self, path: Path, parts: frozenset[str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        # In this order: to ask the loader for its state may make its iterator, and that draws from torch's generator.
        state = {name: thing.state_dict() for name, thing in self._stateful().items() if name in parts}
        state |= {name: get() for name, (get, _) in GENERATORS.items() if name in parts}
        torch.save(state, path / FILE)

    def restore(self, path: Path, parts: frozenset[str]) -> None:
        state = torch.load(path / FILE, weights_only=False)  # numpy's and Python's generators are no tensors
        for name, thing in self._stateful().items():
            if name in parts:
                thing.load_state_dict(state[name])
        if "loader" in parts:
            self._batches = iter(self._loader)  # draws from torch's generator, so that is set afterwards
        for name, (_, put) in GENERATORS.items():
            if name in parts:
                put(state[name])

    def _stateful(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "average": self._average,
            "loader": self._loader,
        }


GENERATORS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch rng": (torch.get_rng_state, torch.set_rng_state),
    "numpy rng": (np.random.get_state, np.random.set_state),
    "python rng": (random.getstate, random.setstate),
}
