"""Models and data of the pipeline races: lists of layers, equal for all contestants.

There are three kinds. ``gpt`` computes: a byte-level transformer. ``wide`` has large weights and small activations:
pipelines send little and data parallelism much. ``waiting`` stands for machines that are not there: its layers
sleep, forward and backward, so that more workers than cores behave as if each had a core of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # all values of a byte
BATCHES = 20  # different batches in the data set; then they are repeated


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the arguments that all contestants take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20, help="stop after this step")
    parser.add_argument("--stages", default="1", help="layers of each stage, as 3,3; or how many workers hold a model")
    parser.add_argument("--model", choices=["gpt", "wide", "waiting"], default="gpt")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq", type=int, default=64, help="bytes of a text (gpt)")
    parser.add_argument("--forward-ms", type=float, default=3.0, help="that a layer waits (waiting)")
    parser.add_argument("--backward-ms", type=float, default=6.0)
    parser.add_argument("--micro-batch", type=int, default=4, help="samples in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="in a step, of all workers together")
    parser.add_argument("--progress", help="file that gets a JSON line per finished step")
    parser.add_argument("--burst", type=int, default=0, help="steps in a turn; 0: no turns")
    parser.add_argument("--seed", type=int, default=0)
    return parser


class ByteEmbedding(nn.Module):
    """Embedding of bytes and of their positions."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, width))

    def forward(self, text: Tensor) -> Tensor:
        return self.tokens(text) + self.positions


class CausalBlock(nn.Module):
    """Causal transformer block."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.inner = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(seq), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden, src_mask=self.mask, is_causal=True)


class WideLayer(nn.Module):
    """Layer with many weights and few activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(self.inner(hidden))


class _Wait(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class WaitingLayer(nn.Module):
    """Layer that sleeps instead of computing, like one on a machine of its own."""

    def __init__(self, width: int, forward: float, backward: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self._seconds = (forward, backward)

    def forward(self, hidden: Tensor) -> Tensor:
        return _Wait.apply(hidden + torch.relu(self.inner(hidden)), *self._seconds)  # type: ignore[no-untyped-call]


def build_layers(args: argparse.Namespace) -> list[nn.Module]:
    """Return the model's layers, with the weights that ``args.seed`` gives."""
    torch.manual_seed(args.seed)
    if args.model == "gpt":
        blocks = [CausalBlock(args.width, args.seq) for _ in range(args.layers - 2)]
        return [ByteEmbedding(args.width, args.seq), *blocks, nn.Linear(args.width, VOCABULARY)]
    if args.model == "wide":
        return [WideLayer(args.width) for _ in range(args.layers)]
    seconds = (args.forward_ms / 1000, args.backward_ms / 1000)
    return [WaitingLayer(args.width, *seconds) for _ in range(args.layers)]


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.AdamW(params, lr=3e-4)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of numbers, or the cross-entropy of bytes."""
    if target.is_floating_point():
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Samples:
    """Map-style data set in memory, so that no contestant waits for data.

    >>> samples = Samples(argument_parser(None).parse_args(["--micro-batches", "2"]))
    >>> len(samples), samples.batch(step=1, micro_batches=range(1, 2))[0].shape
    (160, torch.Size([4, 64]))
    """

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        self._micro_batch: int = args.micro_batch
        self._in_step: int = args.micro_batches * args.micro_batch
        size = BATCHES * self._in_step
        if args.model == "gpt":
            text = torch.randint(VOCABULARY, (size, args.seq + 1), generator=generator)
            self.inputs, self.targets = text[:, :-1], text[:, 1:]
        else:
            self.inputs, self.targets = torch.randn((2, size, args.width), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def batch(self, *, step: int, micro_batches: range) -> tuple[Tensor, Tensor]:
        """Return some of a step's micro-batches, in the data set's order; steps count from 0."""
        start = step % BATCHES * self._in_step
        here = slice(start + micro_batches.start * self._micro_batch, start + micro_batches.stop * self._micro_batch)
        return self.inputs[here], self.targets[here]
