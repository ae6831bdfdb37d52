"""A small model with everything that is awkward, four optimizers, and the layouts they are spread over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast.checkpoint  # noqa: F401  (ranks are forked from here: nothing is imported twice)

WIDTH, HIDDEN, VOCABULARY = 5, 7, 11
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Odd(nn.Module):
    """Parameters of all shapes that are seldom thought of."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(()))
        self.one = nn.Parameter(torch.zeros(1))
        self.row = nn.Parameter(torch.zeros(1, 9))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.experts = nn.Parameter(torch.zeros(3, 4, 2))
        self.unused = nn.Parameter(torch.zeros(2, 3))  # never has a gradient, so never a slot
        self.frozen = nn.Parameter(torch.zeros(3, 5), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Model(nn.Module):
    """Tied embedding and head, blocks in fp32 and bf16. A stage of a pipeline has some of the parts."""

    def __init__(self, parts: Iterable[str] = ("embed", "0", "1", "odd", "head")) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for part in parts:
            if part == "embed":
                self.embed = nn.Embedding(VOCABULARY, WIDTH)
            elif part == "odd":
                self.odd = Odd()
            elif part == "head":
                self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            else:
                self.layers[part] = Block().to(torch.bfloat16 if part == "1" else torch.float32)
        self.tie()

    def tie(self) -> None:
        if hasattr(self, "embed") and hasattr(self, "head"):
            self.head.weight = self.embed.weight


# --- the optimizers -------------------------------------------------------------------------------


class Nested(torch.optim.Optimizer):
    """As Muon and its kin: slots in dicts, of other shapes, numbers and nothing at all."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "name": "x"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p] = {
                        "momentum": {"buffer": torch.zeros_like(p), "norms": p.detach().new_zeros((2, 3))},
                        "calls": 0,
                        "last": None,
                        "scale": torch.tensor(0.5, dtype=torch.float64),
                    }
                slots = self.state[p]
                slots["momentum"]["buffer"].mul_(0.9).add_(p.grad)
                slots["momentum"]["norms"] += 1.25
                slots["calls"] += 1
                slots["scale"] /= 3
                p.add_(slots["momentum"]["buffer"], alpha=-group["lr"])


def optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Four optimizers over the same parameters, so that one checkpoint has the slots of all."""
    trained = [p for p in model.parameters() if p.requires_grad]

    def groups() -> list[dict[str, Any]]:
        return [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1, "lr": 0.003},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 0.007},
        ]

    adamw = torch.optim.AdamW(groups(), amsgrad=True)
    adamw.param_groups[1]["lr"] = torch.tensor(0.007)
    return {
        "adamw": adamw,
        "sgd": torch.optim.SGD(groups(), momentum=0.9),
        "adafactor": torch.optim.Adafactor(groups()),
        "nested": Nested([{"params": group["params"], "lr": group["lr"]} for group in groups()]),
    }


def blank(model: nn.Module) -> dict[str, Any]:
    """What a script has before it loads: other weights, other settings, no slots."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    made = optimizers(inner)
    for optimizer in made.values():
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    return {"model": model, **made, "step": 0}


def trained() -> dict[str, Any]:
    """The state that every layout must carry: a whole model after some steps with all optimizers."""
    torch.manual_seed(3)
    model = Model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape) * 9)
    tree = {"model": model, **optimizers(model), "step": 7}
    for p in model.parameters():
        if p.requires_grad and p is not model.odd.unused:
            p.grad = torch.randn(p.shape).to(p.dtype)
    for name in ("adamw", "sgd", "nested", "adafactor"):
        if name == "adafactor":
            model.odd.empty.grad = None  # it divides by the number of elements
        for _ in range(2):
            tree[name].step()
    return tree


# --- the layouts ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    name: str
    ranks: int
    make: Callable[[], nn.Module]

    def __str__(self) -> str:
        return self.name


@cache
def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def _fsdp(model: Model, over: DeviceMesh) -> Model:
    for block in model.layers.values():
        fully_shard(block, mesh=over)
    # FSDP2 takes no scalars; what it ignores stays a plain tensor on every rank.
    fully_shard(model, mesh=over, ignored_params={model.odd.scalar})
    return model


def _tp(model: Model, over: DeviceMesh) -> Model:
    plan: dict[str, Any] = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
    for name in model.layers:
        plan[f"layers.{name}.norm"] = SequenceParallel()
        plan[f"layers.{name}.up"] = ColwiseParallel()
        plan[f"layers.{name}.down"] = RowwiseParallel()
    parallelize_module(model, over, plan)
    model.tie()
    return model


def _stage(number: int) -> Model:
    return Model(("embed", "0", "odd") if number == 0 else ("1", "head"))


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="single", ranks=1, make=Model),
        Layout(name="ddp2", ranks=2, make=lambda: DistributedDataParallel(Model())),
        Layout(name="fsdp2", ranks=2, make=lambda: _fsdp(Model(), mesh(2))),
        Layout(name="fsdp3", ranks=3, make=lambda: _fsdp(Model(), mesh(3))),
        Layout(name="tp2", ranks=2, make=lambda: _tp(Model(), mesh(2))),
        Layout(name="pp2", ranks=2, make=lambda: _stage(dist.get_rank())),
        Layout(name="tp2-fsdp2", ranks=4, make=lambda: _fsdp(_tp(Model(), mesh(2, 2)["tp"]), mesh(2, 2)["dp"])),
        Layout(name="pp2-dp2", ranks=4, make=lambda: _stage(dist.get_rank() // 2)),
    )
}


# --- torch's own view -----------------------------------------------------------------------------

Content = tuple[str, tuple[int, ...], bytes]


def content(tensor: torch.Tensor) -> Content:
    """A tensor as bytes, put together by torch where it is distributed."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = full.detach().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def view(tree: dict[str, Any]) -> dict[str, Any]:
    """Everything in a tree by name, without any code of holdfast's."""
    model = tree["model"]
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {f"model/{name}": content(tensor) for name, tensor in inner.state_dict(keep_vars=True).items()}
    names = {id(p): name for name, p in reversed(list(inner.named_parameters(remove_duplicate=False)))}
    for key, value in tree.items():
        if isinstance(value, torch.optim.Optimizer):
            found |= _view_optimizer(key, value, names)
    return found | {"step": tree["step"]}


def _view_optimizer(key: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    found = {}
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        for p in group["params"]:
            name = f"{key}/{names[id(p)]}"
            found |= dict(leaves(f"{name}/settings", settings))
            found |= dict(leaves(f"{name}/slots", optimizer.state.get(p, "none")))
    return found


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is in nested dicts, with tensors as bytes."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{name}/{key}", item)
    else:
        yield name, content(value) if isinstance(value, torch.Tensor) else value


def logical(views: list[dict[str, Any]]) -> dict[str, Any]:
    """The views of all ranks as one, in which copies agree and a pipeline's second copy is the tied one."""
    found: dict[str, Any] = {}
    for one in views:
        for name, value in one.items():
            first = name.replace("/head.weight", "/embed.weight")
            assert _equal(found.setdefault(first, value), value), f"ranks disagree on {name}"
    return found


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of what is not the same, to the last bit."""
    names = dict.fromkeys([*expected, *found])
    return [n for n in names if n not in found or n not in expected or not _equal(found[n], expected[n])]
