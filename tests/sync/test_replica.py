"""Contributions and means: every optimizer's state, an order that is the same everywhere, and DiLoCo's outer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.sync.diloco import DiLoCo
from holdfast.sync.exchange import Averaging
from holdfast.sync.policy import Context, Decision, Policy
from holdfast.sync.replica import OUTER, Replica
from tests.engine.memory_group import on_workers


class Asked:
    """A tracker that synchronises when the test says so."""

    ballot = 0

    def __init__(self) -> None:
        self.numbers = [0.0, 0.0]
        self.met: list[int] = []

    def observe(self, step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        return []

    def decide(self, step: int, sums: Sequence[float], workers: int) -> Decision:
        return Decision(synchronise=False, reason="")

    def synchronised(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        self.met.append(step)

    def state(self) -> list[float]:
        return self.numbers

    def load(self, state: Sequence[float]) -> None:
        self.numbers = list(state)


@dataclass(frozen=True, kw_only=True)
class WhenAsked(Policy):
    def tracker(self, context: Context) -> Asked:
        return Asked()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


class Worker:
    """A small model with statistics, its optimizer, and the replica made of them."""

    def __init__(self, rank: int, optimizer: str, policy: Policy) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.weight: torch.Tensor = next(self.model.parameters())
        same_start = torch.Generator().manual_seed(0)  # the global one is shared by the threads
        for parameter in self.model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=same_start)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.generator = torch.Generator().manual_seed(rank + 1)
        self.replica = Replica(
            policy,
            parameters=list(self.model.parameters()),
            buffers=self.model.buffers,
            optimizer=self.optimizer,
            context=Context(),
        )
        self.replica.begin(0)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 4, generator=self.generator)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        slots = [
            value
            for p in self.model.parameters()
            for _, value in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(value, torch.Tensor)
        ]
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers(), *slots)]

    def synchronise(self, group: Any, step: int, *, full: bool = False) -> None:
        mean = Averaging(group, self.replica.contribution(full=full)).finish()
        before = [buffer.clone() for buffer in mean]
        self.replica.adopt(step, mean, full=full)
        assert all(torch.equal(a, b) for a, b in zip(mean, before, strict=True)), "others may still be receiving it"


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", [WhenAsked(), WhenAsked(optimizer_state="reset"), DiLoCo(every=3)])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_after_a_full_average_all_is_equal_and_training_goes_on(optimizer: str, policy: Policy) -> None:
    def work(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        worker = Worker(group.rank, optimizer, policy)
        worker.train(3)
        apart = worker.state()
        worker.synchronise(group, 3)
        worker.train(2)
        worker.synchronise(group, 5, full=True)
        equal = worker.state()
        worker.train()
        return apart, equal

    results = on_workers(3, work)
    assert not same(results[0][0], results[1][0]), "a control: they were not equal before"
    assert same(results[0][1], results[1][1])
    assert same(results[0][1], results[2][1])
    assert all(t.isfinite().all() for t in results[0][1])


@pytest.mark.parametrize("state", ["local", "average", "reset"])
def test_what_becomes_of_the_optimizers_state(state: Any) -> None:
    def work(group: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        worker = Worker(group.rank, "momentum", WhenAsked(optimizer_state=state))
        worker.train(3)
        slot = worker.optimizer.state[worker.weight]
        before = slot["momentum_buffer"].clone()
        worker.synchronise(group, 3)
        return before, slot.get("momentum_buffer")

    (before, after), (other, other_after) = on_workers(2, work)
    if state == "reset":
        assert after is None
        return
    assert after is not None
    assert other_after is not None
    wanted = before if state == "local" else before + 0.5 * (other - before)
    assert torch.equal(after, wanted)
    assert torch.equal(after, other_after) == (state == "average")


def test_a_parameter_that_only_one_replica_has_used() -> None:
    def work(group: Any) -> list[dict[str, Any]]:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizer = torch.optim.Adam(model.parameters())
        replica = Replica(
            WhenAsked(), parameters=list(model.parameters()), buffers=list, optimizer=optimizer, context=Context()
        )
        model[group.rank](torch.ones(1, 2)).sum().backward()  # the third is used by nobody
        optimizer.step()
        replica.adopt(1, Averaging(group, replica.contribution(full=True)).finish(), full=True)
        for layer in model:
            layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return [dict(optimizer.state[p]) for p in model.parameters()]

    first, second = on_workers(2, work)
    for a, b in zip(first[:4], second[:4], strict=True):
        assert set(a) == {"step", "exp_avg", "exp_avg_sq"} == set(b)
        assert float(a["step"]) == float(b["step"]) == 1.5
    assert float(first[4]["step"]) == 1.0


def test_distance_is_of_parameters_alone() -> None:
    def work(group: Any) -> tuple[float, list[torch.Tensor]]:
        worker = Worker(group.rank, "adam", WhenAsked(optimizer_state="average"))
        worker.train(2)
        contribution = worker.replica.contribution(full=False)
        mean = Averaging(group, contribution).finish()
        return worker.replica.distance(mean, contribution), [p.detach() for p in worker.model.parameters()]

    (d0, p0), (d1, p1) = on_workers(2, work)
    wanted = sum(float(((a - b) / 2).double().square().sum()) for a, b in zip(p0, p1, strict=True))
    assert d0 == pytest.approx(wanted, rel=1e-5)
    assert d1 == pytest.approx(wanted, rel=1e-5)


def test_what_was_done_since_is_kept() -> None:
    def work(group: Any) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, float(group.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = Replica(WhenAsked(), parameters=[model.weight], buffers=list, optimizer=optimizer, context=Context())
        since = replica.contribution(full=False)
        averaging = Averaging(group, since)
        with torch.no_grad():
            model.weight += 10 * (group.rank + 1)
        replica.adopt(1, averaging.finish(), full=False, since=since)
        return model.weight.item()

    assert on_workers(2, work) == [10.5, 20.5]


def test_late_moments_are_never_below_zero() -> None:
    """own + mean - then would be, for a second moment that has shrunk since: a root of it would be nan."""

    def work(group: Any) -> tuple[torch.Tensor, float]:
        worker = Worker(group.rank, "adam", WhenAsked(optimizer_state="average"))
        worker.train()
        slot = worker.optimizer.state[worker.weight]
        slot["exp_avg_sq"].fill_(100.0 * (1 - group.rank))
        since = worker.replica.contribution(full=False)
        averaging = Averaging(group, since)
        worker.train()
        slot["exp_avg_sq"].fill_(1.0)
        worker.replica.adopt(2, averaging.finish(), full=False, since=since)
        return slot["exp_avg_sq"], float(slot["step"])

    for moment, steps in on_workers(2, work):
        assert (moment == 50).all()
        assert steps == 2


def test_diloco_takes_an_outer_step() -> None:
    def work(group: Any) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        policy = DiLoCo(every=1, outer_lr=0.5, outer_momentum=0.5)
        replica = Replica(policy, parameters=[model.weight], buffers=list, optimizer=optimizer, context=Context())
        replica.begin(0)
        seen: list[float] = []
        for step in (1, 1, 2):  # the second time nobody has moved
            with torch.no_grad():
                model.weight -= 2.0 * group.rank * (len(seen) != 1)
            replica.adopt(step, Averaging(group, replica.contribution(full=False)).finish(), full=False)
            seen.append(model.weight.item())
        return [*seen, float(optimizer.state[model.weight][OUTER])]

    # way 1, momentum 1: 1 - 0.5 (1 + 0.5); then way 1, momentum 1.5: 0.25 - 0.5 (1 + 0.75)
    assert on_workers(2, work) == [[0.25, 0.25, -0.625, 1.5]] * 2


def test_plain_diloco_is_averaging() -> None:
    def work(group: Any, policy: Policy) -> list[torch.Tensor]:
        worker = Worker(group.rank, "sgd", policy)
        for step in (2, 4):
            worker.train(2)
            worker.synchronise(group, step)
        return [p.detach() for p in worker.model.parameters()]

    averaged = on_workers(2, lambda group: work(group, WhenAsked()))
    outer = on_workers(2, lambda group: work(group, DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)))
    assert same(averaged[0], outer[0])


def test_who_comes_in_after_an_overlapped_outer_step_is_as_the_others() -> None:
    """All meet fully after the same step (a checkpoint, a join); a newcomer takes the parameters for its anchor."""

    def work(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        worker = Worker(group.rank, "sgd", DiLoCo(every=2, overlap=1, outer_lr=0.7, outer_momentum=0.9))
        worker.train(2)
        since = worker.replica.contribution(full=False)
        averaging = Averaging(group, since)
        worker.train()
        worker.replica.adopt(3, averaging.finish(), full=False, since=since)
        worker.synchronise(group, 3, full=True)
        if group.rank == 1:
            worker.replica.begin(3)  # as if it had just come
        equal = worker.state()
        worker.train(2)
        worker.synchronise(group, 5)
        return equal, worker.state()

    (before, after), (others_before, others_after) = on_workers(2, work)
    assert same(before, others_before)
    assert same(after, others_after)


def test_outer_momentum_survives_a_reset_and_is_not_averaged() -> None:
    def work(group: Any) -> tuple[torch.Tensor, float]:
        worker = Worker(group.rank, "adam", DiLoCo(every=2, optimizer_state="reset"))
        for step in (2, 4):
            worker.train(2)
            worker.synchronise(group, step)
        slot = worker.optimizer.state[worker.weight]
        worker.train()
        return slot[OUTER], float(slot["step"])

    (a, steps), (b, _) = on_workers(2, work)
    assert torch.equal(a, b)
    assert a.any()
    assert steps == 1


def test_gradients_that_are_missing_are_zero_unless_nobody_has_one() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Replica(
        WhenAsked(), parameters=list(model.parameters()), buffers=list, optimizer=optimizer, context=Context()
    )
    model.bias.grad = torch.ones(1)
    assert replica.gradients()[0].tolist() == [0, 0, 1, 0, 1]
    replica.set_gradients([torch.tensor([0.0, 0.0, 3.0, 0.0, 1.0])])
    assert model.weight.grad is None
    assert model.bias.grad.tolist() == [3]
    replica.set_gradients([torch.tensor([1.0, 2.0, 3.0, 0.5, 1.0])])
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 2]]


def test_begin_and_adopt_tell_the_tracker() -> None:
    def work(group: Any, full: bool) -> tuple[list[int], list[float]]:
        worker = Worker(group.rank, "sgd", WhenAsked())
        tracker: Any = worker.replica.tracker
        tracker.numbers = [float(group.rank), 5.0]
        worker.synchronise(group, 7, full=full)
        return tracker.met, tracker.numbers

    assert on_workers(2, lambda group: work(group, True)) == [([0, 7], [0.5, 5.0])] * 2
    assert on_workers(2, lambda group: work(group, False)) == [([0, 7], [0.0, 5.0]), ([0, 7], [1.0, 5.0])]
    worker = Worker(0, "sgd", WhenAsked())
    worker.replica.begin(3, [8.0, 9.0])
    assert worker.replica.tracker.state() == [8.0, 9.0]


def test_counters_and_masks_become_the_rounded_mean() -> None:
    """Integers were left as they were once, and replicas differed for ever."""

    def make(count: int, mask: list[bool]) -> tuple[Replica, nn.Module]:
        model = nn.Linear(1, 1)
        model.register_buffer("count", torch.tensor(count))
        model.register_buffer("mask", torch.tensor(mask))
        model.register_buffer("table", torch.tensor([2**40 + 1, 7]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())
        context = Context()
        return (
            Replica(WhenAsked(), parameters=parameters, buffers=model.buffers, optimizer=optimizer, context=context),
            model,
        )

    made = [make(4, [True, False, True]), make(7, [True, False, False]), make(7, [True, False, False])]
    given = [replica.contribution(full=True) for replica, _ in made]
    mean = [sum(parts[1:], parts[0]) / 3 for parts in zip(*given, strict=True)]
    for replica, model in made:
        replica.adopt(1, mean, full=True)
        assert model.count.item() == 6
        assert model.mask.tolist() == [True, False, False]
        assert model.table.tolist() == [2**40 + 1, 7]
        assert (model.count.dtype, model.mask.dtype) == (torch.int64, torch.bool)
