"""What ``bench ray`` reckons with. The race itself is run by hand: it needs minutes, and Ray."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.races.ray import PAIRS, Pause, results_of
from bench.running import NewLines


def pause(stalled: float) -> Pause:
    return Pause(stalled=stalled, trained_on=0.01)


def test_each_bar_compares_ray_with_the_same_kill_of_holdfast_run() -> None:
    pauses = {whom: [(pause(0.1), pause(0.1)), (pause(0.3), pause(0.1)), (pause(0.1), pause(0.1))] for whom in PAIRS}
    pauses["node"] = [(pause(0.2), pause(0.1))]
    results, bars = results_of(pauses)
    assert [bar.ok for bar in bars.values()] == [True, True, True, False]
    assert results["ray, worker"]["of_run"] == {"median": 1.0, "low": 1.0, "high": 3.0}
    assert results["ray, worker"]["ms"]["median"] == 100.0
    assert "run, agent, beside ray's raylet" in results


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = NewLines(path)
    assert lines.read() == []
    path.write_text(json.dumps({"t": 1}) + os.linesep + '{"t"')
    assert lines.read() == [{"t": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert lines.read() == [{"t": 2}]
    assert lines.read() == []
