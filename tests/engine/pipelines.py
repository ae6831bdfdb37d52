"""Training on a layout of pipelines in threads, and on one worker, to be compared bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast.data.feed import MapFeed
from holdfast.data.order import Order
from holdfast.engine.engine import Engine, Loss
from holdfast.engine.measures import evaluate
from holdfast.engine.model import LayeredModel, Layers
from holdfast.engine.update import Update
from holdfast.plan.layout import Layout, PlacedPipeline, side_by_side
from tests.engine.memory_group import MemoryGroup, Network, on_workers

CPU = torch.device("cpu")
WIDTH = 6
Make = Callable[[], Layers]
MAKING = threading.Lock()  # threads share torch's generator


def fill(tensor: Tensor, seed: int) -> Tensor:
    """Values of its own, whatever others draw meanwhile."""
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tensor.data.copy_(drawn)


def lay(*lines: tuple[Sequence[int], Sequence[int]], size: int | None = None) -> Layout:
    """A layout from each pipeline's ranks and numbers of layers."""
    made = []
    for ranks, counts in lines:
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        ranges = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
        made.append(PlacedPipeline(ranks=tuple(ranks), layers=ranges))
    return Layout(
        pipelines=tuple(made),
        size=size or 1 + max(max(ranks) for ranks, _ in lines),
        layers=sum(lines[0][1]),
        tolerate=len(lines) - 1,
        minimum=1,
        reason="a test",
    )


class Layer(nn.Module):
    """A function of what comes in, with modules of its own."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.inner)


def linear(inputs: int = WIDTH, outputs: int = WIDTH, **kwargs: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **kwargs)


def mlp() -> list[nn.Module]:
    return [linear(WIDTH, 9), nn.Tanh(), linear(9, 9), nn.LayerNorm(9), nn.GELU(), linear(9, WIDTH)]


def numbers(samples: int) -> TensorDataset:
    """As many inputs and targets."""
    return TensorDataset(fill(torch.empty(samples, WIDTH), 1), fill(torch.empty(samples, WIDTH), 2))


@dataclass(kw_only=True)
class Job:
    """What is trained: all that does not depend on the layout."""

    layers: Make
    loss: Loss = mse_loss
    data: Any = field(
        default_factory=lambda: TensorDataset(fill(torch.empty(13, WIDTH), 1), fill(torch.empty(13, WIDTH), 2))
    )
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)
    global_batch: int = 10
    micro_batch: int = 2
    steps: int = 2  # the second one of an epoch is ragged
    clip_norm: float | None = None
    exact: bool = True
    autocast: torch.dtype | None = None
    inverse: Any = None  # given: updates are eager
    filled: bool = True  # all parameters get values that do not depend on torch's generator

    def engine(self) -> Engine:
        with MAKING:
            model = LayeredModel(self.layers(), seed=0, device=CPU)
        if self.filled:
            aliases = {id(alias) for alias, _ in model.aliases}
            for seed, p in enumerate(p for p in model.module.parameters() if id(p) not in aliases):
                fill(p, seed).mul_(0.5)
        return Engine(
            model=model,
            update=Update(model.trainable, self.optimizer, clip_norm=self.clip_norm, inverse=self.inverse),
            loss=self.loss,
            feed=MapFeed(
                self.data,
                order=Order(size=len(self.data), global_batch=self.global_batch, micro_batch=self.micro_batch, seed=0),
            ),
            exact=self.exact,
            autocast=self.autocast,
        )


@dataclass(kw_only=True)
class Result:
    """What one worker has at the end."""

    losses: list[float]
    evaluation: dict[str, float]
    tensors: dict[str, Tensor]  # weights, buffers and slots of the layers that it holds

    def differs_from(self, other: Result) -> list[str]:
        """Names of what both have, and is not the same to the bit."""
        common = self.tensors.keys() & other.tensors.keys()
        return sorted(name for name in common if not same_bits(self.tensors[name], other.tensors[name]))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def one_step(engine: Engine, group: Any, step: int) -> list[float]:
    losses = engine.attempt(step, group)
    group.vote(torch.zeros(1))  # until then what was sent must stay as it is
    engine.apply(step)
    return losses


def take_place(engine: Engine, layout: Layout, group: Any) -> None:
    """Holds the layers of a place, and no others: their values are not to be had here."""
    role = layout.role(group.rank)
    held = set() if role is None else set(role.layers)
    engine.model.release(set(range(len(engine.model.layers))) - held)
    engine.enter(layout, group)


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of all tensors that are held here, by names that are the same everywhere."""
    found = {}
    model, optimizer = engine.model, engine.update.optimizer
    for number in sorted(model.held):
        for name, tensor in [*model.layers[number].named_parameters(), *model.layers[number].named_buffers()]:
            found[f"{number}.{name}"] = tensor.detach().clone()
    for unit in model.units:
        if model.is_held(unit):
            for place, p in enumerate(unit.parameters):
                for key, slot in optimizer.state.get(p, {}).items():
                    if isinstance(slot, Tensor):
                        found[f"unit {unit.number}.{place}.{key}"] = slot.clone()
    return found


def train(job: Job, layout: Layout, network: Network | None = None) -> list[Result]:
    """By rank."""

    def work(group: MemoryGroup) -> Result:
        engine = job.engine()
        take_place(engine, layout, group)
        losses: list[float] = []
        for step in range(job.steps):
            losses += one_step(engine, group, step)
        evaluation = evaluate(engine, job.data, {"loss": job.loss}, group)
        group.vote(torch.zeros(1))
        return Result(losses=losses, evaluation=evaluation, tensors=state_of(engine))

    return on_workers(layout.size, work, network)


def train_alone(job: Job) -> Result:
    (result,) = train(job, side_by_side(len(job.engine().model.layers), 1))
    assert all(tensor.isfinite().all() for tensor in result.tensors.values() if tensor.is_floating_point())
    return result


def assert_same(job: Job, *layouts: Layout, expected: Result | None = None) -> None:
    """Weights, slots, losses and the evaluation are those of one worker, whatever the layout."""
    expected = expected or train_alone(job)
    for layout in layouts:
        results = train(job, layout)
        seen: set[str] = set()
        for rank, result in enumerate(results):
            assert not result.differs_from(expected), f"rank {rank} of {layout.pipelines}"
            assert result.tensors.keys() <= expected.tensors.keys()
            seen |= result.tensors.keys()
        assert seen == expected.tensors.keys(), "somebody holds everything"
        assert [sum(values) for values in zip(*(r.losses for r in results), strict=True)] == expected.losses
        assert all(result.evaluation == expected.evaluation for result in results)


def each_alone(layers: int) -> Layout:
    """A stage for each layer, so that everything crosses a wire."""
    return lay((range(layers - 1, -1, -1), [1] * layers))


def mixed(layers: int) -> Layout:
    """Three pipelines, ranks in no order, and one worker with nothing to do; in the ragged step one has no work."""
    return lay(([3, 1], [1, layers - 1]), ([0], [layers]), ([4, 2], [layers - 1, 1]), size=6)


def assert_same_everywhere(job: Job) -> None:
    layers = len(job.engine().model.layers)
    assert_same(job, each_alone(layers), mixed(layers))
