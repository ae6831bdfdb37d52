"""Averages and ballots in the ``Group`` of a run, among real processes: nobody waits for a send, nor for the dead."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.cluster.group import Group
from holdfast.cluster.links.hub import Hub
from holdfast.cluster.links.member_links import LinkSettings
from holdfast.cluster.membership import Generation, Member
from holdfast.errors import Broken
from holdfast.sync.exchange import Averaging, Ballots
from tests.sync.processes import on_processes


def group_of(rank: int, size: int) -> Group:
    """The group of this process with the others, who find each other by the store of the test's own process group."""
    store: Any = dist.distributed_c10d._get_default_store()
    hub = Hub("127.0.0.1", LinkSettings(token="a token of sixteen characters", heartbeat=5.0))
    store.set(f"port of {rank}", str(hub.port))
    ports = [int(store.get(f"port of {other}")) for other in range(size)]
    members = tuple(Member(worker=str(n), address="127.0.0.1", port=port) for n, port in enumerate(ports))
    generation = Generation(number=1, members=members)
    return Group(generation, rank, hub.links(generation, str(rank)))


def values(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def test_averages_beside_ballots_without_a_vote_between() -> None:
    def work(rank: int) -> list[torch.Tensor]:
        group = group_of(rank, 3)
        ballots, means = Ballots(group), []
        for step in range(12):
            averaging = Averaging(group, [values(rank + 10 * step, 400_000)], beside=step % 2 == 0)
            ballots.cast(step, [1.0])
            if step:
                assert ballots.sums(step - 1) == [3.0]
            means.append(averaging.finish()[0][::1000].clone())
        ballots.drop()
        group.vote(torch.zeros(1))
        assert len(group._sent) == 2, "what was sent before the vote has arrived"
        return means

    results = on_processes(3, work)
    for step, mean in enumerate(results[0]):
        first, *others = [values(rank + 10 * step, 400_000)[::1000] for rank in range(3)]
        wanted = first.clone()
        for other in others:
            wanted = wanted + (other - first) * (1 / 3)
        assert torch.equal(mean, wanted)
        assert torch.equal(results[1][step], mean)
        assert torch.equal(results[2][step], mean)


@pytest.mark.parametrize("after", [0.0, 0.02])
@pytest.mark.parametrize("beside", [True, False])
def test_a_kill_in_the_middle_breaks_the_exchange_of_the_others(after: float, beside: bool) -> None:
    def work(rank: int) -> str:
        group = group_of(rank, 3)
        ballots = Ballots(group)
        Averaging(group, [torch.ones(10)]).finish()
        if rank == 1:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        threading.Timer(3.0, group.abort, ("the coordinator says so",)).start()
        averaging = None
        try:
            for step in range(10_000):
                averaging = Averaging(group, [torch.ones(4_000_000)], beside=beside)
                ballots.cast(step, [1.0])
                averaging.finish()
                ballots.sums(step)
        except Broken:
            if averaging is not None:
                averaging.abandon()
            ballots.abandon()
            return "broken"
        return "went on"

    assert on_processes(3, work, seconds=40) == ["broken", None, "broken"]
