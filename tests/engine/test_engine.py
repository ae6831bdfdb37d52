"""A step on several workers: one worker's gradients and losses to the last bit, through a real backward pass."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from holdfast.cluster.team import ALONE
from holdfast.data.feed import MapFeed
from holdfast.data.order import Order
from holdfast.engine.engine import Engine
from holdfast.engine.model import LayeredModel
from holdfast.engine.update import Update
from holdfast.errors import UsageError
from holdfast.plan.layout import side_by_side
from tests.engine.memory_group import on_workers


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Threads share torch's generator, so weights get their own."""
    return tensor.data.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))


def make_engine(module: nn.Module, *, exact: bool = True) -> Engine:
    for seed, p in enumerate(module.parameters()):
        fill(p, seed)
    model = LayeredModel(module, seed=0, device=torch.device("cpu"))
    return Engine(
        model=model,
        update=Update(model.trainable, lambda ps: torch.optim.SGD(ps, lr=0.01)),
        loss=mse_loss,
        feed=MapFeed(
            TensorDataset(fill(torch.empty(26, 4), 1), fill(torch.empty(26, 4), 2)),
            order=Order(size=26, global_batch=14, micro_batch=2, seed=0),
        ),
        exact=exact,
        autocast=None,
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def trained(workers: int, steps: int = 4, *, exact: bool) -> list[tuple[list[float], torch.Tensor]]:
    """The losses that each worker computed, and its weights, after steps with full and ragged batches."""

    def work(group: Any) -> tuple[list[float], torch.Tensor]:
        engine = make_engine(mlp(), exact=exact)
        engine.enter(side_by_side(len(engine.model.layers), workers), group)
        losses: list[float] = []
        for step in range(steps):
            losses += engine.attempt(step, group)
            group.vote(torch.zeros(1))  # until then what was sent must stay as it is
            engine.apply(step)
        return losses, torch.cat([p.detach().flatten() for p in engine.model.trainable])

    return on_workers(workers, work)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 9])
def test_exact_training_has_the_bits_of_one_worker(workers: int) -> None:
    ((expected_losses, expected),) = trained(1, exact=True)
    results = trained(workers, exact=True)
    assert all(torch.equal(weights, expected) for _, weights in results)
    assert [sum(values) for values in zip(*(losses for losses, _ in results), strict=True)] == expected_losses


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_fast_training_is_close_and_the_same_on_every_worker(workers: int) -> None:
    ((_, expected),) = trained(1, exact=False)
    results = trained(workers, exact=False)
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)
    assert torch.allclose(results[0][1], expected, atol=1e-4)


def test_a_dropped_attempt_can_be_made_again() -> None:
    def work(group: Any) -> bool:
        engine, again = make_engine(mlp()), make_engine(mlp())
        engine.attempt(0, group)
        again.attempt(0, group)
        again.drop()
        again.attempt(0, group)
        return all(
            torch.equal(p.grad, q.grad) for p, q in zip(engine.model.trainable, again.model.trainable, strict=True)
        )

    assert on_workers(1, work) == [True]


class Repeated(nn.Module):
    """One layer three times, each under a checkpoint; if that is re-entrant, the gradient comes in three parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant).tanh()
        return x


class Listener:
    """A second worker that only notes what it is sent, at the moment it is sent."""

    rank, size, team = 0, 2, ALONE

    def __init__(self) -> None:
        self.heard: list[torch.Tensor] = []

    def check(self) -> None: ...

    def start(self, sends: Any, receives: Any) -> list[Any]:
        for _, tensor, _ in receives:
            tensor.zero_()
        self.heard += [tensor.clone() for _, tensor, _ in sends]
        return []

    def finish(self, works: Any) -> None: ...

    def sum(self, values: torch.Tensor, ranks: Any = None, *, tag: int = 0) -> None: ...


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_is_sent_whole_or_refused(reentrant: bool) -> None:
    engine, listener = make_engine(Repeated(reentrant)), Listener()
    engine.enter(side_by_side(1, 2), listener)
    try:
        engine.attempt(0, listener)
    except UsageError:
        return
    finally:
        engine.drop()
    whole = make_engine(Repeated(reentrant))
    share = [i for index in range(3) for i in whole.order.samples(0, index)]
    inputs, targets = whole.feed.collate([whole.feed.data[i] for i in share])
    (mse_loss(whole.model.module(inputs), targets) * 6 / 14).backward()
    gradient = torch.cat([p.grad.flatten() for p in reversed(whole.model.trainable)])
    sent = [t.sum() for t in listener.heard]
    assert torch.allclose(sum(sent[:2]), gradient[4:].sum(), atol=1e-5)


def test_an_engine_that_is_left_within_a_step_is_freed() -> None:
    """Python's collector does not see through torch's hooks: what they keep stays for ever."""
    engine = make_engine(mlp())
    model = weakref.ref(engine.model.layers[0])
    engine.collector.begin(SimpleNamespace(buckets=(), engine=engine))  # type: ignore[arg-type]
    del engine
    gc.collect()
    assert model() is None
