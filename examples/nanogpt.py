"""Pre-training as nanoGPT does it: tokens in a memory map, bf16, a cosine, the best model kept, early stopping.

In one process: ``python examples/nanogpt.py``. On workers that may be killed: ``holdfast run -n 3
examples/nanogpt.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import holdfast
from holdfast.demo.corpus import read_standard_library
from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss

TOTAL, WARM_UP, RATE, LEAST = 200, 10, 3e-3, 3e-4  # steps and learning rates of the cosine
PATIENCE = 3  # evaluations without a better one, after which training ends


class Crops:
    """Windows of tokens at random places of a memory map. Item i is another place whenever it is asked for."""

    def __init__(self, path: Path, *, window: int, length: int) -> None:
        self.tokens = np.memmap(path, dtype=np.uint8, mode="r")
        self.window, self.length = window, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        place = int(torch.randint(len(self.tokens) - self.window - 1, ()))  # seeded by (step, micro-batch)
        piece = torch.from_numpy(self.tokens[place : place + self.window + 1].astype(np.int64))
        return piece[:-1], piece[1:]


def cosine(step: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    part = min(1.0, (step - WARM_UP) / (TOTAL - WARM_UP))
    return LEAST + 0.5 * (RATE - LEAST) * (1 + math.cos(math.pi * part))


def decayed(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def prepare(folder: Path) -> tuple[Path, Path]:
    """Write the tokens of training and held-out text, once. Workers that do it together write the same."""
    text = read_standard_library(600_000)
    paths = folder / "train.bin", folder / "held-out.bin"
    for path, part in zip(paths, (text[:540_000], text[540_000:]), strict=True):
        if not path.exists():
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_bytes(part)
            unfinished.replace(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=TOTAL)
    parser.add_argument("--every", type=int, default=20, help="steps from one evaluation to the next")
    parser.add_argument("--folder", type=Path, default=Path("nanogpt"), help="tokens, and the best model")
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    config = GPTConfig(depth=2)
    training, held_out = prepare(arguments.folder)
    run = holdfast.Run(
        model=nn.Sequential(*gpt_layers(config)),
        loss=lambda model, batch: next_byte_loss(model(batch[0]), batch[1]),
        optimizer=decayed,
        schedule=cosine,
        clip_norm=1.0,
        data=Crops(training, window=config.window, length=4096),
        global_batch=16,
        micro_batch=4,
        numerics=holdfast.Numerics(autocast=torch.bfloat16),
        checkpoint=arguments.checkpoint,
        state={"best": math.inf, "bad": 0},
    )
    test = Crops(held_out, window=config.window, length=32)
    for step in run.steps(arguments.steps):
        if (step.number + 1) % arguments.every:
            continue
        loss = run.evaluate(test)
        run.log({"held_out": loss})
        if step.is_first_worker:
            print(f"step {step.number:3}  loss {step.loss:.4f}, held out {loss:.4f}, learning rate {step.lr:.2e}")
        if loss < run.state["best"]:
            run.state["best"], run.state["bad"] = loss, 0
            run.save_model(arguments.folder / "best.safetensors")
        else:
            run.state["bad"] += 1
            if run.state["bad"] >= PATIENCE:
                break
    sha256 = run.sha256()
    if run.is_first_worker:
        if run.state["best"] < math.inf:  # there was an evaluation
            print(f"best held-out loss {run.state['best']:.4f}, model in {arguments.folder / 'best.safetensors'}")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
