"""One contestant of ``bench undo``: the same model, updated in one of the ways there are."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch

from holdfast.bench import pipeline_model as model
from holdfast.bench.peers.common import Progress
from holdfast.bench.pipeline_train import make_run, worker_number


def main() -> None:
    parser = model.argument_parser(__doc__)
    parser.add_argument("--update", choices=["commit", "eager", "commit-copy"], default="commit")
    parser.add_argument("--every", type=int, default=1000, help="steps between two copies (commit-copy)")
    parser.add_argument("--measure", type=int, default=0, help="the step after which memory is measured")
    args = parser.parse_args()
    run = make_run(args, stages=1, update=args.update, every=args.every)
    worker = worker_number()
    progress = Progress(args, worker)
    for step in run.steps(args.steps):
        if step.number + 1 == args.measure:
            Path(f"{args.progress}.held-{worker}").write_text(json.dumps({"held": held_bytes()}))
        progress.finished(step.number + 1)


def held_bytes() -> int:
    """Bytes of all tensors that are alive, each memory once: between two steps nothing of a step is left."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
