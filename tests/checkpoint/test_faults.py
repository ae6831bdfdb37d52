"""What disks, crashes and strangers do to a checkpoint: a named error or the old one, never half of one."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import async_save, disk, index, load, safetensors_writer, save, series, wait_for_saves
from holdfast.errors import CheckpointError
from tests.checkpoint.cases import (
    blocks,
    content,
    content_of,
    data_of,
    in_two_files,
    refusal,
    rewrite,
    saved,
    settle,
    tree_of,
)
from tests.checkpoint.child import become_nobody, in_child, make_read_only, mount_tmpfs


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with blocks():
        yield


# --- files that are not what they were --------------------------------------------------------------


def test_a_sound_checkpoint_is_read(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    assert content(tmp_path) == expected != content_of(tree_of(2))


def test_a_missing_file(tmp_path: Path) -> None:
    in_two_files(tmp_path)
    _, missing = data_of(tmp_path)
    missing.unlink()
    assert f"{missing} does not exist" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 5000, -1])
def test_a_truncated_file(tmp_path: Path, length: int) -> None:
    saved(tmp_path)
    [data] = data_of(tmp_path)
    os.truncate(data, length % data.stat().st_size)
    assert str(data) in refusal(tmp_path)


def test_a_grown_file(tmp_path: Path) -> None:
    saved(tmp_path)
    [data] = data_of(tmp_path)
    with data.open("ab") as file:
        file.write(b"\0")
    assert str(data) in refusal(tmp_path)


def test_swapped_files(tmp_path: Path) -> None:
    in_two_files(tmp_path)
    one, two = data_of(tmp_path)
    assert one.stat().st_size == two.stat().st_size
    other = tmp_path / "other"
    one.rename(other)
    two.rename(one)
    other.rename(two)
    sentence = refusal(tmp_path)
    assert str(one) in sentence or str(two) in sentence
    assert "it holds w" in sentence


def test_the_file_of_another_save(tmp_path: Path) -> None:
    saved(tmp_path / "one", 1)
    saved(tmp_path / "two", 2)
    [mine], [other] = data_of(tmp_path / "one"), data_of(tmp_path / "two")
    shutil.copy(other, mine)
    assert str(mine) in refusal(tmp_path / "one")


def test_a_file_twice_in_the_folder_is_litter(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    [data] = data_of(tmp_path)
    shutil.copy(data, tmp_path / index.data_name(index.new_id(), 0))
    assert content(tmp_path) == expected
    saved(tmp_path, 2)
    assert len(data_of(tmp_path)) == 1


def flip(path: Path, position: int, bit: int) -> Callable[[], None]:
    """Flips a bit, and returns what flips it back."""

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << bit]))

    change()
    return change


def test_one_bit_anywhere_in_the_data(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    [data] = data_of(tmp_path)
    chance = random.Random(0)
    tensors = json.loads((tmp_path / index.NAME).read_bytes())["index"]["tensors"]
    places = {t["pieces"][0][1]: (name, expected[name]) for name, t in tensors.items()}
    size = data.stat().st_size
    for position in [*range(0, 600, 7), *(chance.randrange(size) for _ in range(200)), size - 1]:
        flip_back = flip(data, position, chance.randrange(8))
        sentence = refusal(tmp_path)
        assert f"{data} is damaged" in sentence
        for start, (name, content_) in places.items():
            assert not start <= position < start + len(content_) or name in sentence
        flip_back()
    assert content(tmp_path) == expected


def test_one_bit_anywhere_in_the_index(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    path = tmp_path / index.NAME
    chance = random.Random(0)
    for position in range(path.stat().st_size):
        flip_back = flip(path, position, chance.randrange(8))
        assert f"{path} is damaged" in refusal(tmp_path)
        flip_back()
    assert content(tmp_path) == expected


def test_nothing_is_changed_before_everything_is_known(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda said: said["tensors"]["model/bias"]["pieces"].clear())
    target = tree_of(5)
    with pytest.raises(CheckpointError, match="model/bias"):
        load(tmp_path, target)
    assert content_of(target) == content_of(tree_of(5))


# --- a full disk ----------------------------------------------------------------------------------------


def fill_up(call: str, number: int) -> Callable[..., Any]:
    """A call that has no space from its n-th use on."""
    real, left = getattr(os, call), [number]

    def full(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    return full


@pytest.mark.parametrize(
    ("call", "number"),
    [("posix_fallocate", 0), ("pwrite", 0), ("pwrite", 2), ("ftruncate", 0), ("fsync", 0), ("fsync", 2), ("write", 0)],
)
@pytest.mark.parametrize("way", ["save", "async_save"])
def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, way: str) -> None:
    def attempt() -> None:
        save(tmp_path, tree_of(2)) if way == "save" else async_save(tmp_path, tree_of(2)).wait()

    expected = saved(tmp_path)
    before = sorted(tmp_path.iterdir())
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fill_up(call, number))
            with pytest.raises(CheckpointError, match="the disk is full"):
                attempt()
        wait_for_saves()
        assert sorted(tmp_path.iterdir()) == before
    assert content(tmp_path) == expected


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    def work() -> None:
        mount_tmpfs(tmp_path, megabytes=2)
        folder = tmp_path / "checkpoint"
        expected = saved(folder, 1, elements=150_000)  # 1 MB: there is no room for a second
        before = sorted(folder.iterdir())
        for _ in range(3):
            with pytest.raises(CheckpointError, match=r"the disk is full: cannot write .*data-"):
                save(folder, tree_of(2, elements=400_000))
            assert sorted(folder.iterdir()) == before
        assert content(folder) == expected
        (tmp_path / "ballast").write_bytes(bytes(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_bsize))
        with pytest.raises(CheckpointError, match="the disk is full"):
            save(folder, tree_of(2, elements=30))
        (tmp_path / "ballast").unlink()
        assert content(folder) == expected
        assert saved(folder, 3, elements=3000) == content(folder)

    in_child(work)


def test_a_disk_that_killed_saves_have_filled(tmp_path: Path) -> None:
    def work() -> None:
        mount_tmpfs(tmp_path, megabytes=4)
        folder = tmp_path / "checkpoint"
        saved(folder, 1, elements=150_000)
        [data] = data_of(folder)
        for _ in range(3):  # 0.75 MB each: as if they had been killed before their commit
            shutil.copy(data, folder / index.data_name(index.new_id(), 0))
        ballast = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_bsize - 100_000
        (tmp_path / "ballast").write_bytes(bytes(ballast))
        assert saved(folder, 2, elements=150_000) == content(folder)

    in_child(work)


def test_a_disk_that_is_just_being_emptied_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, old = os.posix_fallocate, tmp_path / "old"
    old.write_bytes(b"in the way")

    def full_until_removed(*args: int) -> None:
        if old.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(os, "posix_fallocate", full_until_removed)
    settle()
    with pytest.raises(CheckpointError, match="the disk is full"):
        saved(tmp_path / "one")
    disk.discard_later([old])
    saved(tmp_path / "one")


# --- rights -----------------------------------------------------------------------------------------------


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """Like tmp_path, but below folders that everybody may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_without_the_right_to_write(open_to_all: Path) -> None:
    expected = saved(open_to_all)
    open_to_all.chmod(0o555)

    def work() -> None:
        become_nobody()
        for attempt in (lambda: save(open_to_all, tree_of(2)), lambda: save(open_to_all / "new" / "er", tree_of(2))):
            with pytest.raises(CheckpointError, match=f"no right to (write|create) {open_to_all}"):
                attempt()
        with pytest.raises(CheckpointError, match="no right to write"):
            async_save(open_to_all, tree_of(2)).wait()
        assert content(open_to_all) == expected

    in_child(work)


@pytest.mark.parametrize("what", ["index", "data"])
def test_a_file_without_the_right_to_read(open_to_all: Path, what: str) -> None:
    saved(open_to_all)
    path = open_to_all / index.NAME if what == "index" else data_of(open_to_all)[0]
    path.chmod(0)

    def work() -> None:
        become_nobody()
        assert f"no right to read {path}" in refusal(open_to_all)

    in_child(work)


def test_a_run_whose_folder_cannot_be_read_is_not_a_fresh_run(open_to_all: Path) -> None:
    saved(series.folder_of(open_to_all, 1))
    for hidden in (open_to_all, series.folder_of(open_to_all, 1)):
        hidden.chmod(0)

        def work() -> None:
            become_nobody()
            with pytest.raises(CheckpointError, match="no right to read"):
                series.newest(open_to_all)

        in_child(work)
        hidden.chmod(0o755)


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    def work() -> None:
        mount_tmpfs(tmp_path, megabytes=4)
        expected = saved(tmp_path)
        make_read_only(tmp_path)
        with pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}/data-.*: Read-only file system"):
            save(tmp_path, tree_of(2))
        assert content(tmp_path) == expected

    in_child(work)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=str(path)):
            save(path, tree_of(1))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_system_without_direct_access(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        assert saved(Path(folder)) == content(Path(folder))


# --- what is changed after the snapshot -------------------------------------------------------------------


def mutated(folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Whether a change right after ``async_save`` gets into the file, which is not begun before the change."""
    real, changed = os.posix_fallocate, threading.Event()

    def late(*args: int) -> None:
        assert changed.wait(20)
        real(*args)

    patch.setattr(os, "posix_fallocate", late)
    tree = tree_of(1)
    expected = content_of(tree)
    pending = async_save(folder, tree)
    for tensor in (*tree["model"].values(), tree["rng"]):
        tensor.zero_()
    changed.set()
    pending.wait()
    return content(folder) != expected


def test_what_is_changed_after_the_snapshot_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):  # the second time the staging area is used again
        assert not mutated(tmp_path, monkeypatch)


def test_without_a_copy_it_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer.StagedImage, "take", lambda self, image: setattr(self, "image", image))
    monkeypatch.setattr(
        safetensors_writer.StagedImage, "fill", lambda self, start, stop, out: self.image.fill(start, stop, out)
    )
    assert mutated(tmp_path, monkeypatch)


def test_a_background_error_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fill_up("pwrite", 0))
        pending = async_save(tmp_path, tree_of(1))
        pending._thread.join()
    with pytest.raises(CheckpointError, match="the disk is full"):
        save(tmp_path, tree_of(2))
    assert saved(tmp_path, 3) == content(tmp_path)
    assert torch.equal(load(tmp_path, tree_of(4))["model"]["count"], torch.tensor(3))
