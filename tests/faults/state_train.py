"""The script of the tests of state beside weights: optimizers and layers that keep something, each in another place."""

import hashlib
import json
import os
import time
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.engine.buffers import ChangingBuffers
from holdfast.engine.statistics import Statistics
from tests.engine import optimizers
from tests.engine.pipelines import WIDTH, linear, numbers
from tests.engine.writers import Counts, Writer
from tests.faults.sync_train import policy_of
from tests.faults.train import checkpoints_of, stages_of

LAYERS: dict[str, Any] = {
    "plain": linear,
    "counts": Counts,
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.GELU(), linear(), nn.BatchNorm1d(WIDTH, momentum=None)),
    "frozen": lambda: Writer("through .data", "frozen"),
    "late": lambda: Writer("through .data", first=8),
}


def own_state(run: holdfast.Run) -> dict[str, str]:
    """Digests of the weights and buffers that this worker holds, as they are, without asking anybody."""
    model, found = run.engine.model, {}
    for number in sorted(model.held):
        for name, tensor in [*model.layers[number].named_parameters(), *model.layers[number].named_buffers()]:
            content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{number}.{name}"] = hashlib.sha256(content).hexdigest()
    return found


def leave_a_trace(buffers: ChangingBuffers) -> None:
    """Stands in for ``restore``: another trace on each worker."""
    own = float(os.environ["HOLDFAST_WORKER"].split(".")[1])
    for each in buffers._guard.buffers:
        if each.tensor.is_floating_point():
            each.tensor.add_(own)


def keep_to_oneself(statistics: Statistics, *args: Any) -> None:
    """Stands in for ``exchange``: each worker mixes in its own micro-batches only."""


def wait_for_joiner(run: holdfast.Run) -> None:
    """Return when somebody waits to join, at the latest after ten seconds."""
    for _ in range(500):
        if run._cohort.membership.wishes()[0]:
            return
        time.sleep(0.02)


def main() -> None:
    setting = os.environ.get
    if setting("SABOTAGE") == "alone":
        Statistics.exchange = keep_to_oneself  # type: ignore[method-assign]
    if setting("SABOTAGE") == "trace":
        ChangingBuffers.restore = leave_a_trace  # type: ignore[method-assign]
    torch.manual_seed(0)
    made = getattr(optimizers, setting("OPTIMIZER", ""), torch.optim.AdamW)
    run = holdfast.Run(
        layers=[linear(), LAYERS[setting("LAYER", "plain")](), nn.GELU(), linear()],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: made(params, lr=0.01),
        data=numbers(70),
        global_batch=16,
        micro_batch=2,
        numerics=setting("NUMERICS", "exact"),
        placement=holdfast.Placement(stages=stages_of(setting("STAGES", "1"))),
        checkpoint=checkpoints_of(setting),
        sync=policy_of(setting("POLICY", "every-step")),
    )
    wanted = int(setting("WANTED", "0"))
    for step in run.steps(int(setting("STEPS", "10"))):
        if wanted and step.workers != wanted:
            wait_for_joiner(run)
    line = {"worker": setting("HOLDFAST_WORKER"), "sha256": run.sha256(), "own": own_state(run)}
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
