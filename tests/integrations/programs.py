"""What the programs of these tests share: a model, its data, and the same training written with ``holdfast.Loop``."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import holdfast
from tests.faults.train import wait_for_checkpoint

GLOBAL_BATCH, MICRO_BATCH, CLIP, RATE, EPOCHS = 16, 2, 0.5, 1e-2, 3
SIZE = 56  # samples: the last of the four steps of an epoch has fewer


class Net(nn.Module):
    """A model with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training).tanh())


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def samples(count: int = SIZE) -> TensorDataset:
    drawn = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn, drawn.sum(1, keepdim=True).sin())


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def as_loop(*, within: bool = False) -> holdfast.Loop:
    """The program written with ``holdfast.Loop``. ``within``: its model is in another one, as in a LightningModule."""
    net = made()
    model = nn.ModuleDict({"net": net}) if within else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = falling(optimizer)
    loop = holdfast.Loop(
        model=model, optimizer=optimizer, data=samples(), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH,
        state={"scheduler": scheduler},
    )  # fmt: skip
    for step in loop.steps(EPOCHS * loop.engine.order.steps_per_epoch):
        for x, y in step.micro_batches():
            step.backward(nn.functional.mse_loss(net(x), y))
        if step.commit(clip_norm=CLIP):
            scheduler.step()
    return loop


def kept() -> Any:
    """The checkpoints of this run, if it has any."""
    folder = os.environ.get("CHECKPOINT")
    return None if folder is None else holdfast.Checkpoints(folder=folder, every=2)


def documented(page: str) -> str:
    """The code of a page of the documentation that these tests run."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    (code,) = re.findall(r"<!-- run by tests/integrations/\w+\.py -->\n```python\n(.*?)```", text, re.DOTALL)
    return code


def wait_if_wanted(loop: Any, number: int) -> None:
    """Wait after step ``PATIENT`` while there are fewer workers than ``WANTED`` and nobody wants to join.

    After the step ``DURABLE``, wait until the checkpoint of that number is complete: it is written meanwhile.
    """
    wait_for_checkpoint(number, os.environ.get)
    wanted, since = int(os.environ.get("WANTED", "0")), int(os.environ.get("PATIENT", "0"))
    while number >= since and loop.workers < wanted and not any(loop._cohort.membership.wishes()):
        time.sleep(0.01)


def report(loop: Any, **found: Any) -> None:
    """Write what this worker has come to, for the test that has started it."""
    hashes = {"sha256": loop.sha256(), "weights": loop.sha256(weights_only=True)}
    line = {**hashes, "step": loop.step, "workers": loop.workers, **found}
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps(line) + "\n")
