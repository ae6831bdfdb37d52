"""Where holdfast's own recovery time is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError, UsageError
from holdfast.simulate import recovery_time as recovery


def written(path: Path, median: float) -> None:
    row = {"beyond_redone_step_ms": {"median": median, "low": median - 1, "high": median + 1}}
    path.write_text(json.dumps({"results": {"holdfast-exact": row}}))


def nothing(text: str) -> None:
    raise AssertionError(text)


def test_the_bench_comes_first(tmp_path: Path) -> None:
    written(tmp_path / "recovery.json", 36.2)
    written(tmp_path / "simulate-recovery.json", 50.0)
    found = recovery.measured(nothing, bench=tmp_path)
    assert found.seconds == pytest.approx(0.0362)
    assert "36 ms (35 to 37)" in found.source
    assert "by python -m bench recovery on 2" in found.source


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0.130, 0.1), (0.120, 0.1), (0.150, 0.1)])
    monkeypatch.setattr(recovery, "kill_one", lambda folder, workers, seed: next(times))
    said: list[str] = []
    first = recovery.measured(said.append, bench=tmp_path / "bench")
    assert first.seconds == pytest.approx(0.03)
    assert len(said) == 4
    assert "3 workers" in first.source
    assert recovery.measured(nothing, bench=tmp_path / "bench") == first


def test_another_benchs_file_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recovery.json").write_text("[]")

    def fails(folder: Path, workers: int, seed: int) -> tuple[float, float]:
        raise HoldfastError("no step for 120 s after the kill")

    monkeypatch.setattr(recovery, "kill_one", fails)
    with pytest.raises(HoldfastError, match="--recovery-ms"):
        recovery.measured(lambda text: None, bench=tmp_path)


def test_noise_is_not_negative_time(tmp_path: Path) -> None:
    written(tmp_path / "recovery.json", -3.0)
    found = recovery.measured(nothing, bench=tmp_path)
    assert found.seconds == 0
    assert found.source.startswith("0 ms (median -3, -4 to -2) beyond")


def test_only_what_is_known_of_the_workers_is_said(tmp_path: Path) -> None:
    written(tmp_path / "recovery.json", 36.0)
    assert "a few workers with a small model" in recovery.measured(nothing, bench=tmp_path).source
    document = json.loads((tmp_path / "recovery.json").read_text())
    (tmp_path / "recovery.json").write_text(json.dumps({**document, "workers": 5}))
    assert ": 5 workers with a small model" in recovery.measured(nothing, bench=tmp_path).source


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "kill_one", nothing)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written .*--recovery-ms"):
        recovery.measured(nothing, bench=tmp_path / "file" / "bench")
