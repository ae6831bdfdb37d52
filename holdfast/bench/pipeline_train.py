"""Holdfast's entry in the pipeline race."""

from __future__ import annotations

import json
import os
import sys

import holdfast
from holdfast.bench import pipeline_model as model
from holdfast.bench.peers.common import Progress


def main() -> None:
    parser = model.argument_parser(__doc__)
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    parser.add_argument("--tolerate", type=int, default=0)
    parser.add_argument("--memory", type=int, help="bytes of a worker")
    parser.add_argument("--profile", help="a profile of the model, for the planner")
    args = parser.parse_args()
    counts = [int(each) for each in args.stages.split(",")]
    stages = None if args.profile else counts if len(counts) > 1 else counts[0]
    run = holdfast.Run(
        layers=model.build_layers(args),
        loss=model.loss_fn,
        optimizer=model.build_optimizer,
        data=model.Samples(args),
        global_batch=args.micro_batches * args.micro_batch,
        micro_batch=args.micro_batch,
        shuffle=False,  # the order of the peers, so that losses can be compared
        numerics=args.numerics,
        tolerate=args.tolerate,
        stages=stages,
        memory=args.memory,
        profile=args.profile,
    )
    progress = Progress(args, int(os.environ.get("HOLDFAST_WORKER", "0.0").split(".")[1]))
    losses = []
    for step in run.steps(args.steps):
        losses.append(step.loss)
        progress.finished(step.number + 1)
    if run.is_first_worker:
        sys.stdout.write(json.dumps({"losses": losses}) + "\n")


if __name__ == "__main__":
    main()
