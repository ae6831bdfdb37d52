"""A byte-level GPT on the source of Python's own standard library.

In one process: ``python examples/gpt.py --steps 50``. On four workers, any of which may be killed:
``holdfast run -n 4 examples/gpt.py --steps 50``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse

import torch

import holdfast
from holdfast.demo.corpus import standard_library
from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    config = GPTConfig(depth=4, width=128, window=128, dropout=0.1)
    training, held_out = standard_library(window=config.window)
    run = holdfast.Run(
        layers=gpt_layers(config),
        loss=next_byte_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        schedule=lambda step: 3e-3 * min(1.0, (step + 1) / 10),  # warm up over ten steps
        clip_norm=1.0,
        data=training,
        global_batch=32,
        micro_batch=4,
        seed=0,
    )
    for step in run.steps(steps):
        if step.is_first_worker and (step.number % 10 == 0 or step.number == steps - 1):
            print(f"step {step.number:4}  loss {step.loss:.4f}  {step.workers} workers")

    loss = run.evaluate(held_out)  # shared among the workers, so all of them call it,
    run.save_model("gpt.safetensors")
    sha256 = run.sha256()  # and these two as well: a worker may hold only some of the layers
    if run.is_first_worker:
        print(f"held-out loss {loss:.4f}, model in gpt.safetensors")
        print(f"sha256 of weights and optimizer state: {sha256}")


if __name__ == "__main__":
    main()
