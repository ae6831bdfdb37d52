"""Pre-training on a stream: shards of text are read once, one after the other, and packed into windows without padding.

A window may hold the end of one document and the begin of the next, so nobody can say beforehand how many windows a
shard gives. The positions in all shards are committed with each step. In one process: ``python
examples/packed_stream.py``. On workers that may be killed: ``holdfast run -n 3 examples/packed_stream.py``. The last
line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import holdfast
from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss

CONFIG = GPTConfig(depth=2)
END = b"\x00"  # between two documents
SHARDS = 8


def documents(shard: int) -> Iterator[bytes]:
    """The documents of a shard: every eighth module of the standard library. Short ones are left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py"))[shard::SHARDS]:
        text = path.read_bytes()
        if len(text) > 200:
            yield text


def packed(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of a shard's documents, joined end to end."""
    rest = bytearray()
    for document in documents(shard):
        rest += document + END
        while len(rest) > CONFIG.window:
            piece = torch.tensor(list(rest[: CONFIG.window + 1]))
            del rest[: CONFIG.window]
            yield piece[:-1], piece[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    run = holdfast.Run(
        model=nn.Sequential(*gpt_layers(CONFIG)),
        loss=lambda model, batch: next_byte_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        clip_norm=1.0,
        data=holdfast.Stream(packed, shards=range(SHARDS)),
        global_batch=32,
        micro_batch=4,
        checkpoint=arguments.checkpoint,
    )
    for step in run.steps(arguments.steps):
        if step.is_first_worker and step.number % 10 == 0:
            print(f"step {step.number:3}  loss {step.loss:.4f}")
    sha256 = run.sha256()
    if run.is_first_worker:
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
