"""The script of the tests of teams: one model, split by FSDP2, tensor parallel, both, or not at all (``SPLIT``)."""

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import holdfast
from tests.faults.loop_train import wait_for_joiner
from tests.faults.train import Waves, checkpoints_of, wait_for_checkpoint

TENSOR_PARALLEL = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def make(split: str) -> tuple[nn.Module, DeviceMesh | None]:
    """The model, and the mesh that batches are divided over: None for all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 5), nn.LayerNorm(5), nn.Dropout(0.1), nn.Linear(5, 1)
    )
    if split == "plain":
        return model, None
    dist.init_process_group("gloo")
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),)), None
    if split == "tp":
        return parallelize_module(model, mesh, TENSOR_PARALLEL), None
    if split == "2d":
        both = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(model, both["tensor"], TENSOR_PARALLEL)
        mesh = rows = both["data"]
    if split != "forgotten":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, rows


def main() -> None:
    setting = os.environ.get
    split = setting("SPLIT", "fsdp")
    model, rows = make(split)
    loop = holdfast.Loop(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=Waves(),
        global_batch=12,
        micro_batch=6,
        checkpoint=checkpoints_of(setting),
        state={"seen": []},
    )

    def error(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse_loss(model(batch[0]), batch[1])

    for step in loop.steps(int(setting("STEPS", "6"))):
        for batch in step.micro_batches():
            step.backward(error(model, batch if split in ("tp", "plain") else loop.team.part(batch, rows)))
        wrong = setting("WRONG") if loop.team.rank == 1 and step.number == 2 else None
        if made := step.commit(clip_norm=0.1 if wrong == "clip" else 0.5):
            if wrong == "rate":
                loop.engine.update.optimizer.param_groups[0]["lr"] = 1.0
            if wrong == "state":
                loop.state["seen"].append("only here")
            if wrong == "leaves":
                break
            loop.state["seen"].append((made.loss, made.grad_norm))
            if made.number == 1:
                loop.state["seen"].append(loop.evaluate([Waves()[i] for i in range(7)], error))
            if made.workers < int(setting("WANTED", "0")):
                wait_for_joiner(loop)
            wait_for_checkpoint(made.number, setting)
    held = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.parameters())
    found = {"worker": setting("HOLDFAST_WORKER"), "rank": loop.team.rank, "sha256": loop.sha256(), "held": held}
    found |= {"step": loop.step, "weights": loop.sha256(weights_only=True)}
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
