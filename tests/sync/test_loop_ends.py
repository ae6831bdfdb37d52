"""A policy around a hand-written loop: clean ways in and out, with real processes too."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from holdfast.errors import UsageError
from holdfast.sync import peers
from holdfast.sync.loop_training import LoopTraining, around, check
from holdfast.sync.peers import PeerLost
from holdfast.sync.periodic import LocalSGD
from holdfast.sync.policy import Context, Policy
from holdfast.sync.selsync import SelSync
from holdfast.sync.ssp import SSP
from tests.engine.memory_group import on_workers
from tests.sync.processes import on_processes
from tests.sync.training import loss_of, make, same, sgd, weights


def test_everything_begins_as_the_first_replica() -> None:
    def work(group: Any) -> list[Any]:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        nn.init.constant_(model[0].weight, float(group.rank + 1))
        model[0].bias.requires_grad_(False).fill_(group.rank)
        model[1].num_batches_tracked.fill_(group.rank + 7)
        with LoopTraining(LocalSGD(every=2), model, sgd(model), group, Context()):
            pass
        return [t.tolist() for t in model.state_dict().values()]

    results = on_workers(3, work)
    assert results[1] == results[0]
    assert results[2] == results[0]
    assert results[0][0] == [[1.0, 1.0], [1.0, 1.0]]


def test_hooks_go_with_the_loop_and_an_error_goes_through() -> None:
    def work(group: Any) -> None:
        model = make()
        optimizer = sgd(model)
        with (
            pytest.raises(ZeroDivisionError),
            LoopTraining(SelSync(delta=0), model, optimizer, group, Context()) as loop,
        ):
            raise ZeroDivisionError
        loss_of(model, 0, 0).backward()
        optimizer.step()
        assert loop.step == 0
        assert group.network.bytes == 0

    on_workers(1, work)


def test_bad_calls_are_refused() -> None:
    model = make()
    with pytest.raises(UsageError):
        check(model, sgd(make()))
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        check(nn.Sequential(nn.SyncBatchNorm(3)), sgd(model))
    with pytest.raises(UsageError, match="init_process_group"):
        SelSync(delta=0).around(model, sgd(model))

    def work(group: Any) -> None:
        optimizer = sgd(model)
        loop = LoopTraining(SelSync(delta=0), model, optimizer, group, Context())
        with loop, pytest.raises(UsageError, match="closure"):
            optimizer.step(lambda: 0.0)

    on_workers(1, work)


# --- with real processes --------------------------------------------------------------------------


def test_around_a_loop_in_processes() -> None:
    def work(rank: int) -> list[Any]:
        model = make(rank)
        try:
            around(SelSync(delta=0), nn.parallel.DistributedDataParallel(make()), sgd(model))
        except UsageError as e:
            refused = type(e).__name__
        optimizer = sgd(model)
        with SelSync(target=0.4, max_local_steps=10).around(model, optimizer, seed=3) as loop:
            for step in range(30):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        return [weights(model), loop.totals.synchronised, loop.totals.sent, refused]

    a, b, c = on_processes(3, work)
    assert same(a[0], b[0])
    assert same(a[0], c[0])
    assert a[1] == b[1] == c[1] > 3
    assert a[2] > 0
    assert a[3] == "UsageError"


@pytest.mark.parametrize(
    "policy", [LocalSGD(every=2), SelSync(target=0.5), SSP(staleness=1)], ids=["local", "sel", "ssp"]
)
def test_a_kill_in_the_middle_ends_the_loops_of_the_others(policy: Policy) -> None:
    def work(rank: int) -> str:
        model = make(rank)
        optimizer = sgd(model)
        try:
            with policy.around(model, optimizer):
                for step in range(10_000):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                    if rank == 1 and step == 20:
                        os.kill(os.getpid(), signal.SIGKILL)
        except PeerLost:
            return "lost a peer"
        return "went on"

    assert on_processes(3, work, seconds=40) == ["lost a peer", None, "lost a peer"]


def test_an_error_of_one_ends_the_loops_of_the_others() -> None:
    """The process lives on until all have noticed, and with it its connections."""

    def work(rank: int) -> str:
        peers.PATIENCE = 0.1
        store = dist.distributed_c10d._get_default_store()
        model = make(rank)
        optimizer = sgd(model)
        try:
            with LocalSGD(every=2).around(model, optimizer):
                for step in range(10):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                    if rank == 1 and step == 4:
                        raise ZeroDivisionError
        except (PeerLost, ZeroDivisionError) as e:
            store.set(f"rank {rank} is out", "")
            store.wait([f"rank {other} is out" for other in range(3)])
            return type(e).__name__
        return "went on"

    assert on_processes(3, work, seconds=30) == ["PeerLost", "ZeroDivisionError", "PeerLost"]


def test_a_second_loop_needs_a_group_of_its_own() -> None:
    """Each would hear the other's last words, and wait for ever."""

    def work(rank: int) -> list[bool]:
        first, second = make(rank), make(rank)
        one, two = sgd(first), sgd(second)
        more = dist.new_group(backend="gloo")
        with LocalSGD(every=2).around(first, one), LocalSGD(every=3).around(second, two, group=more):
            with pytest.raises(UsageError, match="new_group"):
                LocalSGD(every=3).around(second, two)
            for step in range(4):
                for model, optimizer in ((first, one), (second, two)):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
        return [bool(weight.isfinite().all()) for model in (first, second) for weight in weights(model)]

    assert all(all(fine) for fine in on_processes(2, work, seconds=30))
