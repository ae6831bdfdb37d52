"""Plain DistributedDataParallel over Gloo, started by torchrun: no fault tolerance."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.data_parallel import workload
from bench.peers import common


def main() -> None:
    args = common.argument_parser(__doc__).parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(workload.build_model(args))
    optimizer = workload.build_optimizer(model.parameters())
    progress = common.ProgressFile(args, rank)

    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        common.accumulate_gradients(model, args, step, rank)
        optimizer.step()
        progress.finished(step)

    common.report_end(model, args.steps, rank)
    # Whoever closes its connections first would fail a slower peer's last reduction.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
