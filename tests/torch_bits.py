"""Hashes of small trainings with this interpreter's torch, as JSON. ``torch_versions.py`` compares two of them.

Usual layers, optimizers and dtypes, on the CPU with one thread. Nothing of holdfast takes part.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, WIDTH, CLASSES, STEPS = 16, 24, 32, 10, 10
BF16 = torch.bfloat16


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


class Attention(nn.Module):
    """Causal, with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(self.norm(x)).view(BATCH, LENGTH, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)[:, -1]


def mlp() -> nn.Module:
    body = [nn.Linear(WIDTH, 70), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(70), nn.Linear(70, 1024), nn.Tanh()]
    return nn.Sequential(nn.Flatten(0, 1), *body, nn.Linear(1024, CLASSES), nn.Unflatten(0, (BATCH, LENGTH)), Mean())


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def convolutions() -> nn.Module:
    first = [nn.Unflatten(2, (4, 8)), nn.Conv2d(LENGTH, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.MaxPool2d(2), nn.Conv2d(16, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.SiLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def with_head(body: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(body(), nn.Linear(WIDTH, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "convolutions": convolutions,
    "LSTM": partial(with_head, lambda: Last(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1))),
    "GRU": partial(with_head, lambda: Last(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "attention": partial(with_head, Attention),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(model: str, optimizer: str = "AdamW", *, dtype: torch.dtype = torch.float32, autocast: bool = False) -> str:
    """The hash of the weights and buffers after a few steps, each with dropout and clipping."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, LENGTH, WIDTH).to(dtype), torch.randint(0, CLASSES, (BATCH,))
    module = MODELS[model]().to(dtype)
    update = OPTIMIZERS[optimizer](module.parameters())
    for _ in range(STEPS):
        with torch.autocast("cpu", BF16, enabled=autocast):
            loss = nn.functional.cross_entropy(module(x), y)
        update.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        update.step()
    return digest(module.state_dict().values())


def bits() -> dict[str, str]:
    found = {f"{model}, AdamW": train(model) for model in MODELS}
    found |= {f"{model}, autocast to bfloat16": train(model, autocast=True) for model in MODELS}
    found |= {f"MLP, {optimizer}": train("MLP", optimizer) for optimizer in OPTIMIZERS}
    return found | {f"MLP, {dtype}": train("MLP", dtype=dtype) for dtype in (BF16, torch.float64)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(bits()))
