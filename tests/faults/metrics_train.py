"""A script that evaluates, predicts and logs: in the loop, between two loops, and at the end."""

import hashlib
import json
import os
import time
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.checkpoint import index, series
from tests.faults.train import GLOBAL_BATCH, MICRO_BATCH, Waves, checkpoints_of

setting = os.environ.get


def digest(value: Any) -> str:
    """The hash of tensors in tuples and lists, with their forms."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(repr((value.dtype, value.shape)).encode() + value.numpy().tobytes()).hexdigest()
    return hashlib.sha256(" ".join(digest(item) for item in value).encode()).hexdigest()


def ragged(output: torch.Tensor, target: torch.Tensor) -> Any:
    """As many columns as a padding collator would give; and targets."""
    return output.expand(-1, 1 + int(target[0] > 0)), target


MEASURES = {
    "error": lambda output, target: (output - target).abs().mean(),
    "near": lambda output, target: ((output - target).abs() < 0.5).float().mean(),
}


def wait_for_joiner(run: holdfast.Run) -> None:
    """Wait until somebody wants to join, which happens at the next boundary."""
    end = time.monotonic() + 60.0
    while not run._cohort.membership.wishes()[0] and time.monotonic() < end:
        time.sleep(0.005)


def main() -> None:
    torch.manual_seed(0)
    run = holdfast.Run(
        layers=[nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        schedule=lambda step: 1e-2 / (1 + 0.1 * step),
        data=Waves(),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        placement=holdfast.Placement(stages=int(setting("STAGES", "1")), tolerate=int(setting("TOLERATE", "0"))),
        checkpoint=checkpoints_of(setting),
    )
    for sink in setting("SINKS", "").split():
        run.log_to(sink, **({"uri": setting("MLFLOW_TRACKING_URI")} if sink == "mlflow" else {}))
    found: dict[str, Any] = {}
    facts: dict[int, Any] = {}
    total, first = int(setting("STEPS", "10")), int(setting("FIRST_LOOP", "5"))
    wanted = int(setting("WANTED", "0"))  # workers that have to train before the second loop ends
    durable = int(setting("DURABLE", "-1"))  # before the step after the next, this checkpoint is complete
    for end in (first, total):
        for step in run.steps(end):
            facts[step.number] = [step.lr, step.grad_norm, step.tokens]
            assert step.seconds > 0
            run.log({"twice": 2 * step.loss})
            if step.number % 3 == 2:
                run.log(run.evaluate(Waves(), MEASURES))
            if wanted and step.number >= first and step.workers < wanted:
                wait_for_joiner(run)
            while step.number == durable and not index.exists(series.folder_of(run.folder, durable)):
                time.sleep(0.01)
        found[f"means {end}"] = run.evaluate(Waves(), MEASURES)
        found[f"predicted {end}"] = digest(run.predict(Waves()))
        found[f"ragged {end}"] = digest(run.predict(Waves(), ragged, to=setting("TO")))
        run.log({"end": end})
    line = {"worker": setting("HOLDFAST_WORKER"), "sha256": run.sha256(), "found": found, "facts": facts}
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
