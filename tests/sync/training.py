"""A small training that replicas share, under a policy or by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from holdfast.sync.loop_training import LoopTraining
from holdfast.sync.policy import Context, Policy
from holdfast.sync.report import Report
from tests.engine.memory_group import on_workers

WORKERS = 3
Weights = list[torch.Tensor]


def make(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(seed)  # the global one is shared by the threads
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - x[:, :1] * x[:, 1:2] - rank).square().mean()


def weights(model: nn.Module) -> Weights:
    return [p.detach().clone() for p in model.parameters()]


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def mean(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total = total + (row - rows[0]) * (1 / len(rows))
    return total


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Trained:
    """Reports and weights of one replica, step by step."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.weights: list[Weights] = []  # after each step
        self.end: Weights = []
        self.loop: Any = None


def train(
    policy: Policy, steps: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, workers: int = WORKERS
) -> list[Trained]:
    def work(group: Any) -> Trained:
        model, seen = make(group.rank), Trained()
        inner = optimizer(model)
        with LoopTraining(policy, model, inner, group, Context()) as loop:
            for step in range(steps):
                inner.zero_grad()
                loss_of(model, group.rank, step).backward()
                inner.step()
                seen.reports.append(loop.last)
                seen.weights.append(weights(model))
        seen.end, seen.loop = weights(model), loop
        return seen

    return on_workers(workers, work)


def by_hand(steps: int, average_at: Callable[[int], bool], *, gradients: bool = False) -> list[list[Weights]]:
    """The weights of each replica after each step, in a loop without any of our code."""
    models = [make() for _ in range(WORKERS)]
    optimizers = [sgd(model) for model in models]
    seen: list[list[Weights]] = [[] for _ in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            loss_of(model, rank, step).backward()
        sets = [list(model.parameters()) for model in models]
        if gradients and average_at(step):
            for copies in zip(*sets, strict=True):
                average = mean([p.grad for p in copies if p.grad is not None])
                for p in copies:
                    p.grad = average.clone()
        for optimizer in optimizers:
            optimizer.step()
        if not gradients and average_at(step):
            for copies in zip(*sets, strict=True):
                average = mean([p.detach() for p in copies])
                for p in copies:
                    p.data.copy_(average)
        for rank, model in enumerate(models):
            seen[rank].append(weights(model))
    return seen
