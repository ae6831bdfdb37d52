"""A script to be profiled, and the command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
import holdfast

class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh() if "tanh" in {"relu", "tanh", "gelu", "silu"} else x  # a set: its order is another each time


print("the script's own words", *sys.argv[1:])
run = holdfast.Run(
    layers=[nn.Linear(4, WIDTH), Tanh(), nn.Linear(WIDTH, 1)],
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=RATE),
    data=torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1)),
    global_batch=16,
    micro_batch=MICRO,
    checkpoint="saved",
)
for step in run.steps(3):
    print("trained")
print("ended")
"""


def script(folder: Path, *, width: int = 8, rate: float = 0.1, micro: int = 4, name: str = "train.py") -> str:
    text = SCRIPT.replace("WIDTH", str(width)).replace("RATE", str(rate)).replace("MICRO", str(micro))
    (folder / name).write_text(text)
    return name


def holdfast(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "HOLDFAST_TOKEN": "", **environment}
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "profile", *arguments],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
