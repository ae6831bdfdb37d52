"""A script that trains adapters on a frozen base of two megabytes; each checkpoint is complete before the next step."""

import json
import os
import time
from pathlib import Path

import torch

import holdfast
from holdfast.checkpoint import index, series
from tests.run.test_adapters import Numbers, Quiet

if __name__ == "__main__":
    folder, steps = Path(os.environ["CHECKPOINT"]), int(os.environ["STEPS"])
    run = holdfast.Run(
        model=Quiet(),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=Numbers(),
        global_batch=8,
        micro_batch=2,
        checkpoint=holdfast.Checkpoints(folder=folder, every=2, keep=2),
    )
    wanted = int(os.environ.get("DURABLE", "0"))  # this checkpoint is complete before the step after the next
    for step in run.steps(steps):
        while step.number == wanted > 0 and not index.exists(series.folder_of(folder, wanted)):
            time.sleep(0.01)
    line = json.dumps({"worker": os.environ.get("HOLDFAST_WORKER"), "sha256": run.sha256(), "pid": os.getpid()})
    with open(os.environ["RESULTS"], "a") as results:
        results.write(line + "\n")
