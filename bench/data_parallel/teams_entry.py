"""Holdfast's entry in the race of teams: FSDP2 inside a team, holdfast between them."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from bench.data_parallel import workload
from bench.data_parallel.holdfast_entry import WorkloadTexts
from bench.peers import common


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--teams", type=int, required=True, help="how many the batch is meant for")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    model = workload.build_model(args)
    workload.split(model, init_device_mesh("cpu", (size,)))
    batch = args.teams * args.micro_batches * args.micro_batch * size
    loop = holdfast.Loop(
        model=model,
        optimizer=workload.build_optimizer,
        data=WorkloadTexts(args, 100 * batch),
        global_batch=batch,
        micro_batch=args.micro_batch * size,
    )
    team = int(os.environ["HOLDFAST_WORKER"].split(".")[1])
    progress = common.ProgressFile(args, team * size + loop.team.rank)
    for step in loop.steps(args.steps):
        for texts in step.micro_batches():
            source, target = loop.team.part(texts)
            step.backward(workload.loss_fn(model(source), target))
        if made := step.commit():
            progress.finished(made.number + 1)


if __name__ == "__main__":
    main()
