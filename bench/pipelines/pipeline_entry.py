"""Script of holdfast's entry in the races with pipelines."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from bench.peers.common import ProgressFile
from bench.pipelines import race_models as model
from holdfast.log.log import LogSettings


def main() -> None:
    parser = model.argument_parser(__doc__)
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    parser.add_argument("--tolerate", type=int, default=0)
    parser.add_argument("--memory", type=int, help="bytes of a worker")
    parser.add_argument("--profile", help="a profile of the model, for the planner")
    parser.add_argument("--checkpoint", help="folder for checkpoints")
    parser.add_argument("--every", type=int, default=1000, help="steps from checkpoint to checkpoint")
    parser.add_argument("--log", action="store_true", help="keep what stages send each other")
    parser.add_argument("--log-budget", type=int, help="bytes of the log, of all workers together")
    parser.add_argument("--log-memory", type=int, default=LogSettings().memory, help="bytes of it that are not spilled")
    args = parser.parse_args()
    counts = [int(each) for each in args.stages.split(",")]
    planned = args.profile is not None and counts == [1]  # else the planner only places the cuts
    stages = None if planned else counts if len(counts) > 1 else counts[0]
    log = LogSettings(budget=args.log_budget, memory=args.log_memory) if args.log else False
    run = make_run(
        args,
        numerics=args.numerics,
        placement=holdfast.Placement(stages=stages, tolerate=args.tolerate, memory=args.memory, profile=args.profile),
        checkpoint=args.checkpoint and holdfast.Checkpoints(folder=args.checkpoint, every=args.every, log=log),
    )
    progress = ProgressFile(args, worker_number())
    losses = []
    for step in run.steps(args.steps):
        losses.append(step.loss)
        if args.log:
            _tell_log(args, run, step.number + 1)
        progress.finished(step.number + 1)
    if run.is_first_worker:
        sys.stdout.write(json.dumps({"losses": losses}) + "\n")


def make_run(
    args: argparse.Namespace, *, kind: Callable[..., holdfast.Run] = holdfast.Run, **settings: Any
) -> holdfast.Run:
    """Return a run of the model that all these races train; ``kind`` makes it, ``settings`` are the run's."""
    return kind(
        layers=model.build_layers(args),
        loss=model.loss_fn,
        optimizer=model.build_optimizer,
        data=holdfast.Data(model.Samples(args), shuffle=False),  # the order of the peers, to compare losses
        global_batch=args.micro_batches * args.micro_batch,
        micro_batch=args.micro_batch,
        **settings,
    )


def worker_number() -> int:
    """Return the number of this worker on its host."""
    return int(os.environ.get("HOLDFAST_WORKER", "0.0").split(".")[1])


def _tell_log(args: argparse.Namespace, run: holdfast.Run, step: int) -> None:
    """Write the size of this worker's log after a step, as a line beside its progress."""
    log: Any = run.engine.log
    if args.burst and step % args.burst == 0:
        log.settle()  # records are spilled in the turn of the run that spills them
    line = {"step": step, "bytes": log.bytes, "spilled": log.spilled, "usable": log.usable}
    with Path(f"{args.progress}.log-{os.environ['HOLDFAST_WORKER']}").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
