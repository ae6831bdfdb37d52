"""Layers whose forward pass writes into their own tensors, each in another way."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.engine.pipelines import WIDTH, fill, linear

How = Literal["in place", "replaced", "through .data", "another .data"]
What = Literal["buffer", "frozen", "trained"]


class Writer(nn.Module):
    """Adds the mean of its input to a tensor. ``first``: the call that writes first. ``size``: of the tensor."""

    def __init__(self, how: How, what: What = "buffer", *, first: int = 0, size: int = 3) -> None:
        super().__init__()
        self.how, self.first, self.calls = how, first, 0
        self.lin = linear()
        if what == "buffer":
            self.register_buffer("kept", torch.ones(size))
        else:
            self.kept = nn.Parameter(torch.ones(size), requires_grad=what == "trained")

    def forward(self, x: Tensor) -> Tensor:
        if self.calls >= self.first:
            self.write(x.detach().mean())
        self.calls += 1
        return self.lin(x) * self.kept.detach()[0].tanh()

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        kept: Any = self.kept
        if self.how == "in place":
            kept[0] += value
        elif self.how == "replaced":
            new = kept + value
            self.kept = nn.Parameter(new, kept.requires_grad) if isinstance(kept, nn.Parameter) else new
        elif self.how == "through .data":
            kept.data[0] += value
        else:
            kept.data = kept.data + value


class Counts(nn.Module):
    """Counters of several types, a moving average through ``.data``, a queue, and tables that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("short", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("queue", torch.zeros(3, WIDTH), persistent=False)
        self.register_buffer("table", fill(torch.empty(50), 7))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    @torch.no_grad()
    def note(self, x: Tensor) -> None:
        self.batches += 1
        self.seen[int(self.batches) % 4] = True
        self.average.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.short += 0.125
        self.wave.data += torch.complex(x.mean(), x.sum())
        self.queue = torch.cat([self.queue[1:], x.mean(0, keepdim=True)])  # replaced at each call

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.note(x.detach())
        return self.lin(x) + self.average + self.queue[0] + self.table[0]


class CountsEvaluations(nn.Module):
    """Writes only where it should not write at all."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()
        self.register_buffer("looks", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.looks.data += 1
        return self.lin(x)


class MakesBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "cache", None) is None:
            self.register_buffer("cache", x.detach().mean())
        return self.lin(x)
