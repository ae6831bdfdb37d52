"""Rows from turns, and the limits that they are compared with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.measuring import write_direct
from holdfast.study import limits, turns
from holdfast.study.adapters.base import SaveFormat
from holdfast.study.cost_rows import cost_rows, format_rows, limit_rows
from holdfast.study.inside import file_control
from holdfast.study.models import StudyModel
from holdfast.study.process import Failed
from holdfast.study.turns import FormatRounds, Turns
from tests.study.conftest import Fork, Start

MODEL = StudyModel(name="tiny", shapes=[("w", (100, 50)), ("b", (100,))])
SAVE = {"stall_s": 0.2, "called_s": 0.2, "durable_s": 0.5, "fsync_s": 0.3, "unwritten": 39_000}
SAVE |= {"bytes": 40_900, "files": 1, "serialise_s": 0.15}
LOAD = {"cold_s": 0.4, "warm_s": 0.1, "same": True}
BESIDE = {"stall_s": 0.5, "lost_s": 0.6, "step_s": 0.01, "steps": 3}
LIMIT = {"raw disk": 0.25, "raw read": 0.1, "raw buffered": 0.4, "memory copy": 0.01}


def made(**given: Any) -> Turns:
    record = FormatRounds(framework="pytorch", form=SaveFormat(name="torch.save", suffix=".pt"), **given)
    return Turns(model=MODEL, records=[record], limits=[LIMIT, {**LIMIT, "raw disk": 0.5}])


def test_a_row_compares_within_the_round() -> None:
    found = made(saves=[SAVE, {**SAVE, "durable_s": 2.0}], loads=[LOAD] * 2, besides=[BESIDE] * 2, peak=2_000_000)
    (row,) = cost_rows(found)
    assert row["id"] == "cost/tiny/pytorch/torch.save"
    assert row["of_raw"] == {"median": 3.0, "low": 2.0, "high": 4.0}, "0.5 by 0.25, and 2 by 0.5"
    assert row["parts"] == {"serialise": 0.15, "write": 0.05, "fsync": 0.3}
    assert not row["durable_on_return"], "nearly all of it was still the kernel's"
    assert row["lost_s"]["median"] == 0.6
    assert row["peak_mb"]["median"] == 2.0
    (row,) = format_rows(found)
    assert row["of_raw_bytes"] == pytest.approx(40_900 / (8 * 5100), abs=1e-4)


def test_a_format_that_failed_is_a_row_with_its_words() -> None:
    (row,) = cost_rows(made(error="ValueError: no"))
    assert row["error"] == "ValueError: no"
    assert "stall_s" not in row


def test_what_the_kernel_does_not_tell_is_not_made_up() -> None:
    save = {**SAVE, "serialise_s": None, "unwritten": None}
    (row,) = cost_rows(made(saves=[save] * 2, loads=[LOAD] * 2, besides=[BESIDE] * 2))
    assert row["peak_mb"] is None
    assert row["parts"] is None
    assert row["durable_on_return"] is None


def test_limits_have_rows() -> None:
    rows = {row["name"]: row for row in limit_rows(made())}
    assert rows["raw disk"]["seconds"]["median"] == 0.375
    assert rows["raw disk"]["id"] == "limits/tiny/raw disk"


@pytest.mark.parametrize("size", [1, 5000, (20 << 20) + 3])
def test_the_limits_write_and_copy_what_they_say(tmp_path: Path, size: int) -> None:
    write_direct(tmp_path, size)
    assert size <= (tmp_path / "raw").stat().st_size < size + 4096
    (tmp_path / "raw").unlink()
    limits.write_buffered(tmp_path, size)
    assert (tmp_path / "raw").stat().st_size == size
    copy = limits.Copy(size)
    copy._from[:] = 9
    copy()
    assert np.all(copy._to == 9)


class FakeProcesses:
    """Answers at once; ``broken`` formats fail as told."""

    def __init__(self, broken: dict[str, Any]) -> None:
        self.broken, self.asked = broken, []

    def model(self, shapes: Any, **_: Any) -> None:
        pass

    def ask(self, framework: str, op: str, *, form: str, **_: Any) -> dict[str, Any]:
        self.asked.append((op, form))
        if isinstance(self.broken.get(form), str):
            raise Failed(self.broken[form])
        return {"save": SAVE, "load": {**LOAD, **self.broken.get(form, {})}, "beside": BESIDE}[op]


def take(team: Any, tmp_path: Path, **given: Any) -> Turns:
    formats = {"pytorch": [SaveFormat(name="a"), SaveFormat(name="b")]}
    settings = {"rounds": 3, "seed": 0, "training": True, **given}
    return turns.take(team, MODEL, formats=formats, folder=tmp_path, say=lambda _: None, **settings)


def test_every_format_and_limit_has_one_turn_a_round(tmp_path: Path) -> None:
    team = FakeProcesses({})
    found = take(team, tmp_path)
    assert len(found.limits) == 3
    assert [len(record.besides) for record in found.records] == [3, 3]
    assert team.asked.count(("save", "a")) == 4, "one to warm up"
    firsts = [[form for op, form in team.asked if op == "beside"][2 * n] for n in range(3)]
    assert set(firsts) == {"a", "b"}, "the order is random"


def test_a_load_that_gives_something_else_is_an_error(tmp_path: Path) -> None:
    found = take(FakeProcesses({"a": {"same": False}}), tmp_path)
    assert "not what had been saved" in found.records[0].error
    assert not found.records[1].error


def test_a_format_that_fails_has_no_more_turns(tmp_path: Path) -> None:
    team = FakeProcesses({"b": "OSError: full"})
    found = take(team, tmp_path, training=False)
    assert found.records[1].error == "OSError: full"
    assert team.asked.count(("save", "b")) == 1
    assert len(found.records[0].saves) == 3


def test_a_copy_beside_the_training_is_seen_in_the_memory_of_a_first_save(fork: Fork, tmp_path: Path) -> None:
    """A second save finds that memory there: DCP's, of 74 MB, looked as if it took none."""
    model = StudyModel(name="wide", shapes=[("w", (1024, 4096))])
    formats = {"holdfast": [SaveFormat(name="holdfast async", background=True)]}
    given = {"formats": formats, "folder": tmp_path, "rounds": 0, "seed": 0, "say": lambda _: None}
    found = turns.take(FakeProcesses({}), model, forks={"holdfast": fork("holdfast")}, **given)  # type: ignore[arg-type]
    assert found.records[0].peak == pytest.approx(model.nbytes, rel=0.3)


def test_what_cannot_be_written_to_memory_costs_a_column_not_the_row(start: Start, tmp_path: Path) -> None:
    process = start("pytorch")
    process.ask("make", shapes=MODEL.shapes, seed=0)
    file_control.memory_of(process.pid).mkdir()  # it cannot make its own then
    try:
        saved = process.ask("save", form="safetensors", folder=str(tmp_path / "save"), memory=True)
    finally:
        shutil.rmtree(file_control.memory_of(process.pid), ignore_errors=True)
    assert saved["serialise_s"] is None
    assert saved["bytes"] > MODEL.nbytes


def test_the_kernel_tells_what_is_not_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    if (before := file_control.unwritten(tmp_path)) is None:
        pytest.skip("this kernel has no cachestat")
    assert before == 1 << 20
    file_control.sync_files(tmp_path)
    assert file_control.unwritten(tmp_path) == 0
