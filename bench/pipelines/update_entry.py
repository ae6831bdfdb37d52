"""Script of a contestant of ``bench undo``: the same model, updated in one of the ways."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import torch

import holdfast
from bench.peers.common import ProgressFile
from bench.pipelines import race_models as model
from bench.pipelines.commit_copy import CommitCopyRun
from bench.pipelines.pipeline_entry import make_run, worker_number


def main() -> None:
    parser = model.argument_parser(__doc__)
    parser.add_argument("--update", choices=["commit", "eager"], default="commit")
    parser.add_argument("--copy-every", type=int, help="commit blocks of so many steps, with copies of the state")
    parser.add_argument("--measure", type=int, default=0, help="the step after which memory is measured")
    args = parser.parse_args()
    kind = holdfast.Run if args.copy_every is None else partial(CommitCopyRun, copy_every=args.copy_every)
    run = make_run(
        args, kind=kind, placement=holdfast.Placement(stages=1), numerics=holdfast.Numerics(update=args.update)
    )
    worker = worker_number()
    progress = ProgressFile(args, worker)
    for step in run.steps(args.steps):
        if step.number + 1 == args.measure:
            Path(f"{args.progress}.held-{worker}").write_text(json.dumps({"held": held_bytes()}))
        progress.finished(step.number + 1)


def held_bytes() -> int:
    """Return the bytes of all tensors that are alive, each memory counted once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
