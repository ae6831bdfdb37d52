"""``bench log``, small: what it says of bytes, CPU time and speed can be false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.pipelines.entries import PipelineShape
from bench.race_report import Bar
from bench.races import log
from bench.running import cpu_of_turns
from holdfast.errors import HoldfastError

# A record has 16 kB: beside it, what describes a tensor is little.
SMALL = PipelineShape(model="gpt", layers=4, width=64, seq=32, micro_batch=2, micro_batches=4)


@pytest.mark.thorough("its parts are tested below, on what a run leaves behind")
def test_a_small_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both logs have the bytes that the plan says, one in memory and one on disk; turns and CPU time are counted."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    results, bars = log.race(rounds=2, say=said.append, sizes=log.LogSizes(shape=SMALL, stages=(2,), burst=2))
    rows = [results[f"2 stages: {name}"] for name in (log.NONE, log.MEMORY, log.DISK)]
    assert all(row["step_ms"]["median"] > 0 and row["cpu_ms"]["median"] > 0 for row in rows)
    assert "of_none" not in rows[0]
    for name, row in zip((log.MEMORY, log.DISK), rows[1:], strict=True):
        assert row["predicted_bytes"] == 4 * 2 * SMALL.micro_batch * SMALL.seq * SMALL.width * SMALL.micro_batches
        assert bars[f"2 stages: {name}, bytes beside the predicted"].ok
        assert bars[f"2 stages: {name}, never given up"].ok
        assert f"2 stages: {name}, speed" in bars
    assert rows[1]["bytes"].endswith("; 0%")
    assert rows[2]["bytes"].endswith("; 100%")
    assert any("round 2/2" in text for text in said)


def run_folder(folder: Path, held: dict[str, list[int]], *, predicted: int, useless: int = 0) -> Path:
    """What a run leaves behind; ``useless``: the step after which its logs were given up."""
    (folder / "logs").mkdir(parents=True)
    event = {"event": "logging", "bytes_per_step": predicted}
    (folder / "logs" / "events.jsonl").write_text(json.dumps(event) + "\n")
    for worker, sizes in held.items():
        lines = [
            {"step": step, "bytes": size, "spilled": size // 2, "usable": step != useless}
            for step, size in enumerate(sizes, 1)
        ]
        (folder / f"progress.jsonl.log-{worker}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bars_of(kept: log.KeptBytes, speed: float = 1.0) -> dict[str, Bar]:
    return log._bars("a log", {log.NONE: [1.0, 1.0], "a log": [1 / speed, 1 / speed]}, kept)


def test_what_was_kept_is_read_and_judged(tmp_path: Path) -> None:
    held = {"0.0": [0, 100, 0, 100, 0], "0.1": [0, 50, 0, 50, 0]}  # a checkpoint after every other step
    kept = log.KeptBytes.read(run_folder(tmp_path / "good", held, predicted=149), burst=2)
    assert (kept.measured, kept.spilled, kept.usable) == (150.0, 0.5, True)
    assert all(bar.ok for bar in bars_of(kept).values())
    # Each can fail:
    wrong = log.KeptBytes.read(run_folder(tmp_path / "wrong", held, predicted=140), burst=2)
    assert [name for name, bar in bars_of(wrong).items() if not bar.ok] == ["a log, bytes beside the predicted"]
    given_up = log.KeptBytes.read(run_folder(tmp_path / "up", held, predicted=149, useless=3), burst=2)
    assert [name for name, bar in bars_of(given_up).items() if not bar.ok] == ["a log, never given up"]
    assert [name for name, bar in bars_of(kept, speed=0.96).items() if not bar.ok] == ["a log, speed"]


def test_a_plan_without_a_profile_predicts_nothing(tmp_path: Path) -> None:
    kept = log.KeptBytes.read(run_folder(tmp_path / "run", {"0.0": [1, 2]}, predicted=0), burst=2)
    assert not bars_of(kept)["a log, bytes beside the predicted"].ok
    with pytest.raises(HoldfastError, match="nothing was logged"):
        log.KeptBytes.read(run_folder(tmp_path / "none", {}, predicted=5), burst=2)


def test_cpu_time_is_of_all_workers_and_of_whole_turns() -> None:
    def worker(pid: int, *marks: tuple[str, int, float]) -> list[dict[str, Any]]:
        return [{"pid": pid, kind: number, "cpu": cpu} for kind, number, cpu in marks]

    one = worker(
        1, ("go", 0, 1.0), ("step", 1, 2.0), ("step", 2, 3.0), ("go", 2, 9.0), ("step", 3, 9.5), ("step", 4, 10.0)
    )
    two = worker(
        2, ("go", 0, 0.0), ("step", 1, 2.0), ("step", 2, 4.0), ("go", 2, 4.0), ("step", 3, 4.5), ("step", 4, 5.0)
    )
    assert cpu_of_turns([*one, *two], 2) == [3.0, 1.0]  # what is spent between two turns is not a step's
    waiting = worker(1, ("go", 4, 10.0))
    assert cpu_of_turns([*one, *two, *waiting], 2) == [3.0, 1.0]
