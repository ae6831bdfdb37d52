"""Runs real DeepSpeed on the CPU: makes checkpoints, loads ours, and writes down what it has in memory.

Started by the tests with the interpreter of ``make test-formats``, as ``make_deepspeed.py jobs.json``. Jobs of the same
number of workers and the same kind share their processes, which are forked from one that has imported DeepSpeed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", LOG_LEVEL="error")

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn
from torch.multiprocessing import get_context
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 13
SMALL = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "stage3_prefetch_bucket_size": 100}


class Net(nn.Module):
    """Sizes that do not divide, a tied head, frozen parameters and two buffers.

    The frozen layer is the same in every run, like a model that a script loads before it is trained further.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6))
        self.still = nn.Linear(6, 5)
        self.wide = nn.Linear(5, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("count", torch.randint(1 << 40, ()))
        for p in self.still.requires_grad_(False).parameters():
            p.data.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.still(self.body(self.embed(x)))))


def config(job: dict[str, Any]) -> dict[str, Any]:
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": job.get("accumulate", 1),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # norms are summed in another order by each stage
        "zero_optimization": {"stage": job["stage"], **SMALL, **job.get("zero", {})},
        **job.get("config", {}),
    }
    if job.get("dtype") in ("bf16", "fp16"):
        made[job["dtype"]] = {"enabled": True}
    if job.get("load"):
        made["checkpoint"] = {"load_universal": True}
    if job.get("schedule"):
        made["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}}
    return made


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def train(engine: Any, rank: int, steps: range) -> None:
    for step in steps:
        x = torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
        engine.backward(nn.functional.cross_entropy(engine(x).float().flatten(0, 1), x.flatten()))
        engine.step()


def base_of(engine: Any) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def truth(engine: Any) -> dict[str, Any]:
    """What DeepSpeed has in memory, by its own means. Every rank has to ask."""
    base = base_of(engine)
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed looks for the optimizer's state once, when only the first group has made a step.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    slots = sorted(
        {
            slot
            for state in base.state.values()
            for slot, value in state.items()
            if torch.is_tensor(value) and value.dim()
        }
    )
    found: dict[str, Any] = {"weights": {}, "state": {}, "model": {}, "buffers": dict(engine.module.named_buffers())}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found["model"][name] = parameter.detach().clone()
        if not parameter.requires_grad or not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
            continue
        found["weights"][name] = safe_get_full_fp32_param(parameter).clone()
        found["state"][name] = {slot: safe_get_full_optimizer_state(parameter, slot).clone() for slot in slots}
    found["steps"] = [float(state["step"]) for state in base.state.values() if "step" in state]
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in base.param_groups]
    found["global_steps"] = engine.global_steps
    return found


def zero(job: dict[str, Any], rank: int, world: int) -> None:
    """A run of the little net: trained and saved, or loaded from a universal checkpoint; then one more step."""
    torch.manual_seed(1 if job.get("load") else 0)  # what is not loaded is seen to differ
    net = Net()
    if job.get("dtype") == "fp16":
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=optimizer_of(net, job.get("optimizer", "adamw")), config=config(job)
    )
    out = Path(job["out"])
    found: dict[str, Any] = {}
    if job.get("load"):
        found["loaded"], found["client"] = engine.load_checkpoint(job["load"])
        found["schedule"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
        if job.get("separate_steps"):
            for state in base_of(engine).state.values():
                state["step"] = state["step"].clone()
    else:
        train(engine, rank, range(3))
    found.update(truth(engine))
    if not job.get("load"):
        engine.save_checkpoint(str(out), client_state={"note": "hello", "numbers": [1, 2.5], "noise": torch.arange(4)})
    train(engine, rank, range(3, 4))
    found["later"] = truth(engine)["weights"]
    if rank == 0:
        out.mkdir(exist_ok=True)
        torch.save(found, out / "truth.pt")
        if job.get("fp32"):
            torch.save(
                {k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(out).items()}, out / "fp32.pth"
            )
    engine.destroy()


def tensor_parallel(job: dict[str, Any], rank: int, world: int) -> None:
    """AutoTP over two ranks, and data parallel over the others."""
    torch.manual_seed(1 if job.get("load") else 0)
    sizes = {"vocab_size": 26, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))
    settings = {**config(job), "tensor_parallel": {"autotp_size": 2}}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    if job.get("load"):
        engine.load_checkpoint(job["load"])
        engine.save_checkpoint(job["out"])  # to be read again: nothing else shows all of it
        return
    for step in range(2):
        x = torch.randint(0, 26, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank // 2))
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()
    engine.save_checkpoint(job["out"])


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 6) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight)


class Mixed(nn.Module):
    """Something trained, something frozen and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.still = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def pipeline(job: dict[str, Any], rank: int, world: int) -> None:
    """Two stages that share their first and last layer, and data parallel over the others."""
    torch.manual_seed(0)
    tied = [
        TiedLayerSpec("shared", Embedding),
        TiedLayerSpec("shared", Embedding, forward_fn=lambda m, x: x @ m.weight.T),
    ]
    inner = [LayerSpec(nn.Linear, 6, 7), LayerSpec(nn.LayerNorm, 7), LayerSpec(nn.Linear, 7, 6), LayerSpec(Mixed)]
    net = PipelineModule(
        [tied[0], *inner, tied[1]],
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda y, x: nn.functional.cross_entropy(y.float().flatten(0, 1), x.flatten()),
    )
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config({**job, "accumulate": 2}))
    seeds = map(torch.Generator().manual_seed, itertools.count())
    batches = ((x, x) for x in (torch.randint(0, VOCABULARY, (4, 5), generator=g) for g in seeds))
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(job["out"])
    found = truth(engine)
    if engine.mpu.get_data_parallel_rank() == 0:
        torch.save(found, Path(job["out"], f"truth-{engine.stage_id}.pt"))


def convert(job: dict[str, Any], rank: int, world: int) -> None:
    """DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=job["from"],
            output_folder=job["out"],
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=False,
            inject_missing_state=True,
        )
    )


KINDS = {"zero": zero, "tp": tensor_parallel, "pp": pipeline, "convert": convert}


def work(rank: int, world: int, store: Path, jobs: list[dict[str, Any]]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    if jobs[0]["kind"] != "convert":
        meeting = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **meeting)
    for job in jobs:
        try:
            KINDS[job["kind"]](job, rank, world)
        except Exception:
            if not job.get("may_fail"):
                raise
            # All ranks fail alike, so the next job finds them together.
            Path(job["out"]).mkdir(exist_ok=True)
            Path(job["out"], f"failed-{rank}.txt").write_text(traceback.format_exc())


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    together = itertools.groupby(json.loads(path.read_text()), key=lambda job: (job.get("world", 1), job["kind"]))
    for number, ((world, _), group) in enumerate(together):
        mine = list(group)
        arguments = (world, path.with_name(f"{path.stem}-{number}.store"), mine)
        processes = [get_context("fork").Process(target=work, args=(rank, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a worker failed: {[job['out'] for job in mine]}")


if __name__ == "__main__":
    main()
