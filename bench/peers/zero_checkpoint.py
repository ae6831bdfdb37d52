"""DeepSpeed's part of ``bench zero``: make a ZeRO checkpoint, or convert it to universal and load it.

``zero_checkpoint.py make FOLDER MEGABYTES`` or ``zero_checkpoint.py load FOLDER MEGABYTES``; runs under the interpreter
that ``make formats`` sets up. Prints one JSON line with seconds, imports not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", LOG_LEVEL="error")

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-not-found]
from torch import nn
from torch.multiprocessing import get_context

WIDTH = 1024  # of a layer, as in bench/savers.py
WORLD = 2  # ranks that write the checkpoint


def model(megabytes: int) -> nn.Sequential:
    """Return a model whose weights and Adam state take about ``megabytes``."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def engine(megabytes: int, *, stage: int, universal: bool) -> Any:
    """Return DeepSpeed's engine around that model."""
    net = model(megabytes)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    made, _, _, _ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3), config=config
    )
    return made


def make(rank: int, folder: str, megabytes: int, port: int) -> None:
    """Write a ZeRO-1 checkpoint as one of its two ranks."""
    _join(rank, WORLD, port)
    made = engine(megabytes, stage=1, universal=False)
    made.backward(made(torch.randn(2, WIDTH)).square().mean())
    made.step()
    made.save_checkpoint(folder, tag="saved")


def load(folder: str, megabytes: int, port: int) -> dict[str, float]:
    """Convert and load the checkpoint; return the seconds of both.

    Onto one worker and as ZeRO-1: the layout changes, the stage does not, because DeepSpeed cannot.
    """
    begin = time.monotonic()
    words = argparse.Namespace(
        input_folder=f"{folder}/saved",
        output_folder=f"{folder}/universal",
        num_extract_workers=2,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(words)
    converted = time.monotonic()
    Path(folder, "latest_universal").write_text("universal")
    _join(0, 1, port)
    made = engine(megabytes, stage=1, universal=True)
    ready = time.monotonic()
    made.load_checkpoint(folder, tag="universal")
    return {"convert": converted - begin, "load": time.monotonic() - ready}


def _join(rank: int, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    deepspeed.init_distributed("gloo", verbose=False)


def main() -> None:
    task, folder, megabytes, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if task == "load":
        print(json.dumps(load(folder, megabytes, port)))
        return
    context = get_context("fork")
    processes = [context.Process(target=make, args=(rank, folder, megabytes, port)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit("DeepSpeed could not make the checkpoint")


if __name__ == "__main__":
    main()
