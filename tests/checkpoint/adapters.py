"""A model with a large frozen base and small adapters, as LoRA makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint import load, save, series
from holdfast.checkpoint.shared_files import FOLDER

WIDTH = 512  # two frozen weights of 1 MiB


class Adapted(nn.Module):
    """A frozen linear layer, and a trained product of two narrow ones beside it."""

    def __init__(self, width: int = WIDTH, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.base(x) + self.up(self.down(x))


def adapted(seed: int = 0, layers: int = 2, width: int = WIDTH) -> nn.Module:
    """The same base and the same adapters for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(width) for _ in range(layers)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on numbers of a seed."""
    x = torch.randn(4, next(model.parameters()).shape[-1], generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def tree_at(step: int, seed: int = 0, **options: Any) -> dict[str, Any]:
    """What a script has after some steps."""
    model = adapted(seed, **options)
    optimizer = optimizer_of(model)
    for number in range(step):
        train(model, optimizer, number)
    return {"model": model, "optimizer": optimizer, "step": step}


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules have the same bits."""
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def save_step(root: Path, step: int, tree: dict[str, Any] | None = None, **options: Any) -> Path:
    folder = series.folder_of(root, step)
    save(folder, tree or tree_at(step), **options)
    return folder


def is_right(folder: Path, step: int, seed: int = 0) -> bool:
    """Whether a checkpoint gives exactly what a script had at a step; into a model with another base."""
    into = tree_at(0, seed=99)
    load(folder, into)
    expected = tree_at(step, seed)
    slots = zip(into["optimizer"].state.values(), expected["optimizer"].state.values(), strict=True)
    return (
        into["step"] == step
        and same(into["model"], expected["model"])
        and all(torch.equal(a[key], b[key]) for a, b in slots for key in b)
    )


def shared(root: Path) -> list[Path]:
    """The files that the checkpoints of a series share."""
    return sorted((root / FOLDER).glob("*")) if (root / FOLDER).is_dir() else []


def written(folder: Path) -> int:
    """The bytes of a folder's own files."""
    return sum(path.stat().st_size for path in folder.iterdir())
