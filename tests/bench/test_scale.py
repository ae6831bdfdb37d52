"""Parts of ``bench scale``: its bars, and the simulated cluster."""

from __future__ import annotations

from bench.races.scale import bars_of, parse_sizes
from bench.scale.roster_cost import SimulatedCluster


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
