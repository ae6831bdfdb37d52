"""A small model of every kind of tensor, and workers that hold parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from holdfast.checkpoint import open_checkpoint, save
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.series import folder_of
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.cluster.texts import Texts
from holdfast.engine.model import LayeredModel, Layers
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.update import Update
from tests.engine import memory_group

T = TypeVar("T")
WORDS, WIDTH = 11, 6
CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "momentum": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "Adagrad": lambda ps: Adagrad(ps, lr=0.1),
    "groups": lambda ps: AdamW([{"params": ps[1::2], "lr": 0.2}, {"params": ps[::2]}], lr=0.1, amsgrad=True),
}


class Block(nn.Module):
    """Weights, a buffer, one that is not saved, one that all blocks share, and extra state."""

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, 3, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("mask", torch.rand(WIDTH), persistent=False)
        self.register_buffer("shared", shared, persistent=False)
        self.calls = int(torch.randint(100, ()))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WORDS))
        self.weight = weight


def plain(seed: int = 0, extra: bool = True) -> nn.Sequential:
    """Seven layers: the first and the last share a weight, one has nothing, one is frozen."""
    torch.manual_seed(seed)
    embedding, shared = nn.Embedding(WORDS, WIDTH), torch.rand(3)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    blocks = [Block(shared) if extra else nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(embedding, blocks[0], nn.ReLU(), frozen, blocks[1], blocks[2], Head(embedding.weight))


LAYERS = 7


def whole(seed: int = 0, steps: int = 3, optimizer: str = "AdamW", module: Layers | None = None) -> State:
    """A state that is held whole, after some steps with made-up gradients."""
    model = LayeredModel(module or plain(seed), seed=0, device=CPU)
    update = Update(model.trainable, OPTIMIZERS[optimizer], schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2))
    state = State(model, update, Progress(label={"what": "a test"}, results={"after 0/0": 0.5}))
    return train(state, steps)


def train(state: State, steps: int) -> State:
    """Each parameter's gradient depends on its name's number and the step, so parts train as the whole does."""
    for _ in range(steps):
        step = state.progress.step
        for number, p in enumerate(state.model.trainable):
            unit = next(unit for unit in state.model.units if any(p is one for one in unit.parameters))
            generator = torch.Generator().manual_seed(1000 * step + number)
            held = state.model.is_held(unit)
            p.grad = torch.rand(p.shape, generator=generator).to(p.dtype) if held else None
        state.update.apply(step=step)
        state.progress.step = step + 1
    return state


def on_workers(size: int, work: Callable[[Any], T]) -> list[T]:
    """As that of ``memory_group``, but what a worker has sent stays after its end, which may be an error for all."""
    groups = []

    def run(group: Any) -> T:
        groups.append(group)
        return work(group)

    return memory_group.on_workers(size, run)


def keep(state: State, layers: Iterable[int]) -> State:
    """Gives up all but these layers."""
    state.model.release(set(range(len(state.model.layers))) - set(layers))
    state.forget()
    return state


@dataclass(frozen=True)
class Parts:
    """Which layers each worker holds; a ``Layout`` as far as gathering needs one."""

    layers: Sequence[Sequence[int]]

    @property
    def size(self) -> int:
        return len(self.layers)

    def holders(self, layer: int) -> tuple[int, ...]:
        return tuple(rank for rank, layers in enumerate(self.layers) if layer in layers)

    def __str__(self) -> str:
        return "-".join("".join(map(str, layers)) or "none" for layers in self.layers)


PARTS = [
    Parts([range(7)]),
    Parts([range(3), range(3, 7)]),
    Parts([range(4, 7), range(4)]),  # the first worker has the end
    Parts([range(7), range(2), range(2, 7)]),
    Parts([[], range(5), range(5, 7)]),  # the first worker has nothing
    Parts([range(2), range(2, 5), range(5, 7), range(4), range(4, 7)]),
]


def save_parts(root: Path, parts: Parts, *, step: int = 3, meddle: Any = None, **kind: Any) -> Catalogue:
    """Each worker saves what it holds; ``meddle(rank, state)`` comes before that."""

    states = [keep(whole(steps=step, **kind), layers) for layers in parts.layers]
    for rank, state in enumerate(states):
        if meddle is not None:
            meddle(rank, state)

    def work(group: Any) -> None:
        save(folder_of(root, step), states[group.rank].tree(), ranks=Texts(group, CPU))
        group.vote(torch.zeros(1))

    on_workers(parts.size, work)
    return open_checkpoint(folder_of(root, step))


def bytes_in(catalogue: Catalogue) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    tensors = {name: read_tensor(catalogue, name) for name in catalogue.tensors}
    return {
        name: (str(t.dtype), tuple(t.shape), t.view(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def holds_nan(catalogue: Catalogue) -> bool:
    return any(bool(read_tensor(catalogue, name).isnan().any()) for name in catalogue.tensors)
