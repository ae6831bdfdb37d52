"""DistributedDataParallel that torchrun restarts as a whole from the last checkpoint."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.data_parallel import workload
from bench.peers import common


def save(path: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint to ``path``, whole or not at all."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # A worker killed half-way through writing must leave the previous checkpoint whole.
    unfinished = f"{path}.tmp"
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, if there is one; return the last step in it, else 0."""
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--checkpoint", required=True, help="file to save to and resume from")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = workload.build_model(args)
    optimizer = workload.build_optimizer(model.parameters())
    # All ranks read the file, and none can reach its next save before all have read it,
    # since DDP's construction below synchronizes them.
    done = load(args.checkpoint, model, optimizer)
    replica = DistributedDataParallel(model)
    progress = common.ProgressFile(args, rank)

    for step in range(done + 1, args.steps + 1):
        optimizer.zero_grad()
        common.accumulate_gradients(replica, args, step, rank)
        optimizer.step()
        progress.finished(step)
        if rank == 0 and step % args.checkpoint_every == 0:
            save(args.checkpoint, step, model, optimizer)

    common.report_end(model, args.steps, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
