"""A policy around a hand-written loop: the same numbers as the loop it stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.sync.diloco import DiLoCo
from holdfast.sync.loop import Loop
from holdfast.sync.periodic import FedAvg, LocalSGD
from holdfast.sync.policy import Context, Policy
from holdfast.sync.selsync import SelSync
from holdfast.sync.ssp import SSP
from tests.engine.memory_group import on_workers
from tests.sync.training import WORKERS, Trained, Weights, by_hand, loss_of, make, mean, same, sgd, train, weights


def test_no_threshold_is_every_step_bit_for_bit() -> None:
    wanted = by_hand(8, lambda step: True, gradients=True)
    for rank, seen in enumerate(train(SelSync(delta=0), 8)):
        assert all(same(a, b) for a, b in zip(seen.weights, wanted[rank], strict=True))
        assert all(report.synchronised for report in seen.reports)
        assert seen.loop.totals.lssr == 0


def test_an_infinite_threshold_is_local_training_until_the_end() -> None:
    wanted = by_hand(8, lambda step: False)
    trained = train(SelSync(delta=math.inf), 8)
    for rank, seen in enumerate(trained):
        assert all(same(a, b) for a, b in zip(seen.weights, wanted[rank], strict=True))
        assert not any(report.synchronised for report in seen.reports)
        assert same(seen.end, [mean(list(copies)) for copies in zip(*(w[-1] for w in wanted), strict=True)])
    assert not same(trained[0].weights[-1], trained[1].weights[-1]), "a control"


def test_averages_every_few_steps_are_those_by_hand() -> None:
    wanted = by_hand(8, lambda step: step % 3 == 2)
    for rank, seen in enumerate(train(LocalSGD(every=3), 8)):
        assert all(same(a, b) for a, b in zip(seen.weights, wanted[rank], strict=True))
        assert [report.synchronised for report in seen.reports] == [False, False, True] * 2 + [False] * 2
        assert seen.loop.totals.synchronised == 3  # and the end
        assert seen.reports[2].distance == pytest.approx(spread(by_hand(3, lambda step: False)))
        assert seen.loop.totals.distance == pytest.approx(spread(wanted)), "that of the end"


def spread(replicas: list[list[Weights]]) -> float:
    """How far replicas are from their mean after the last step: the root of the mean square."""
    last = [replica[-1] for replica in replicas]
    middle = [mean(list(copies)) for copies in zip(*last, strict=True)]
    squares = [float((mine - m).double().square().sum()) for own in last for mine, m in zip(own, middle, strict=True)]
    return math.sqrt(sum(squares) / len(last))


def test_warmup_is_together() -> None:
    together = by_hand(4, lambda step: True, gradients=True)
    trained = train(LocalSGD(every=2, warmup=4), 8)
    for rank, seen in enumerate(trained):
        assert all(same(a, b) for a, b in zip(seen.weights[:4], together[rank], strict=True))
        assert [report.synchronised for report in seen.reports] == [True] * 4 + [False, True, False, True]


def test_gradients_accumulate_over_several_passes() -> None:
    def work(group: Any) -> Weights:
        model = make()
        optimizer = sgd(model)
        with Loop(SelSync(delta=0), model, optimizer, group, Context()):
            for step in range(3):
                optimizer.zero_grad()
                for part in range(2):
                    loss_of(model, group.rank, 2 * step + part).backward()
                optimizer.step()
        return weights(model)

    models = [make() for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for step in range(3):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            for part in range(2):
                loss_of(model, rank, 2 * step + part).backward()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            a.grad = mean([a.grad, b.grad])
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    results = on_workers(2, work)
    assert same(results[0], weights(models[0]))
    assert same(results[1], weights(models[0]))


@pytest.mark.parametrize(
    "policy",
    [
        SelSync(delta=0.05),
        SelSync(target=0.4),
        SelSync(target=0.4, signal="replica-variance"),
        SelSync(target=0.25, overlap=2),
        LocalSGD(every=4, optimizer_state="average"),
        LocalSGD(every=4, optimizer_state="reset"),
        FedAvg(fraction=0.5, every=3),
        DiLoCo(every=4),
        SSP(staleness=2),
    ],
    ids=lambda policy: repr(policy)[:60],
)
@pytest.mark.parametrize("optimizer", [sgd, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)])
def test_replicas_decide_alike_and_end_equal(policy: Policy, optimizer: Any) -> None:
    trained = train(policy, 14, optimizer)
    decisions = [[report.synchronised for report in seen.reports] for seen in trained]
    assert decisions[0] == decisions[1] == decisions[2]
    assert all(same(seen.end, trained[0].end) for seen in trained)
    assert all(w.isfinite().all() for w in trained[0].end)
    if not policy.overlap:
        for step, met in enumerate(decisions[0]):
            assert same(trained[0].weights[step], trained[1].weights[step]) == met


def test_overlapped_averages_are_those_by_hand() -> None:
    """After step 3 a snapshot is taken; what was found is added after step 5."""
    models = [make() for _ in range(WORKERS)]
    optimizers = [sgd(model) for model in models]
    snapshot: list[Weights] = []
    for step in range(5):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            loss_of(model, rank, step).backward()
            optimizers[rank].step()
        if step == 2:
            snapshot = [weights(model) for model in models]
    means = [mean(list(copies)) for copies in zip(*snapshot, strict=True)]
    trained = train(LocalSGD(every=3, overlap=2), 5)
    for rank, seen in enumerate(trained):
        wanted = [
            p.detach() + (m - s) for p, m, s in zip(models[rank].parameters(), means, snapshot[rank], strict=True)
        ]
        assert same(seen.weights[4], wanted)
        assert [report.synchronised for report in seen.reports] == [False, False, False, False, True]


def test_averaged_gradients_leave_replicas_apart_and_averaged_parameters_do_not() -> None:
    def spread(trained: list[Trained], step: int) -> float:
        return sum(float((a - b).abs().sum()) for a, b in zip(*(t.weights[step] for t in trained[:2]), strict=True))

    by_parameters = train(SelSync(delta=1000.0, max_local_steps=4), 24)
    by_gradients = train(SelSync(delta=1000.0, max_local_steps=4, aggregate="gradients"), 24)
    assert [r.synchronised for r in by_gradients[0].reports] == [r.synchronised for r in by_parameters[0].reports]
    assert by_parameters[0].reports[3].synchronised
    assert spread(by_parameters, 3) == 0 == spread(by_parameters, 23)
    assert spread(by_gradients, 3) > 0
    assert spread(by_gradients, 23) > spread(by_gradients, 3)


def test_an_average_that_is_asked_for() -> None:
    def work(group: Any) -> list[Weights]:
        model = make()
        optimizer = sgd(model)
        seen = []
        with Loop(LocalSGD(every=100, overlap=1), model, optimizer, group, Context()) as loop:
            for step in range(4):
                loss_of(model, group.rank, step).backward()
                optimizer.step()
                if step == 1:
                    assert loop.average().reason == "asked for"
                    seen.append(weights(model))
        assert loop.totals.steps == 4
        assert loop.totals.synchronised == 2
        assert loop.last.reason == "the end"
        return [*seen, weights(model)]

    results = on_workers(2, work)
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_clipping_comes_after_the_policy_has_seen_gradients() -> None:
    def work(group: Any, ours: bool) -> tuple[float, float]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with Loop(SelSync(delta=1e9), model, optimizer, group, Context()) as loop:
            for step in range(3):
                optimizer.zero_grad()
                (loss_of(model, group.rank, step) * 10**step).backward()
                before = weights(model)
                loop.clip(0.01) if ours else nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
            moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(before, weights(model), strict=True)))
            return loop.last.signal or 0.0, moved

    (signal, moved), _ = on_workers(2, lambda group: work(group, True))
    (clipped, _), _ = on_workers(2, lambda group: work(group, False))
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert signal > 1
    assert clipped < 0.01, "a control: clipped gradients all look alike"
