"""Plain HSDP over Gloo, started by torchrun: FSDP2 on a mesh of replicas and shards, no fault tolerance."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.data_parallel import workload
from bench.peers import common, plain


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--team", type=int, required=True, help="ranks that a replica is split over")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // args.team, args.team)
    model = workload.build_model(args)
    split = workload.split(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))
    plain.train(args, model, lambda step, rank: common.accumulate_shards(split, args, step, rank))


if __name__ == "__main__":
    main()
