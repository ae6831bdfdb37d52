"""Model and data that every contestant trains: a byte-level GPT of plain torch modules on random text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

VOCABULARY = 256  # all values of a byte


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the size of the workload, the same for every contestant."""
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)


class ByteGPT(nn.Module):
    """Byte-level GPT as one module, as most people's models are: contestants get no help from its layers."""

    def __init__(self, width: int, depth: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, width))
        layer = nn.TransformerEncoderLayer(
            width,
            max(1, width // 64),
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.tokens(text) + self.positions[: text.shape[1]]
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the model, with the weights that ``args.seed`` gives."""
    torch.manual_seed(args.seed)
    return ByteGPT(args.width, args.depth, args.seq)


def split(model: nn.Module, mesh: DeviceMesh) -> FSDPModule:
    """Split a model with FSDP2, each block apart."""
    for block in model.blocks.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_text(args: argparse.Namespace, place: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return ``samples`` random texts and the byte that follows each of their bytes; ``place`` seeds them."""
    generator = torch.Generator().manual_seed(args.seed + place)
    text = torch.randint(VOCABULARY, (samples, args.seq + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def make_batch(args: argparse.Namespace, step: int, index: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of micro-batch ``index`` of a step."""
    return make_text(args, 1_000_003 * step + index, args.micro_batch)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next bytes."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.AdamW(params, lr=3e-4)
