"""Script that ``holdfast simulate`` kills workers of: a small GPT on random bytes, and a line for each step."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss

CONFIG = GPTConfig(depth=4, heads=2, width=128, window=64, dropout=0.0)
GLOBAL_BATCH, MICRO_BATCH = 12, 2  # samples
STEPS = 10_000  # more than ever come: the run is ended from outside


def main() -> None:
    torch.manual_seed(0)
    text = torch.randint(256, (100 * GLOBAL_BATCH, CONFIG.window + 1))
    run = holdfast.Run(
        layers=gpt_layers(CONFIG),
        loss=next_byte_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        data=TensorDataset(text[:, :-1], text[:, 1:]),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        placement=holdfast.Placement(stages=1),
    )
    # O_APPEND and one write for each line keep the lines of several workers whole.
    progress = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for step in run.steps(STEPS):
        line = json.dumps({"t": time.time(), "step": step.number + 1, "pid": os.getpid()})
        os.write(progress, (line + "\n").encode())


if __name__ == "__main__":
    main()
