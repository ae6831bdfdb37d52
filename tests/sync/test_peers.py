"""Peers of a process group: they exchange as a ``Group`` does, and the death of one ends the wait of the others."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import UsageError
from holdfast.sync import peers
from holdfast.sync.exchange import Averaging, Ballots
from holdfast.sync.peers import PeerLost, TorchPeers
from tests.sync.processes import on_processes


def test_averaging_and_ballots_in_a_process_group() -> None:
    def work(rank: int) -> tuple[torch.Tensor, list[list[float]]]:
        group = TorchPeers()
        ballots = Ballots(group)
        sums = []
        for step in range(20):
            ballots.cast(step, [rank + 0.1 * step])
            if step:
                sums.append(ballots.sums(step - 1))
            values = torch.randn(3_000_000, generator=torch.Generator().manual_seed(rank)) if step == 10 else None
            averaging = Averaging(group, [torch.full((1001,), float(rank)) if values is None else values])
            mean = averaging.finish()[0]
            if step == 10:
                kept = mean
        ballots.drop()
        group.close()
        dist.destroy_process_group()
        return kept, sums

    results = on_processes(3, work)
    inputs = [torch.randn(3_000_000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    wanted = inputs[0] + (inputs[1] - inputs[0]) * (1 / 3) + (inputs[2] - inputs[0]) * (1 / 3)
    for kept, sums in results:
        assert torch.equal(kept, wanted)
        assert sums == results[0][1]


def test_a_group_of_some_processes() -> None:
    def work(rank: int) -> list[float]:
        some = dist.new_group([0, 2])
        if rank == 1:
            return []
        group = TorchPeers(some)
        assert (group.rank, group.size) == (rank // 2, 2)
        mean = Averaging(group, [torch.tensor([float(rank)])]).finish()[0]
        group.close()
        return mean.tolist()

    assert on_processes(3, work) == [[1.0], [], [1.0]]


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03])
def test_a_kill_in_the_middle_ends_in_an_error(after: float) -> None:
    def work(rank: int) -> str:
        group = TorchPeers()
        values = [torch.ones(8_000_000)]
        Averaging(group, [torch.ones(100)]).finish()
        if rank == 2:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                Averaging(group, values).finish()
        except PeerLost:
            return "lost a peer"

    assert on_processes(3, work, seconds=30) == ["lost a peer", "lost a peer", None]


def test_the_end_of_one_who_sent_all_is_no_loss() -> None:
    """The first leaves while the second still waits, for longer than it is patient, for the third."""
    hears, tells = os.pipe()  # from the second to the third: its patience is over

    def work(rank: int) -> float:
        peers.PATIENCE = 0.2
        group = TorchPeers()
        if rank == 0:
            works = group.send([(1, torch.tensor([1.0]), 5)])
            group.keep(works)
            group.close()
            return 0.0
        if rank == 2:
            os.read(hears, 1)
            group.keep(group.send([(1, torch.tensor([2.0]), 5)]))
            group.close()
            return 0.0
        watch = group._watch

        def tell(peer: int) -> None:
            if peer == 2:
                os.write(tells, b".")
            watch(peer)

        group._watch = tell
        heard = torch.zeros(2, 1)
        group.finish(group.start([], [(0, heard[0], 5), (2, heard[1], 5)]))
        group.close()
        return float(heard.sum())

    assert on_processes(3, work) == [0.0, 3.0, 0.0]
    os.close(hears)
    os.close(tells)


def test_only_gloo_will_do() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        TorchPeers()

    def work(rank: int) -> str:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
        try:
            TorchPeers(dist.new_group(backend="fake"))
        except UsageError as e:
            return str(e)
        return ""

    assert "Gloo" in on_processes(1, work)[0]


def test_a_process_that_has_waited_long_ends_well(tmp_path: Path) -> None:
    """A watcher that is left in Gloo's hands when the interpreter ends would take it down."""
    script = f"""
import os, torch, torch.distributed as dist
from holdfast.sync import peers
from holdfast.sync.exchange import Averaging
peers.PATIENCE = 0.2
hears, tells = os.pipe()  # from the one that waits to the other: its patience is over
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=rank, world_size=2)
for again in range(2):
    group = peers.TorchPeers()
    if rank == again:
        os.read(hears, 1)
    else:
        watch = group._watch
        group._watch = lambda peer: os.write(tells, b".") and watch(peer)
    assert float(Averaging(group, [torch.tensor([float(rank)])]).finish()[0]) == 0.5
    assert bool(group._watchers) == (rank != again)
    group.close()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
