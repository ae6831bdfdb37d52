"""A byte-level GPT as a list of layers, small enough for a laptop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of the model.

    >>> sum(p.numel() for layer in gpt_layers(GPTConfig(depth=1)) for p in layer.parameters())
    280704
    """

    depth: int = 4
    heads: int = 4
    width: int = 128
    window: int = 128  # bytes it sees
    dropout: float = 0.1


class GPTEmbedding(nn.Module):
    """Embedding of a byte and of its position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, config.width)
        self.position = nn.Embedding(config.window, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.dropout(self.byte(text) + self.position(places))


class GPTBlock(nn.Module):
    """Causal attention, then two linear layers; each is added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.mix(self._attend(self.attention_norm(x))))
        return x + self.dropout(self.shrink(functional.gelu(self.grow(self.norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).reshape(batch, time, width)


class GPTHead(nn.Module):
    """A score for each byte that may come next."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.score = nn.Linear(config.width, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.score(self.norm(x))
        return scores


def gpt_layers(config: GPTConfig) -> list[nn.Module]:
    """Return the model as a list of layers, for ``holdfast.Run(layers=...)``.

    >>> text = torch.zeros(2, 16, dtype=torch.long)
    >>> nn.Sequential(*gpt_layers(GPTConfig()))(text).shape
    torch.Size([2, 16, 256])
    """
    layers = [GPTEmbedding(config), *(GPTBlock(config) for _ in range(config.depth)), GPTHead(config)]
    for layer in layers:
        layer.apply(_initialise)
    return layers


def _initialise(module: nn.Module) -> None:
    """Initialise as GPT-2 does: torch's own embeddings, of variance 1, would drown what the blocks add at first."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def next_byte_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per byte, in nats.

    >>> clueless = next_byte_loss(torch.zeros(1, 4, BYTES), torch.zeros(1, 4, dtype=torch.long))
    >>> round(clueless.item(), 3)  # log(256)
    5.545
    """
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())
