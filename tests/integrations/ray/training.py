"""The train function of the tests: dropout and BatchNorm would show every sample that counts twice, or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.integrations.ray import checkpoint_folder


class Waves:
    def __len__(self) -> int:
        return 70

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i)) + 0.01 * torch.rand(1)
        return x, (x[:1] * 2 + x[1:2]).tanh()


def train(config: dict[str, Any]) -> str:
    """Train ``steps`` steps, slowly until the file ``hurry`` exists; return the hash."""
    if "HOLDFAST_AGENT" in os.environ:  # the tests kill it
        Path(f"{config['hurry']}.{os.environ['HOLDFAST_WORKER']}").write_text(os.environ["HOLDFAST_AGENT"])
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1)]
    every = config.get("every")
    run = holdfast.Run(
        layers=layers,
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=Waves(),
        global_batch=16,
        micro_batch=4,
        checkpoint=None if every is None else holdfast.Checkpoints(folder=checkpoint_folder(), every=every),
    )
    first = None
    for step in run.steps(config["steps"]):
        first = step.number if first is None else first
        run.log({"squared": step.loss * step.loss})
        if not Path(config["hurry"]).exists():
            time.sleep(0.02 if step.number < 50 else 0.5)
        if first == 0 and step.number == config.get("fail_at"):  # all of them, and not those of a later attempt
            raise RuntimeError(f"injected into the train function of process {os.getpid()}")
    return run.sha256()
