"""The training of packed_stream.py as people write it without holdfast: ``python examples/plain_packed_stream.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from packed_stream import CONFIG, SHARDS, packed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from holdfast.demo.gpt import gpt_layers, next_byte_loss


# --- before
class Packed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for shard in range(SHARDS):
            yield from packed(shard)


# --- end
def main(steps: int = 60) -> None:
    torch.manual_seed(0)

    # --- before
    model = nn.Sequential(*gpt_layers(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (x, y) in zip(range(steps), DataLoader(Packed(), batch_size=32), strict=False):
        loss = next_byte_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    # --- end


if __name__ == "__main__":
    main()
