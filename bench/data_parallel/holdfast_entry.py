"""Holdfast's entry in the races of whole models: the model, batch and progress lines of the peers."""

from __future__ import annotations

import argparse
import os

from torch import Tensor

import holdfast
from bench.data_parallel import workload
from bench.peers import common


class WorkloadTexts:
    """Map-style data set of the workload's texts."""

    def __init__(self, args: argparse.Namespace, size: int) -> None:
        self._args = args
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source, target = workload.make_text(self._args, index, 1)
        return source[0], target[0]


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--workers", type=int, required=True, help="how many the batch is meant for")
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    args = parser.parse_args()
    batch = args.workers * args.micro_batches * args.micro_batch
    run = holdfast.Run(
        layers=workload.build_model(args),
        loss=workload.loss_fn,
        optimizer=workload.build_optimizer,
        data=WorkloadTexts(args, 100 * batch),
        global_batch=batch,
        micro_batch=args.micro_batch,
        numerics=args.numerics,
    )
    worker = int(os.environ.get("HOLDFAST_WORKER", "0.0").split(".")[1])
    progress = common.ProgressFile(args, worker)
    for step in run.steps(args.steps):
        progress.finished(step.number + 1)


if __name__ == "__main__":
    main()
