"""The newest sound checkpoint, and the error for none at all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoint import CheckpointError, NoCheckpoint, index, latest, load, save, series
from tests.checkpoint.cases import data_of, rewrite, saved


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    (tmp_path / "notes.txt").write_text("mine")
    assert latest(str(tmp_path)) is None


def test_the_newest_by_step(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(series.folder_of(tmp_path, step), {"step": step})
    newest = latest(tmp_path)
    assert newest == series.folder_of(tmp_path, 100)
    assert load(newest, {"step": 0})["step"] == 100
    assert latest(newest) == newest, "a checkpoint is its own latest"


@pytest.mark.parametrize("damage", ["no data", "short data", "damaged index", "not completed"])
def test_one_that_is_not_sound_is_skipped_and_said(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        saved(series.folder_of(tmp_path, step), step)
    folder = series.folder_of(tmp_path, 2)
    (data,) = data_of(folder)
    if damage == "no data":
        data.unlink()
    elif damage == "short data":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "damaged index":
        (folder / index.NAME).write_bytes(b"{" + (folder / index.NAME).read_bytes()[1:-1])
    else:
        (folder / index.NAME).unlink()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert latest(tmp_path) == series.folder_of(tmp_path, 1)
    assert (folder.name in caplog.text) == (damage != "not completed")


def test_damage_alone_is_no_absence(tmp_path: Path) -> None:
    saved(series.folder_of(tmp_path, 1))
    data_of(series.folder_of(tmp_path, 1))[0].unlink()
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert not isinstance(caught.value, NoCheckpoint)


def test_one_of_a_writer_that_had_lost_the_folder_is_left_out(tmp_path: Path) -> None:
    for step, term in ((10, 3), (20, 3), (12, 5)):
        save(series.folder_of(tmp_path, step), {"step": step})
        rewrite(series.folder_of(tmp_path, step), lambda said, term=term: said["details"].update(term=term))
    assert latest(tmp_path) == series.folder_of(tmp_path, 12)


def test_the_error_for_none(tmp_path: Path) -> None:
    assert issubclass(NoCheckpoint, CheckpointError)
    assert NoCheckpoint.exit_code == CheckpointError.exit_code == 4
    assert holdfast.NoCheckpoint is NoCheckpoint
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "killed")
    (tmp_path / "killed" / index.NAME).unlink()
    for name in ("nowhere", "empty", "killed"):
        with pytest.raises(NoCheckpoint):
            load(tmp_path / name, {"step": 0})


def test_another_error_for_a_damaged_one(tmp_path: Path) -> None:
    saved(tmp_path)
    data_of(tmp_path)[0].unlink()
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, {"step": 0})
    assert not isinstance(caught.value, NoCheckpoint)
