"""A crash at any moment leaves the old checkpoint or the new one: killed at every call, and without power."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.checkpoint import async_save, index, save, series
from holdfast.errors import CheckpointError
from tests.checkpoint.cases import blocks, content, content_of, data_of, saved, settle, tree_of
from tests.checkpoint.crash import Call, Disk, calls_of, states, sweep

OLD, NEW, NEXT = (content_of(tree_of(seed)) for seed in (1, 2, 3))
Work = Callable[[Path], None]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with blocks():
        yield


def overwrite(folder: Path) -> None:
    save(folder, tree_of(2))
    settle()


def overwrite_beside(folder: Path) -> None:
    async_save(folder, tree_of(2)).wait()
    settle()


def advance(root: Path) -> None:
    """What a run does: the next step's checkpoint, then the oldest may go."""
    save(series.folder_of(root, 3), tree_of(2))
    series.delete(root, 1)
    settle()


def verdict(folder: Path) -> str:
    """Which checkpoint is there."""
    if not folder.exists() or not index.exists(folder):
        return "nothing"
    try:
        found = content(folder)
    except CheckpointError as e:
        return f"broken: {e}"
    return "old" if found == OLD else "new" if found == NEW else "a mixture"


# --- killed at every call ---------------------------------------------------------------------------------


def nothing(folder: Path) -> None:
    """Before a first save."""


def an_old_one(folder: Path) -> None:
    saved(folder)


def and_then_save(folder: Path) -> str:
    """The verdict, and that the next save succeeds and cleans up."""
    found = verdict(folder)
    assert saved(folder, 3) == content(folder) == NEXT
    assert sorted(folder.iterdir()) == sorted([folder / index.NAME, *data_of(folder)])
    assert len(data_of(folder)) == 1
    return found


def changes_once(found: Sequence[str], before: str) -> bool:
    """Whether the new one comes at one moment, and nothing else before or after."""
    moment = found.index("new")
    return {*found[:moment]} == {before} and {*found[moment:]} == {"new"}


@pytest.mark.parametrize("work", [overwrite, overwrite_beside])
def test_killed_while_replacing(tmp_path: Path, work: Work) -> None:
    found = [*sweep(tmp_path, an_old_one, work, and_then_save)]
    assert len(found) > 20  # or the sweep has not seen the calls of a save
    assert changes_once(found, "old")


def test_killed_while_saving_for_the_first_time(tmp_path: Path) -> None:
    assert changes_once([*sweep(tmp_path, nothing, overwrite, and_then_save)], "nothing")


def test_killed_while_a_run_goes_on(tmp_path: Path) -> None:
    def after(root: Path) -> str:
        steps = series.steps_in(root)
        assert steps in ([1, 2], [1, 2, 3], [2, 3])
        assert all(verdict(series.folder_of(root, step)) == "old" for step in steps if step < 3)
        newest = series.newest(root)
        assert newest == series.folder_of(root, max(steps))
        found = verdict(newest)
        series.clean(root, before=4)
        assert [path.name for path in sorted(root.iterdir())] == [series.folder_of(root, s).name for s in steps]
        return found

    def two_steps(root: Path) -> None:
        for step in (1, 2):
            saved(series.folder_of(root, step))

    assert changes_once([*sweep(tmp_path, two_steps, advance, after)], "old")


def in_place(folder: Path) -> None:
    """How not to do it: the data under the name that the old index knows."""
    names = [path.name for path in data_of(folder)] or ["data-000000000000-0.safetensors"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "data_name", lambda identity, rank: names[0])
        for name in names:
            (folder / name).unlink(missing_ok=True)
        overwrite(folder)


def index_in_place(folder: Path) -> None:
    """How not to do it: the index without a rename."""

    def write(path: Path, text: bytes) -> None:
        fd = os.open(path.with_name(index.NAME), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, text)
        path.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "write_durably", write)
        patch.setattr(os, "replace", lambda a, b: None)
        overwrite(folder)


def index_first(folder: Path) -> None:
    """How not to do it: the index before the data is there."""
    with pytest.MonkeyPatch.context() as patch:
        real = index.commit

        def commit(catalogue: index.Catalogue, identity: str, **guard: None) -> None:
            aside = [(folder / name, folder / f"{name}.late") for name in catalogue.files]
            for path, late in aside:
                os.replace(path, late)
            real(catalogue, identity, **guard)
            for path, late in aside:
                os.replace(late, path)

        patch.setattr(index, "commit", commit)
        overwrite(folder)


def cleaning_first(folder: Path) -> None:
    """How not to do it: away with the old before the new is there."""
    for path in data_of(folder):
        os.unlink(path)
    overwrite(folder)


@pytest.mark.parametrize("work", [in_place, index_in_place, index_first, cleaning_first])
def test_the_sweep_finds_what_would_go_wrong(tmp_path: Path, work: Work) -> None:
    assert any(one.startswith("broken") for one in sweep(tmp_path, an_old_one, work, verdict))


# --- without power ------------------------------------------------------------------------------------------


def power_failures(
    tmp_path: Path, *, old: bool, lose: Callable[[Call, int], bool] = lambda call, number: False
) -> tuple[set[str], set[str]]:
    """The verdicts when the calls that ``lose`` chooses (a call and how many equal ones came before) do nothing."""
    root = tmp_path / "root"
    root.mkdir()
    if old:
        saved(root / "here")
    disk = Disk(root)
    calls = calls_of(root, lambda: overwrite(root / "here"))
    kept, seen = [], dict[str, int]()
    for call in calls:
        number = seen[call.text] = seen.get(call.text, -1) + 1
        if not lose(call, number):
            kept.append(call)
    return states(root, tmp_path / "place", disk, kept, lambda place: verdict(place / "here"))


def test_a_power_failure_while_replacing(tmp_path: Path) -> None:
    assert power_failures(tmp_path, old=True) == ({"old", "new"}, {"new"})


def test_a_power_failure_while_saving_for_the_first_time(tmp_path: Path) -> None:
    assert power_failures(tmp_path, old=False) == ({"nothing", "new"}, {"new"})


SYNCS: dict[str, Callable[[Call, int], bool]] = {
    "of the data": lambda call, number: call.text.startswith("fsync data-"),
    "of the data's name": lambda call, number: call.text == "fsync here" and number == 0,
    "of the index": lambda call, number: call.text.startswith("fsync .index-"),
    "of the rename": lambda call, number: call.text == "fsync here" and number == 1,
}


@pytest.mark.parametrize("what", SYNCS)
def test_every_sync_is_needed(tmp_path: Path, what: str) -> None:
    ever, _ = power_failures(tmp_path, old=True, lose=SYNCS[what])
    assert any(one.startswith("broken") for one in ever)


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    saved(folder)
    calls = [call.text for call in calls_of(folder, lambda: overwrite(folder))]
    kinds = [
        "data" if "data-" in text else "unfinished" if ".index-" in text else "folder"
        for text in calls
        if text.startswith(("fsync", "replace", "unlink"))
    ]
    names = [text.split()[0] for text in calls if text.startswith(("fsync", "replace", "unlink"))]
    assert [*zip(names, kinds, strict=True)] == [
        ("fsync", "data"),
        ("fsync", "folder"),
        ("fsync", "unfinished"),
        ("replace", "unfinished"),
        ("fsync", "folder"),
        ("unlink", "data"),
    ]
