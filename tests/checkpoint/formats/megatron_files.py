"""Writes checkpoints as Megatron does, cut from whole tensors by the definition of its layout."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
HALVES = ("linear_fc1", "dense_h_to_4h")
COLUMN = ("linear_qkv", "query_key_value", "output_layer", "word_embeddings", *HALVES)
ROW = ("linear_proj.weight", "linear_fc2.weight", "self_attention.dense.weight", "dense_4h_to_h.weight")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model and how it is spread over ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual: int = 1
    layers: int = 4
    gated: bool = True
    tied: bool = False
    old: bool = False
    experts: int = 0
    half: bool = False
    version: float = 3.0


def whole(layout: Layout) -> Tensors:
    """A model in one piece, in the order of its modules, each tensor with numbers of its own."""
    kind = torch.bfloat16 if layout.half else torch.float32
    torch.manual_seed(7)
    return {name: torch.randn(shape).to(kind) for name, shape in _shapes(layout)}


def _shapes(layout: Layout) -> Iterator[tuple[str, tuple[int, ...]]]:
    top = "language_model." if layout.old else ""
    qkv, proj, fc1, fc2 = (
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
        if layout.old
        else ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    )
    yield f"{top}embedding.word_embeddings.weight", (16, 4)
    yield f"{top}embedding.position_embeddings.weight", (6, 4)
    for i in range(layout.layers):
        layer = f"{top}{'encoder' if layout.old else 'decoder'}.layers.{i}."
        yield f"{layer}input_layernorm.weight", (4,)
        yield f"{layer}self_attention.{qkv}.weight", (12, 4)
        yield f"{layer}self_attention.{qkv}.bias", (12,)
        yield f"{layer}self_attention.{proj}.weight", (4, 4)
        yield f"{layer}self_attention.{proj}.bias", (4,)
        for expert in range(layout.experts) or [None]:
            mlp = f"{layer}mlp." + ("" if expert is None else f"experts.local_experts.{expert}.")
            yield f"{mlp}{fc1}.weight", (16 if layout.gated else 8, 4)
            yield f"{mlp}{fc2}.weight", (4, 8)
    yield f"{top}{'encoder' if layout.old else 'decoder'}.final_layernorm.weight", (4,)
    if not layout.tied:
        yield f"{top}output_layer.weight", (16, 4)


def part(name: str, tensor: torch.Tensor, tp: int, layout: Layout) -> torch.Tensor:
    """What a tensor-parallel rank has of a tensor."""
    if any(word in name for word in ROW):
        return tensor.chunk(layout.tp, 1)[tp].clone()
    if not any(word in name for word in COLUMN):
        return tensor.clone()
    fused = 2 if layout.gated and any(word in name for word in HALVES) else 1
    fused = 3 if "query_key_value" in name and layout.version == 0 else fused
    return torch.cat([sub.chunk(layout.tp)[tp] for sub in tensor.chunk(fused)])


def write(folder: Path, layout: Layout, tensors: Tensors, **extra: Any) -> Path:
    """All files of a checkpoint."""
    for tp in range(layout.tp):
        for pp in range(layout.pp):
            for ep in range(layout.ep):
                name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else "")
                name += f"_{ep:03d}" if layout.ep > 1 else ""
                (folder / name).mkdir(parents=True)
                states = {**_states(layout, tensors, tp, pp, ep), **extra}
                torch.save(states, folder / name / "model_optim_rng.pt")
    return folder


def _states(layout: Layout, tensors: Tensors, tp: int, pp: int, ep: int) -> dict[str, Any]:
    chunks = [_stage(layout, tensors, pp + chunk * layout.pp, ep) for chunk in range(layout.virtual)]
    cut = [{local: part(name, tensors[name], tp, layout) for local, name in chunk.items()} for chunk in chunks]
    models: dict[str, Any] = {f"model{i}" if layout.virtual > 1 else "model": one for i, one in enumerate(cut)}
    if layout.old:
        models = {key: _nested(model) for key, model in models.items()}
    args = Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        untie_embeddings_and_output_weights=not layout.tied,
    )
    named = {name: cut[i][local] for i, chunk in enumerate(chunks) for local, name in chunk.items()}
    return {
        "args": args,
        "checkpoint_version": layout.version,
        "iteration": 5,
        **models,
        "optimizer": optimizer(layout, named, tensors, tp),
        "opt_param_scheduler": {"num_steps": 20},
    }


def _stage(layout: Layout, tensors: Tensors, number: int, ep: int) -> dict[str, str]:
    """Names on a stage, with its own numbers for layers and experts, by the names in the whole."""
    stages, each = layout.pp * layout.virtual, layout.layers // (layout.pp * layout.virtual)
    names = {}
    for name in tensors:
        local = name
        if match := re.search(r"layers\.(\d+)", name):
            stage, local = int(match[1]) // each, name.replace(match[0], f"layers.{int(match[1]) % each}")
        else:
            stage = 0 if "embedding." in name else stages - 1
        if match := re.search(r"local_experts\.(\d+)", local):
            mine = layout.experts // layout.ep
            if int(match[1]) // mine != ep:
                continue
            local = local.replace(match[0], f"local_experts.{int(match[1]) % mine}")
        if stage == number:
            names[local] = name
    if layout.tied and stages > 1 and number == stages - 1:
        names["word_embeddings_for_head.weight" if layout.old else "output_layer.weight"] = next(iter(tensors))
    return names


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Old Megatron's sections: dicts down to the list of layers, whose names have dots."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        keys = name.split(".")
        depth = keys.index("encoder") + 1 if "encoder" in keys else len(keys) - 1
        node = tree
        for key in keys[:depth]:
            node = node.setdefault(key, {})
        node[".".join(keys[depth:])] = value
    return tree


def slot(name: str, tensors: Tensors) -> torch.Tensor:
    """The state that the optimizer has for a tensor, in one piece."""
    return torch.full_like(tensors[name], 1.0 + list(tensors).index(name), dtype=torch.float32) + tensors[name].float()


def master(name: str, tensors: Tensors) -> torch.Tensor:
    """The fp32 weight of a tensor of half precision: its own value and what was rounded off."""
    return tensors[name].float() + 1e-4


def optimizer(layout: Layout, named: Tensors, tensors: Tensors, tp: int) -> dict[str, Any]:
    """Adam's state by number: first what has weight decay, then the rest, each in the model's order."""
    groups = [[n for n in named if (tensors[n].ndim > 1) is decay] for decay in (True, False)]
    numbers = {name: number for number, name in enumerate(groups[0] + groups[1])}
    state = {i: {"exp_avg": part(n, slot(n, tensors), tp, layout), "kind": "adam"} for n, i in numbers.items()}
    settings = [{"wd_mult": 1.0, "lr": 0.1, "step": 3}, {"wd_mult": 0.0, "lr": 0.1, "step": 3}]
    listed = [{**s, "params": [numbers[n] for n in names]} for s, names in zip(settings, groups, strict=True)]
    inner = {"state": state, "param_groups": listed}
    if not layout.half:
        return inner
    masters = [[part(n, master(n, tensors), tp, layout) for n in names] for names in groups]
    return {"optimizer": inner, "fp32_from_fp16_params": masters, "grad_scaler": {"scale": 1.0}}
