"""State that a loop must keep equal beside parameters: statistics, optimizer state, clipped gradients, totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.sync.loop_training import LoopTraining
from holdfast.sync.periodic import LocalSGD
from holdfast.sync.policy import Context, Policy
from holdfast.sync.report import Totals
from holdfast.sync.selsync import SelSync
from holdfast.sync.ssp import SSP
from tests.engine.memory_group import on_workers
from tests.sync.processes import on_processes
from tests.sync.training import Weights, loss_of, make, same, sgd, train, weights


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


# --- before the update -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SelSync(delta=0), SelSync(delta=1e-9, aggregate="gradients")], ids=["all", "some"])
@pytest.mark.parametrize("clip_again", [True, False])
def test_a_step_that_is_skipped_after_clipping(policy: Policy, clip_again: bool) -> None:
    """The gradients of the next pass are others: they are averaged too."""

    def work(group: Any) -> list[torch.Tensor]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with LoopTraining(policy, model, optimizer, group, Context()) as loop:
            step(model, optimizer, group.rank, 0)
            for skip in (True, False):
                optimizer.zero_grad()
                loss_of(model, group.rank, 1 + skip).backward()
                if skip or clip_again:
                    loop.clip(1.0)
                if not skip:
                    optimizer.step()
            return [p.grad for p in model.parameters() if p.grad is not None]

    first, second = on_workers(2, work)
    assert same(first, second)


def test_clipping_averages_once() -> None:
    def work(group: Any) -> int:
        model = make()
        optimizer = sgd(model)
        with LoopTraining(SelSync(delta=0), model, optimizer, group, Context()) as loop:
            loss_of(model, group.rank, 0).backward()
            loop.clip(1.0)
            before = loop.sent
            loop.clip(0.5)
            optimizer.step()
            assert loop.totals.synchronised == 1
            return loop.sent - before

    assert on_workers(2, work) == [0, 0]


class Partly(nn.Module):
    """One layer is used by all, one by the second replica alone, one by nobody."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))
        self.used = 1 + rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x) for layer in self.layers[: self.used]), torch.zeros(()))


def test_what_no_replica_uses_stays_as_it_is() -> None:
    """A gradient of zero is not none: AdamW would shrink the weights."""

    def work(group: Any) -> tuple[list[bool], Weights]:
        torch.manual_seed(0)
        model = Partly(group.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        with LoopTraining(SelSync(delta=0), model, optimizer, group, Context()):
            before = weights(model)
            step(model, optimizer, group.rank, 0)
            moved = [bool((a != b).any()) for a, b in zip(before, weights(model), strict=True)]
            return moved, weights(model)

    (moved, first), (_, second) = on_workers(2, work)
    assert moved == [True] * 4 + [False] * 2
    assert same(first, second)


def test_sparse_gradients_are_refused() -> None:
    def work(group: Any) -> None:
        model = nn.Embedding(5, 1, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with LoopTraining(SelSync(delta=0), model, optimizer, group, Context()):
            model(torch.tensor([1])).sum().backward()
            with pytest.raises(UsageError, match="sparse"):
                optimizer.step()

    on_workers(2, work)


# --- statistics, and memory that moves -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SelSync(delta=0), LocalSGD(every=3, warmup=9)], ids=["always", "warmup"])
def test_statistics_are_equal_at_the_end_of_steps_together(policy: Policy) -> None:
    def work(group: Any) -> Weights:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = sgd(model)
        with LoopTraining(policy, model, optimizer, group, Context()) as loop:
            for number in range(3):
                step(model, optimizer, group.rank, number)
        assert loop.totals.synchronised == 3
        return [*weights(model), *model.buffers()]

    first, second = on_workers(2, work)
    assert same(first, second)


class Moving(nn.Module):
    """Replaces its buffer in every forward pass."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("mask", torch.full((2,), -torch.inf))

    def forward(self, x: torch.Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean().detach()
        return self.layer(x)


@pytest.mark.parametrize("policy", [LocalSGD(every=2), SSP(staleness=0)], ids=["local", "ssp"])
def test_memory_that_is_replaced(policy: Policy) -> None:
    def work(group: Any) -> Weights:
        torch.manual_seed(0)
        model = Moving()
        optimizer = sgd(model)
        with LoopTraining(policy, model, optimizer, group, Context()):
            for number in range(4):
                vector = nn.utils.parameters_to_vector(model.parameters()).detach()
                nn.utils.vector_to_parameters(vector, model.parameters())
                step(model, optimizer, group.rank, number)
        assert model.mask.tolist() == [-torch.inf] * 2
        return [*weights(model), model.mean]

    first, second = on_workers(2, work)
    assert same(first, second)
    assert first[-1].any()


def test_a_parameter_that_is_unfrozen_is_refused() -> None:
    def work(group: Any) -> None:
        model: Any = make()
        model[0].requires_grad_(False)
        optimizer = sgd(model)
        with LoopTraining(LocalSGD(every=2), model, optimizer, group, Context()):
            step(model, optimizer, group.rank, 0)
            model[0].requires_grad_(True)
            with pytest.raises(UsageError, match="unfrozen"):
                step(model, optimizer, group.rank, 1)

    on_workers(2, work)


# --- the optimizer's state -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_state", [0, 1])
def test_the_optimizer_begins_as_the_first_ones(has_state: int) -> None:
    """A checkpoint that one rank has loaded: its momentum is everybody's, or nobody's; rates stay."""

    def work(group: Any) -> tuple[Weights, float]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 + group.rank, momentum=0.9)
        if group.rank == has_state:
            step(model, optimizer, 0, 0)
        with LoopTraining(SelSync(delta=0), model, optimizer, group, Context()):
            optimizer.param_groups[0]["lr"], rate = 0.05, optimizer.param_groups[0]["lr"]
            step(model, optimizer, group.rank, 1)
        return weights(model), rate

    (first, rate), (second, other) = on_workers(2, work)
    assert same(first, second)
    assert (rate, other) == (0.05, 1.05)


@pytest.mark.parametrize("policy", [LocalSGD(every=9), LocalSGD(every=1, optimizer_state="average")], ids=repr)
def test_an_optimizer_without_state_is_refused(policy: Policy) -> None:
    """One replica has had no gradients: it would send less than the others, at which Gloo ends the process."""

    def work(rank: int) -> str:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            with policy.around(model, optimizer):
                if rank == 0:
                    loss_of(model, rank, 0).backward()
                optimizer.step()
        except UsageError:
            return "refused"
        return "went on"

    assert on_processes(2, work, seconds=30) == ["refused"] * 2


def test_models_that_differ_are_refused() -> None:
    def work(rank: int) -> str:
        model = nn.Linear(2, 2 + rank)
        try:
            with LocalSGD(every=2).around(model, sgd(model)):
                return "went on"
        except UsageError:
            return "refused"

    assert on_processes(2, work, seconds=30) == ["refused"] * 2


# --- what is counted -------------------------------------------------------------------------------------


def test_pushes_are_exchanges() -> None:
    size = sum(p.nbytes for p in make().parameters())
    for seen in train(SSP(staleness=1), 10, workers=3):
        totals: Totals = seen.loop.totals
        assert totals.lssr == 0
        assert totals.sent >= 10 * 2 * size
        assert seen.reports[0].sent == 2 * size
        assert totals.synchronised == 1  # the end


def test_the_distance_of_pushing_replicas_is_that_of_their_parameters() -> None:
    """Each gives the sum of its own updates to the mean, which is far from its parameters."""
    for seen in train(SSP(staleness=0), 6, workers=3):
        assert seen.loop.totals.distance == pytest.approx(0, abs=1e-5)


def test_an_average_after_a_synchronisation_is_not_another() -> None:
    def work(group: Any) -> tuple[Totals, float | None]:
        model = make()
        optimizer = sgd(model)
        with LoopTraining(LocalSGD(every=5), model, optimizer, group, Context()) as loop:
            for number in range(20):
                step(model, optimizer, group.rank, number)
                distance = loop.last.distance
                if number % 5 == 4:
                    loop.average()
        return loop.totals, distance

    totals, distance = on_workers(2, work)[0]
    assert (totals.synchronised, totals.lssr) == (4, 0.8)
    assert totals.distance == distance != 0


def test_replicas_are_apart_after_an_average_of_gradients() -> None:
    """So the end, though it comes after the same step, tells how far."""
    (seen, *_) = train(SelSync(delta=1e9, max_local_steps=2, aggregate="gradients"), 6)
    assert seen.loop.totals.synchronised == 3
    assert seen.loop.totals.distance > 0
