"""The driver's states: in touch, exchanging, catching up; with an owner that can change its peers as a run does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from holdfast.sync.driver import Driver
from holdfast.sync.owner import SyncOperation
from holdfast.sync.periodic import LocalSGD
from holdfast.sync.policy import Context, Decision, Policy
from holdfast.sync.replica import Replica
from holdfast.sync.report import Report
from holdfast.sync.selsync import SelSync
from holdfast.sync.ssp import SSP
from tests.engine.memory_group import MemoryGroup, Network, on_workers

NOW = Decision(synchronise=True, reason="now")


class Owner:
    """A training with one parameter, that moves by another amount on each rank."""

    def __init__(self, policy: Policy, group: Any, *, step: int = 0) -> None:
        self.step, self.group, self.sent = step, group, 0
        self.weight = torch.zeros(5, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        replica = Replica(policy, parameters=[self.weight], buffers=list, optimizer=self.optimizer, context=Context())
        self.driver = Driver(policy, replica, self, group)
        self.driver.replica.begin(step)
        self.adoptions: list[tuple[int, bool, bool]] = []  # step, full, equal
        self.before_commit: Callable[[SyncOperation], None] = lambda operation: None

    def commit(self, operation: SyncOperation) -> float:
        self.before_commit(operation)
        values = torch.tensor(operation.attempt(self.group) or [0.0])
        self.group.sum(values)
        operation.apply(float(values))
        return float(values)

    def agree(self, peers: Any, *, full: bool) -> None:
        marks = torch.tensor([self.step, self.step**2, full, full], dtype=torch.float64)
        peers.sum(marks)
        assert marks.tolist() == [
            self.step * peers.size,
            self.step**2 * peers.size,
            full * peers.size,
            full * peers.size,
        ]

    def adopted(self, *, full: bool, equal: bool) -> None:
        self.adoptions.append((self.step, full, equal))

    def gradients_averaged(self) -> None:
        self.update()

    def inherited(self, peers: Any, pushed_among: Any, heard: Mapping[int, int]) -> list[int]:
        return []

    def update(self) -> None:
        self.optimizer.step()
        self.step += 1

    def next_step(self) -> Report:
        self.weight.grad = torch.full((5,), -1.0 - self.group.rank)
        decision = self.driver.before_update()
        if decision is not None and decision.synchronise:
            report = self.driver.average_gradients(decision)
            assert report is not None
        else:
            self.update()
            report = self.driver.act(self.driver.after_update())
        self.driver.count(report)
        return report


POLICIES = [
    LocalSGD(every=2),
    LocalSGD(every=2, overlap=1),
    SelSync(delta=1e-9, aggregate="gradients"),
    SelSync(target=0.4),
    SSP(staleness=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_one_behind_catches_up_alone_and_then_all_meet(policy: Policy) -> None:
    def work(group: Any) -> tuple[list[bool], list[float], Owner]:
        owner = Owner(policy, group, step=3 if group.rank == 0 else 0)
        owner.driver.enter(group, meet_at=3)
        reports = []
        while not owner.driver.is_due:
            before = group.bytes
            report = owner.next_step()
            reports.append(report.synchronised)
            assert report.synchronised or group.bytes == before, "nobody would listen"
            if report.synchronised:
                break
        else:
            owner.driver.meet(NOW)
        assert not owner.driver.catching_up
        return reports, owner.weight.tolist(), owner

    (first, equal, a), (second, same, b) = on_workers(2, work)
    assert (first, second) == ([], [False, False, True])
    assert equal == same == [3.0] * 5, "the mean of nothing and of three steps of two"
    assert a.adoptions == b.adoptions == [(3, True, True)], "a full meeting, whatever was asked for"


def test_what_was_under_way_goes_with_the_peers() -> None:
    other = Network(2)

    def work(group: Any) -> tuple[bool, list[float], list[tuple[int, bool, bool]]]:
        owner = Owner(LocalSGD(every=1, overlap=5), group)
        owner.next_step()
        assert owner.driver.pending is not None
        owner.driver.pending.averaging.finish()  # in memory nothing breaks: it would be waited for in vain
        owner.group = MemoryGroup(group.rank, other)
        owner.driver.enter(owner.group, meet_at=2)
        assert owner.driver.pending is None
        return owner.next_step().synchronised, owner.weight.tolist(), owner.adoptions

    for met, weight, adoptions in on_workers(2, work):
        assert met
        assert weight == [3.0] * 5, "the mean of two steps of one and two of two: nothing of the first exchange"
        assert adoptions == [(2, True, True)]


def test_an_exchange_is_added_when_it_is_due_and_replaced_when_asked_sooner() -> None:
    def work(group: Any, ask: bool) -> tuple[list[float], list[tuple[int, bool, bool]]]:
        owner = Owner(LocalSGD(every=1, overlap=2), group)
        for _ in range(2):
            assert not owner.next_step().synchronised
        if ask:
            owner.driver.meet(NOW)
        else:
            assert owner.next_step().synchronised
        return owner.weight.tolist(), owner.adoptions

    for rank, (weight, adoptions) in enumerate(on_workers(2, lambda group: work(group, False))):
        assert weight == [1.5 + 2 * (1 + rank)] * 5, "the mean after one step, and two steps since"
        assert adoptions == [(3, False, False)]
    for weight, adoptions in on_workers(2, lambda group: work(group, True)):
        assert weight == [3.0] * 5
        assert adoptions == [(2, False, True)]


def test_an_average_of_gradients_is_a_meeting_if_the_peers_have_changed() -> None:
    """The workers change after all have decided to average, and before they have."""

    def work(group: Any) -> tuple[int, list[float], Report | None]:
        owner = Owner(SelSync(delta=1.0, aggregate="gradients"), group)
        with torch.no_grad():
            owner.weight += group.rank
        owner.weight.grad = torch.ones(5)
        owner.before_commit = lambda operation: owner.driver.enter(group, meet_at=0)
        report = owner.driver.average_gradients(NOW)
        return owner.step, owner.weight.tolist(), report

    for step, weight, report in on_workers(2, work):
        assert report is None
        assert step == 0, "the step is still to be made"
        assert weight == [0.5] * 5


def test_an_operation_can_be_attempted_again() -> None:
    """A first attempt, whose vote broke, leaves nothing behind but its bytes."""

    def work(group: Any) -> tuple[list[float], int, int]:
        owner = Owner(LocalSGD(every=9), group)
        owner.next_step()

        def once_for_nothing(operation: SyncOperation) -> None:
            operation.attempt(group)
            operation.drop()

        owner.before_commit = once_for_nothing
        report = owner.driver.meet(NOW)
        return owner.weight.tolist(), report.sent, owner.driver.sent

    for weight, reported, sent in on_workers(2, work):
        assert weight == [1.5] * 5
        assert reported == sent > 0
