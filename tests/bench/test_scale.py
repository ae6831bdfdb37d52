"""Parts of ``bench scale``: its bars, and the simulated cluster."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench.races.scale import bars_of, parse_sizes
from bench.scale.real_workers import lose_workers, processor_seconds
from bench.scale.roster_cost import SimulatedCluster, measure


def test_bars_hold_for_rounds_and_not_for_telling_everybody() -> None:
    sizes = parse_sizes("4,16,64")
    rounds = {n: {"vote_messages": n.bit_length() - 1.0, "group_bytes": 1000.0} for n in sizes}
    everybody = {n: {"vote_messages": n - 1.0, "group_bytes": 50.0 * n} for n in sizes}
    assert all(bar.ok for bar in bars_of(rounds, {1_000: [0.1]}).values())
    assert not any(bar.ok for bar in bars_of(everybody, {1_000: [0.4]}).values())


def test_messages_of_a_loss_grow_as_the_workers_do() -> None:
    small, large = (SimulatedCluster(n, on_each_host=4).lose("0.1") for n in (40, 80))
    assert small.messages < large.messages <= 2.2 * small.messages
    assert large.bytes <= 2.2 * small.bytes


def test_the_first_group_costs_a_few_messages_of_each_host_and_worker() -> None:
    begins, losses = measure(40, on_each_host=4, rounds=2)
    hosts = 40 // 4
    # A worker comes, and shows its standing. A host says hello and its commit, and is told its number, the generation
    # and that it has committed.
    assert [cost.messages for cost in begins] == [2 * 40 + 6 * hosts] * 2
    assert len(losses) == 2


def test_the_processor_time_of_a_process_is_read() -> None:
    before = time.process_time()
    read = processor_seconds(os.getpid())
    assert before <= read <= time.process_time()


@pytest.mark.thorough("the same counts of simulated workers")
def test_real_workers_tell_what_the_first_group_and_a_loss_cost(tmp_path: Path) -> None:
    found = lose_workers(tmp_path / "run", workers=2, losses=1)
    assert found.forming_ms > 0
    assert found.forming_bytes > 0
    assert [loss.workers for loss in found.losses] == [2]
    assert len(found.counts) == 2
