"""Runs real Megatron-core on the CPU: makes checkpoints, and writes down what Megatron itself reads from them.

Started by the tests with the interpreter of ``make test-formats``, as ``make_megatron.py jobs.json``. A job is a
layout; its folder gets ``dist/`` (torch_dist), ``legacy/`` (mp_rank files with Megatron's own state dicts) and
``whole.pt``: what one process has after Megatron has loaded ``dist/`` without any parallelism.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", CUDA_DEVICE_MAX_CONNECTIONS="1")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, _get_param_groups
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.multiprocessing import get_context


def model_of(job: dict[str, Any], tp: int, pp: int) -> nn.Module:
    """A GPT with grouped-query attention, either with SwiGLU and RMSNorm or with biases and LayerNorm."""
    modern = job["modern"]
    norm = "RMSNorm" if modern else "LayerNorm"
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        gated_linear_unit=modern,
        activation_func=nn.functional.silu if modern else nn.functional.gelu,
        add_bias_linear=not modern,
        normalization=norm,
        qk_layernorm=modern,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=modern, normalization=norm),
        vocab_size=16,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=job["tied"],
        position_embedding_type="rope" if modern else "learned_absolute",
    )


def optimizer_of(model: nn.Module, *, half: bool) -> MegatronOptimizer:
    """Megatron's own optimizer around torch's Adam, with the groups that Megatron makes.

    Its constructors want a GPU, which their state dicts do not need.
    """
    config = OptimizerConfig(optimizer="adam", lr=0.1, min_lr=0.01, weight_decay=0.1)
    groups = _get_param_groups([model], config, None)
    if not half:
        made = FP32Optimizer.__new__(FP32Optimizer)
    else:
        made = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
        made.grad_scaler = None
        made.float16_groups = [list(group["params"]) for group in groups]
        made.fp32_from_float16_groups = [[p.detach().float() for p in group["params"]] for group in groups]
        for group, masters in zip(groups, made.fp32_from_float16_groups, strict=True):
            group["params"] = masters
    made.config, made.is_stub_optimizer = config, False
    made.optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    made.init_state_fn = start
    return made


def start(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = state


def global_name(name: str, job: dict[str, Any], pp: int) -> str:
    """The name without parallelism: layers are counted from the first stage on."""
    if job["tied"] and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return re.sub(
        r"layers\.(\d+)",
        lambda m: f"layers.{int(m[1]) + parallel_state.get_pipeline_model_parallel_rank() * 4 // pp}",
        name,
    )


def fill(model: nn.Module, optimizer: MegatronOptimizer, job: dict[str, Any], pp: int) -> None:
    """Numbers of their own for each parameter and slot, equal where Megatron holds copies."""
    start(optimizer.optimizer)
    inner = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    outer = [p for group in getattr(optimizer, "float16_groups", [inner]) for p in group]
    names = {id(p): name for name, p in model.named_parameters()}
    for seen, kept in zip(outer, inner, strict=True):
        where = parallel_state.get_tensor_model_parallel_rank() if getattr(seen, "tensor_model_parallel", False) else 0
        seed = f"{global_name(names[id(seen)], job, pp)} {where}".encode()
        numbers = torch.Generator().manual_seed(zlib.crc32(seed))
        with torch.no_grad():
            kept.copy_(torch.randn(kept.shape, generator=numbers))
            seen.copy_(kept)
        for slot in ("exp_avg", "exp_avg_sq"):
            optimizer.optimizer.state[kept][slot].copy_(torch.randn(kept.shape, generator=numbers))


def sharded(model: nn.Module, optimizer: MegatronOptimizer, job: dict[str, Any], *, reading: bool) -> dict[str, Any]:
    metadata = {"non_homogeneous_layers": not job["stacked"]}
    parts = model.sharded_state_dict(metadata=metadata)
    # The two have to agree on which tensors they mean, so both get the parameters themselves.
    return {
        "model": parts,
        "optimizer": optimizer.sharded_state_dict(parts, is_loading=reading, metadata=metadata),
    }


def write(folder: Path, model: nn.Module, optimizer: MegatronOptimizer, job: dict[str, Any], tp: int, pp: int) -> None:
    args = Namespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        num_layers=4,
        swiglu=job["modern"],
        padded_vocab_size=16,
        untie_embeddings_and_output_weights=not job["tied"],
        params_dtype=torch.float32,
    )
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "opt_param_scheduler": {"num_steps": 40}}
    ranks = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    name = f"mp_rank_{ranks[0]:02d}" + (f"_{ranks[1]:03d}" if pp > 1 else "")
    legacy = folder / "legacy" / "iter_0000005" / name
    legacy.mkdir(parents=True)
    rng = [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}]
    torch.save(
        {
            **common,
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "rng_state": rng,
        },
        legacy / "model_optim_rng.pt",
    )
    target = folder / "dist" / "iter_0000005"
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
        for kind in ("legacy", "dist"):
            (folder / kind / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    dist_checkpointing.save({**common, **sharded(model, optimizer, job, reading=False)}, str(target))


def read(folder: Path, model: nn.Module, optimizer: MegatronOptimizer, job: dict[str, Any]) -> None:
    """What Megatron loads into one process, by the names in the module and by those in torch_dist."""
    wanted = sharded(model, optimizer, job, reading=True)
    keys = {
        id(one.data): key_of(name, one.key)
        for name, one in wanted["model"].items()
        if isinstance(one, ShardedTensor | ShardedTensorFactory)
    }
    found = dist_checkpointing.load(wanted, str(folder / "dist" / "iter_0000005"))
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    inner = optimizer.optimizer
    outer = getattr(optimizer, "float16_groups", [group["params"] for group in inner.param_groups])
    masters = found["optimizer"].get("fp32_from_fp16_params", outer)
    kept = {
        id(p): {"weight": master.detach(), "slots": inner.state[mine], "group": number}
        for number, group in enumerate(inner.param_groups)
        for p, master, mine in zip(outer[number], masters[number], group["params"], strict=True)
    }
    whole = {name: {"key": keys[id(p)], "half": p.detach(), **kept[id(p)]} for name, p in model.named_parameters()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    torch.save({"parameters": whole, "groups": groups}, folder / "whole.pt")


def key_of(name: str, key: str) -> str:
    """The name in torch_dist, with the layer's number where all layers are one tensor."""
    return re.sub(r"layers\.(?!\d)", re.search(r"layers\.\d+\.|$", name)[0], key)


def worker(rank: int, world: int, job: dict[str, Any], tp: int, pp: int, reading: bool) -> None:
    folder = Path(job["folder"])
    # Here and there Megatron takes for granted that there is a GPU.
    torch.cuda.synchronize, torch.cuda.current_device, torch.Tensor.cuda = (
        lambda: None,
        lambda: "cpu",
        lambda self: self,
    )
    store = dist.FileStore(str(folder / f"store-{'read' if reading else 'write'}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(1234)
    model = model_of(job, tp, pp)
    if job["half"]:
        model.bfloat16()
    optimizer = optimizer_of(model, half=job["half"])
    if reading:
        read(folder, model, optimizer, job)
    else:
        fill(model, optimizer, job, pp)
        write(folder, model, optimizer, job, tp, pp)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    context = get_context("fork")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["folder"]).mkdir(parents=True)
        for tp, pp, reading in ((job["tp"], job["pp"], False), (1, 1, True)):
            workers = [context.Process(target=worker, args=(i, tp * pp, job, tp, pp, reading)) for i in range(tp * pp)]
            for one in workers:
                one.start()
            for one in workers:
                one.join()
            if any(one.exitcode for one in workers):
                sys.exit(f"{job} failed")


if __name__ == "__main__":
    main()
