"""Ranks that save at once: made-up rounds, real ones, and ranks that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.study import scale_axis
from holdfast.study.adapters.base import EVERY_RANK, RANK_ZERO
from holdfast.study.models import Shape
from holdfast.study.process import Start
from holdfast.study.scale_axis import Crew, ScaleCase, rows_of
from tests.study.conftest import Fork, starting
from tests.study.fakes import fake

SHAPES: list[Shape] = [(f"layer{number}.weight", (256, 1024)) for number in range(4)]
STATE = 2 * 4 * 4 * 256 * 1024  # 8 MB

BROKEN = """
def answer(op, given):
    if op == "save_ranked":
        if given["strategy"] == "broken" and given["rank"] == 1:
            raise RuntimeError("the disk is full")
        if given["strategy"] == "broken" and given["ranks"] == 2:
            time.sleep(100)
        with open(f"{given['folder']}/{given['rank']}", "wb") as file:
            file.write(bytes(1000))
        return {"seconds": 1.0 + given["rank"], "written": 1000}
    return {}
"""


def test_one_copy_is_what_one_rank_leaves() -> None:
    one = ScaleCase(strategy="x", ranks=1, seconds=[[1.0]], written=[[900]], on_disk=[900])
    two = ScaleCase(
        strategy="x", ranks=2, seconds=[[1.0, 2.0], [5.0, 3.0]], written=[[900, 0]] * 2, on_disk=[1800, 1800]
    )
    row = rows_of("jax", [one, two], state=1000)[1]
    assert row["duplicated"] == 900, "compressed to 900 bytes, and there twice"
    assert row["slowest_s"] == {"median": 3.5, "low": 2.0, "high": 5.0}
    assert row["fastest_s"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert row["written_by_rank"] == [900, 0]
    assert rows_of("jax", [two], state=1000)[0]["duplicated"] == 800, "nobody knows what one rank leaves"


def test_a_case_that_failed_has_no_numbers() -> None:
    [row] = rows_of("jax", [ScaleCase(strategy="x", ranks=2, error="no")], state=1000)
    assert row["error"] == "no"
    assert "on_disk" not in row


def measured(
    monkeypatch: pytest.MonkeyPatch, folder: Path, start: Start, strategies: list[str], framework: str = "pytorch"
) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(scale_axis, "RANKS", (1, 2))
    given = {"folder": folder / "x", "logs": folder, "shapes": SHAPES, "rounds": 2, "seed": 0, "say": lambda _: None}
    rows = scale_axis.measure(framework, start, strategies, **given)  # type: ignore[arg-type]
    return {row["id"].partition("/")[2]: row for row in rows}


def test_dcp_shares_the_writing_and_files_of_their_own_double_it(
    fork: Fork, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = measured(monkeypatch, tmp_path, fork("pytorch"), [RANK_ZERO, EVERY_RANK, "DCP"])
    assert len(rows) == 6
    for row in rows.values():
        assert "error" not in row, row
        assert row["state_bytes"] == STATE
        assert sum(row["written_by_rank"]) == pytest.approx(row["on_disk"], rel=0.05), "the kernel's count, the files'"
        assert 0 < row["fastest_s"]["median"] <= row["slowest_s"]["median"]
    alone, own, dcp = (rows[f"pytorch/{strategy}/2"] for strategy in (RANK_ZERO, EVERY_RANK, "DCP"))
    assert (alone["duplicated"], dcp["duplicated"]) == (0, 0)
    assert own["duplicated"] == pytest.approx(STATE, rel=0.02)
    assert own["on_disk"] == pytest.approx(2 * STATE, rel=0.02)
    assert alone["written_by_rank"] == [pytest.approx(STATE, rel=0.02), pytest.approx(0, abs=1000)]
    assert dcp["written_by_rank"] == [pytest.approx(STATE / 2, rel=0.1)] * 2
    assert not (tmp_path / "x" / "ranks").exists()


def test_the_replicas_of_holdfast_share_the_writing(
    fork: Fork, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = measured(monkeypatch, tmp_path, fork("holdfast"), ["holdfast"], "holdfast")["holdfast/holdfast/2"]
    assert row["duplicated"] == 0
    assert row["written_by_rank"] == [pytest.approx(STATE / 2, rel=0.1)] * 2


def test_a_rank_that_fails_is_a_row_and_the_others_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = measured(monkeypatch, tmp_path, starting("pytorch", fake(tmp_path / "python", BROKEN)), ["broken", "whole"])
    assert rows["pytorch/broken/2"]["error"] == "the disk is full", "its own words, not that another one hangs"
    assert rows["pytorch/whole/2"]["slowest_s"]["median"] == 2.0
    assert rows["pytorch/whole/2"]["duplicated"] == 1000


def test_all_ranks_of_a_failed_save_are_new_ones(tmp_path: Path) -> None:
    start, logs = starting("pytorch", fake(tmp_path / "python", BROKEN)), [tmp_path / "0.log", tmp_path / "1.log"]
    with Crew(start, logs, SHAPES) as crew:
        crew.save("whole", 2, tmp_path)
        before = [process.pid for process in crew._processes]
        with pytest.raises(scale_axis.Failed):
            crew.save("broken", 2, tmp_path)
        crew.save("whole", 2, tmp_path)
        assert not {process.pid for process in crew._processes} & set(before)
