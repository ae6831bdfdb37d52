"""The script of the fault sweeps: a small model with dropout, a ragged last batch, slow on request."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.checkpoint import index, series
from holdfast.checkpoint.places import place_of

if "LOGGING" in os.environ:
    logging.basicConfig(level=os.environ["LOGGING"])

SIZE, GLOBAL_BATCH, MICRO_BATCH = 70, 16, 2


class Waves:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if "READERS" in os.environ:  # a folder: who reads is known by its pid
            Path(os.environ["READERS"], str(os.getpid())).touch()
        x = torch.randn(16, generator=torch.Generator().manual_seed(i)) + 0.01 * torch.rand(1)
        return x, (x[:1] * 2 + x[1:2]).tanh()


def stages_of(text: str) -> Any:
    """A number, the layers of each stage, or "auto": the planner decides."""
    if text == "auto":
        return text
    return [int(number) for number in text.split(",")] if "," in text else int(text)


def clip_of(text: str) -> float | None:
    return None if text == "none" else float(text)


def numerics_of(setting: Callable[..., Any]) -> holdfast.Numerics:
    """Of ``NUMERICS`` and ``UPDATE``."""
    return holdfast.Numerics(mode=setting("NUMERICS", "exact"), update=setting("UPDATE", "commit"))


def placement_of(setting: Callable[..., Any]) -> holdfast.Placement:
    """Of ``STAGES``, ``TOLERATE`` and ``MEMORY``."""
    tolerate = int(setting("TOLERATE", "0"))
    return holdfast.Placement(stages=stages_of(setting("STAGES", "1")), tolerate=tolerate, memory=setting("MEMORY"))


def checkpoints_of(setting: Callable[..., Any], **more: Any) -> holdfast.Checkpoints | None:
    """Of ``CHECKPOINT``, which is a folder, ``REMOTE``, ``EVERY``, ``KEEP`` and ``LEASE``."""
    if not setting("CHECKPOINT"):
        return None
    every = "auto" if setting("EVERY") == "auto" else int(setting("EVERY", "3"))
    more |= {"keep": int(setting("KEEP", "3")), "lease": float(setting("LEASE", "90"))}
    if setting("REMOTE"):
        return holdfast.Checkpoints(local=setting("CHECKPOINT"), remote=setting("REMOTE"), every=every, **more)
    return holdfast.Checkpoints(folder=setting("CHECKPOINT"), every=every, **more)


def wait_for_checkpoint(step: int, setting: Callable[..., Any]) -> None:
    """After the step ``DURABLE``, wait until the checkpoint of that number is complete. It is written meanwhile."""
    if step == int(setting("DURABLE", "-1")):
        while not index.exists(series.folder_of(place_of(setting("CHECKPOINT", "")), step)):
            time.sleep(0.01)


def main() -> None:
    setting = os.environ.get
    torch.manual_seed(int(setting("MODEL_SEED", "0")))
    if setting("MEDDLE"):
        from tests.faults.meddling import meddle  # the script is also run where there are no tests to import

        meddle(setting("MEDDLE", ""))
    width = int(setting("WIDTH", "32"))
    layers = [nn.Linear(16, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    run = holdfast.Run(
        layers=[*layers, nn.Linear(width, 1)],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: getattr(torch.optim, setting("OPTIMIZER", "AdamW"))(params, lr=1e-2),
        schedule=lambda step: 1e-2 / (1 + 0.1 * step),
        data=holdfast.Data(Waves(), num_workers=int(setting("LOADERS", "0"))),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        clip_norm=clip_of(setting("CLIP", "1.0")),
        numerics=numerics_of(setting),
        placement=placement_of(setting),
        checkpoint=checkpoints_of(setting),
    )
    if setting("FIRST_LOOP"):
        for _ in run.steps(int(setting("FIRST_LOOP", "0"))):
            pass
        run.evaluate(Waves())
    wanted = int(setting("WANTED", "0"))  # slow down until so many workers train, or that file exists
    patient = int(setting("PATIENT", "0"))  # from this step on
    for step in run.steps(int(setting("STEPS", "10"))):
        if step.number >= patient and step.workers != wanted and wanted and not os.path.exists(setting("HURRY", "")):
            time.sleep(float(setting("PAUSE", "0.02")))
        wait_for_checkpoint(step.number, setting)
        if step.number % 7 == 6:
            run.evaluate(Waves())
        if step.number == int(setting("BREAK", "-1")):
            break
    if setting("MODEL"):
        run.save_model(setting("MODEL", ""))
    line = json.dumps({"worker": os.environ.get("HOLDFAST_WORKER"), "sha256": run.sha256(), "pid": os.getpid()})
    with open(os.environ["RESULTS"], "a") as results:
        results.write(line + "\n")


if __name__ == "__main__":
    main()
