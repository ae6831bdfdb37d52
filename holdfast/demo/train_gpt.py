"""Training script of the demo's workers. Nothing in it knows that workers get killed."""

from __future__ import annotations

import argparse
import json
import os

import torch

import holdfast
from holdfast.demo.corpus import standard_library
from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss

LEARNING_RATE = 3e-3
WARM_UP_STEPS = 10
SHARE = 0.1  # share of the steps after which replicas synchronise, with --sync
EVALUATED = 32  # held-out windows to evaluate on: all of them would take longer than the training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", help="of a worker; without it every worker holds the whole model")
    parser.add_argument("--sync", action="store_true", help="replicas talk only when their updates matter")
    parser.add_argument("--results", required=True, help="each worker appends a line with its hashes")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    config = GPTConfig()
    data, held_out = standard_library(window=config.window)
    run = holdfast.Run(
        layers=gpt_layers(config),
        loss=next_byte_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
        schedule=lambda step: LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS),
        data=data,
        global_batch=32,
        micro_batch=4,
        clip_norm=1.0,
        seed=arguments.seed,
        placement=holdfast.Placement(memory=arguments.memory, tolerate=1 if arguments.memory else 0),
        sync=holdfast.SelSync(target=SHARE, warmup=WARM_UP_STEPS) if arguments.sync else "every-step",
    )
    for _ in run.steps(arguments.steps):
        pass
    hashes = {"weights": run.sha256(weights_only=True), "state": run.sha256()}
    loss = run.evaluate([held_out[i] for i in range(EVALUATED)])
    line = json.dumps(
        {"worker": os.environ.get("HOLDFAST_WORKER"), **hashes, "loss": loss, "sent": run.sync_totals.sent}
    )
    with open(arguments.results, "a") as results:  # one short write in append mode: lines do not mix
        results.write(line + "\n")


if __name__ == "__main__":
    main()
