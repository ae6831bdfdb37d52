"""Trees read back whole, and compared as raw bytes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.checkpoint.pieces import Catalogue, Ref
from holdfast.checkpoint.tensor_reader import read_tensor


def read_tree(catalogue: Catalogue, node: Any = None) -> Any:
    """The catalogue's tree with tensors in it."""
    node = catalogue.tree if node is None else node
    if isinstance(node, Ref):
        return read_tensor(catalogue, node.name)
    if isinstance(node, dict):
        return {key: value if value is None else read_tree(catalogue, value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(value if value is None else read_tree(catalogue, value) for value in node)
    return node


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def bare(node: Any) -> Any:
    """A tree in which equal means the same bytes and types."""
    if isinstance(node, torch.Tensor):
        return raw(node)
    if isinstance(node, dict):
        return {key: bare(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(bare(value) for value in node)
    return (type(node), node)


class Model(nn.Module):
    """Two layers, a norm with buffers, a tied head, and sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, dtype=torch.bfloat16)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layers[0](self.embed(x)))
        return self.head(self.layers[1](hidden.bfloat16()).float())


def trained(*, names: bool = True) -> tuple[Model, torch.optim.Optimizer]:
    """A model after two steps of Adam, with two groups of parameters."""
    torch.manual_seed(0)
    model = Model()
    decayed = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    others = [(n, p) for n, p in model.named_parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.5}]
    if not names:
        groups = [{**g, "params": [p for _, p in g["params"]]} for g in groups]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(2):
        model(torch.randint(0, 7, (4,))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def on_ranks(count: int, work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Runs a function on so many ranks of a gloo group, forked from here; what they return, or their error."""
    meeting = folder / f"meeting-{secrets.token_hex(4)}"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
            results.put((rank, "", pickle.dumps(work(rank))))
            dist.barrier()
        except BaseException:
            results.put((rank, traceback.format_exc(), b""))
        finally:
            os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    found = sorted(results.get() for _ in processes)
    for process in processes:
        process.join()
    errors = [error for _, error, _ in found if error]
    assert not errors, errors[0]
    return [pickle.loads(value) for _, _, value in found]


def sharded(model: nn.Module) -> nn.Module:
    """The model under FSDP2 on all ranks of the group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
