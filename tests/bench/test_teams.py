"""``bench teams``: its bars, and that it is a command whose contestants are there."""

from __future__ import annotations

import importlib.util

from typer.testing import CliRunner

from bench.__main__ import app
from bench.races import teams


def test_bars_compare_with_torchft_in_the_same_rounds() -> None:
    speeds = {"holdfast": [10.0, 30.0, 11.0], "torchft": [10.0, 20.0, 10.0], "plain HSDP": [12.0, 24.0, 12.0]}
    kills = {"holdfast": [400.0, 400.0], "torchft": [5000.0, 5000.0], "torchft, tuned": [700.0, 700.0]}
    results, bars = teams.results_of(speeds, kills)
    assert results["holdfast"]["of_torchft"] == {"median": 1.1, "low": 1.0, "high": 1.5}
    assert set(results["plain HSDP"]) == {"samples_per_s", "of_torchft"}
    assert [bar.ok for bar in bars.values()] == [True, False]


def test_the_command_takes_rounds_and_kills_and_finds_its_contestants() -> None:
    said = CliRunner().invoke(app, ["teams", "--help"], env={"TERM": "dumb", "COLUMNS": "120"})
    assert said.exit_code == 0
    assert all(option in said.output for option in ("--rounds", "--kills", "--burst"))
    for module in ("bench.data_parallel.teams_entry", "bench.peers.torchft_fsdp", "bench.peers.hsdp"):
        assert importlib.util.find_spec(module) is not None
