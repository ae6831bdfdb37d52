"""Plain DistributedDataParallel over Gloo, started by torchrun: no fault tolerance."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.data_parallel import workload
from bench.peers import common, plain


def main() -> None:
    args = common.argument_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(workload.build_model(args))
    plain.train(args, model, lambda step, rank: common.accumulate_gradients(model, args, step, rank))


if __name__ == "__main__":
    main()
