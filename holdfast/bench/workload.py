"""Stand-in workload for the peers: a byte-level GPT made of plain torch modules."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)


class ByteGPT(nn.Module):
    def __init__(self, width: int, depth: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0,
            activation="gelu", batch_first=True, norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.tokens(text) + self.positions[: text.shape[1]]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def build_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    return ByteGPT(args.width, args.depth, args.seq)


def make_batch(args: argparse.Namespace, step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(args.seed + 1_000_003 * step + index)
    text = torch.randint(VOCABULARY, (args.micro_batch, args.seq + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)
