"""The checkpoints of a run in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import index, open_checkpoint, series
from tests.checkpoint.cases import data_of, saved
from tests.checkpoint.crash import calls_of


def unfinished(folder: Path) -> None:
    """What a killed save leaves."""
    saved(folder)
    (folder / index.NAME).rename(folder / f".index-{index.new_id()}.json")
    (folder / index.report_name(index.new_id(), 0)).touch()
    (folder / index.report_name(index.new_id(), 1)).with_suffix(".unfinished").touch()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert series.steps_in(tmp_path / "none") == []
    assert series.newest(tmp_path) is None
    for step in (3, 10, 123_456_789):
        saved(series.folder_of(tmp_path, step))
    unfinished(series.folder_of(tmp_path, 200))
    assert series.steps_in(tmp_path) == [3, 10, 123_456_789]
    assert series.newest(tmp_path) == tmp_path / "step-123456789"
    assert open_checkpoint(tmp_path).root == tmp_path / "step-123456789"


@pytest.mark.parametrize("name", ["step-12", "step-000000012", "step-0000001a", "xstep-00000012", "step-00000012.old"])
def test_other_names_are_not_ours(tmp_path: Path, name: str) -> None:
    saved(tmp_path / name)
    (tmp_path / "step-00000099").touch()
    assert series.steps_in(tmp_path) == []
    series.clean(tmp_path, before=1000)
    assert names(tmp_path) == sorted(["step-00000099", name])


def test_a_file_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    assert series.newest(tmp_path / "model.pt") is None


def test_delete(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(series.folder_of(tmp_path, step))
    series.delete(tmp_path, 1)
    series.delete(tmp_path, 7)
    assert names(tmp_path) == ["step-00000002"]


def test_the_index_goes_first_and_durably(tmp_path: Path) -> None:
    folder = series.folder_of(tmp_path, 1)
    saved(folder)
    calls = [call.text for call in calls_of(tmp_path, lambda: series.delete(tmp_path, 1))]
    data = next(text for text in calls if "data-" in text)
    assert calls.index("unlink index.json") < calls.index(f"fsync {folder.name}") < calls.index(data)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    for step, begin in ((1, saved), (2, unfinished)):
        begin(series.folder_of(tmp_path, step))
        (series.folder_of(tmp_path, step) / "notes.txt").write_text("mine")
    series.delete(tmp_path, 1)
    series.clean(tmp_path, before=3)
    for step in (1, 2):
        assert names(series.folder_of(tmp_path, step)) == ["notes.txt"]


def test_clean(tmp_path: Path) -> None:
    saved(series.folder_of(tmp_path, 1))
    for step in (2, 3, 4):
        unfinished(series.folder_of(tmp_path, step))
    series.clean(tmp_path, before=4)  # 4 may be under way
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    assert data_of(series.folder_of(tmp_path, 4))


@given(
    steps=st.sets(st.integers(1, 200), max_size=30),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 50),
)
def test_what_may_go(steps: set[int], keep: int, keep_every: int | None) -> None:
    gone = series.to_delete(steps, keep=keep, keep_every=keep_every)
    left = sorted(steps - {*gone})
    assert {*gone} <= steps
    assert sorted(steps)[-keep:] == left[-keep:]
    assert all(keep_every is not None and step % keep_every == 0 for step in left[:-keep])
    assert not [step for step in gone if keep_every and step % keep_every == 0]
