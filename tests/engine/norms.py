"""Models with running statistics, each kept in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.engine.pipelines import WIDTH, Layer, fill, linear


def images(samples: int) -> TensorDataset:
    """Small images of two classes."""
    labels = torch.arange(samples) % 2
    return TensorDataset(fill(torch.empty(samples, 3, 6, 6), 3) + labels.view(-1, 1, 1, 1), labels)


class Block(nn.Module):
    """A residual block, as in a ResNet."""

    def __init__(self, width: int, **norm: Any) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, **norm)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, **norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (x + self.norm2(self.conv2(y))).relu()


def resnet(width: int = 4, **norm: Any) -> list[nn.Module]:
    """A small ResNet for ``images``."""
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, **norm), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))
    return [stem, Block(width, **norm), Block(width, **norm), head]


class OwnForward(nn.BatchNorm1d):
    """A subclass with a forward pass of its own, as libraries have them: normalises, then activates."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        normal = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=self.training, momentum=0.2
        )
        return nn.functional.gelu(normal)


class OwnRule(nn.BatchNorm1d):
    """A subclass that writes its running mean by hand."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            assert self.running_mean is not None
            self.running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


class Recent(nn.Module):
    """Keeps the largest input and the number of samples, and says how these are combined. Uses them in training."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()
        self.register_buffer("largest", torch.ones(WIDTH))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int32))
        self.register_buffer("noise", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.lin(x) / self.largest
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().amax(0))
            self.samples += len(x)
        return scaled

    def combine_statistics(self, measured: list[dict[str, Tensor]]) -> None:
        """Take the largest of all, and count all; the order must be that of the micro-batches."""
        before = self.samples.clone()
        for one in measured:
            self.largest = 0.5 * self.largest + 0.5 * one["largest"]
            self.samples += one["samples"] - before
        self.noise.copy_(torch.rand(2))


class Hidden(nn.Module):
    """Two layers that are computed again in the backward pass, to save memory."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def both(x: Tensor, norm: nn.Module) -> Tensor:
    """Calls a module twice, as a siamese network does."""
    return norm(x) + norm(x * x)


def sometimes(x: Tensor, norm: nn.Module) -> Tensor:
    """Calls a module for some micro-batches only, for others twice."""
    if x[0, 0] < -0.5:
        return x
    return norm(x) if x[0, 0] < 0.5 else norm(norm(x))


def frozen(x: Tensor, norm: nn.Module) -> Tensor:
    """Normalises by the running statistics, also in training."""
    return norm.eval()(x)


def shared(affine: bool) -> list[nn.Module]:
    """One normalisation in two layers."""
    norm = nn.BatchNorm1d(WIDTH, affine=affine)
    return [nn.Sequential(linear(), norm), linear(), nn.Sequential(nn.Tanh(), norm), linear()]


def with_norm(function: Callable[..., Any], **norm: Any) -> list[nn.Module]:
    return [linear(), Layer(function, nn.BatchNorm1d(WIDTH, **norm)), linear()]


def within(module: nn.Module) -> list[nn.Module]:
    return [linear(), module, linear()]


class Turned(nn.Module):
    """Normalises along another dimension, so that the input is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.view(len(x), 2, 3).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: within(nn.BatchNorm1d(WIDTH)),
    "large momentum": lambda: within(nn.BatchNorm1d(WIDTH, momentum=0.7)),
    "a plain mean": lambda: within(nn.BatchNorm1d(WIDTH, momentum=None)),
    "different momenta": lambda: [linear(), nn.BatchNorm1d(WIDTH, momentum=0.3), *within(nn.BatchNorm1d(WIDTH))],
    "64 bits among 32": lambda: [
        *within(nn.BatchNorm1d(WIDTH)),
        Layer(lambda x, norm: norm(x.double()).float(), nn.BatchNorm1d(WIDTH).double()),
    ],
    "called twice": lambda: with_norm(both),
    "called twice, a plain mean": lambda: with_norm(both, momentum=None),
    "called sometimes": lambda: with_norm(sometimes),
    "frozen": lambda: with_norm(frozen),
    "a forward pass of its own": lambda: within(OwnForward(WIDTH)),
    "recomputed": lambda: within(Hidden(reentrant=False)),
    "recomputed, reentrant": lambda: within(Hidden(reentrant=True)),
    "in two layers": lambda: shared(affine=False),
    "in two layers, with weights": lambda: shared(affine=True),
}
