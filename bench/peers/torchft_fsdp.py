"""torchft with FSDP2 over Gloo: torchrun starts the ranks of a replica group, which split the model.

Between the groups torchft reduces each rank's shards, in the hook that FSDP2 has for it, as torchft's own test does.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchft import Optimizer  # type: ignore[import-not-found]  # only in the peers' venv

from bench.data_parallel import workload
from bench.peers import common
from bench.peers.torchft_ddp import add_torchft_arguments, make_manager, stay_on_loopback


def main() -> None:
    parser = common.argument_parser(__doc__)
    add_torchft_arguments(parser)
    args = parser.parse_args()
    stay_on_loopback(verbose=args.verbose)

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = workload.build_model(args)
    split = workload.split(model, init_device_mesh("cpu", (size,)))
    inner = workload.build_optimizer(model.parameters())
    manager = make_manager(args, model, inner, rank=rank, world_size=size, store_port=int(os.environ["MASTER_PORT"]))
    optimizer = Optimizer(manager, inner)

    def reduce(shards: Tensor) -> None:
        manager.allreduce(shards).wait()

    def give_hook(module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce)

    model.apply(give_hook)
    worker = args.worker * size + rank
    progress = common.ProgressFile(args, worker)
    while (step := manager.current_step()) < args.steps:
        optimizer.zero_grad()  # also starts the quorum for this step
        common.accumulate_shards(split, args, step + 1, worker)
        optimizer.step()  # does nothing if the reduction failed, and the step is tried again
        if manager.current_step() > step:
            progress.finished(manager.current_step())

    common.report_end(model, manager.current_step(), worker)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
