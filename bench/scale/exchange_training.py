"""A training that sums its gradients directly in one step and by halves in the next, and writes how long each took.

Arguments: the file for the times, the parameters of the model, the number of micro-batches and of steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast.engine import exchanges

WAYS = {"directly": 10_000, "by halves": 1}  # the number of holders up to which each sends to all
WARM = 4  # steps that do not count


def main() -> None:
    """Train; worker 0 writes the seconds of each step, by way."""
    path, size, micro_batches, steps = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    x = torch.ones(512, size // 256)
    run = holdfast.Run(
        layers=torch.nn.Linear(size // 256, 256, bias=False),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        data=TensorDataset(x, torch.zeros(512, 256)),
        global_batch=micro_batches,
        micro_batch=1,
    )
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    names = list(WAYS)
    exchanges.DIRECT_HOLDERS = WAYS[names[0]]
    then = time.perf_counter()
    for step in run.steps(steps):
        now = time.perf_counter()
        if step.number >= WARM:
            times[names[step.number % 2]].append(now - then)
        exchanges.DIRECT_HOLDERS = WAYS[names[(step.number + 1) % 2]]
        then = time.perf_counter()
        if step.is_first_worker and step.number == steps - 1:
            path.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
