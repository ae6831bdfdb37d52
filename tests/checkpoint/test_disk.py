"""Blocks, buffers and the sentences for what the operating system says."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from holdfast.checkpoint import disk
from holdfast.checkpoint.disk import Bytes
from holdfast.errors import CheckpointError
from tests.checkpoint.cases import SMALL, blocks, settle

SIZES = [0, 1, 4095, 4096, 4097, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 3 * SMALL + 5]


def some(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def write(path: Path, data: Bytes, **options: int) -> tuple[str, ...]:
    def fill(start: int, stop: int, out: Bytes) -> Bytes:
        out[: stop - start] = data[start:stop]
        return out

    return disk.write_blocks(path, len(data), fill, **options)


# --- writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_is_what_was_filled_in(tmp_path: Path, size: int, threads: int) -> None:
    data = some(size)
    with blocks():
        sums = write(tmp_path / "file", data, threads=threads)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    expected = [xxhash.xxh3_64_hexdigest(data[start : start + SMALL].tobytes()) for start in range(0, size, SMALL)]
    assert [*sums] == expected


def test_memory_of_its_own_is_written_without_a_buffer(tmp_path: Path) -> None:
    staged = disk.aligned(2 * SMALL)
    staged[:] = some(2 * SMALL)
    expected = staged[: SMALL + 7].tobytes()
    with blocks():
        disk.write_blocks(tmp_path / "file", SMALL + 7, lambda start, stop, out: staged[start:])
    assert (tmp_path / "file").read_bytes() == expected


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"file"):
        write(tmp_path / "file", some(10))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("error", [ValueError("of the filler"), KeyboardInterrupt()])
def test_what_fails_leaves_no_file(tmp_path: Path, error: BaseException) -> None:
    def fill(start: int, stop: int, out: Bytes) -> Bytes:
        if start:
            raise error
        return out

    with blocks(), pytest.raises(type(error)):
        disk.write_blocks(tmp_path / "file", 3 * SMALL, fill)
    assert not [*tmp_path.iterdir()]


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    done: list[int] = []
    with blocks():
        disk.write_blocks(tmp_path / "file", 2 * SMALL + 9, lambda start, stop, out: out, progress=done.append)
    assert sorted(done) == [9, SMALL, SMALL]


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[: disk.ALIGN], offset))
    data = some(3 * SMALL)
    with blocks():
        write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_a_file_system_that_makes_the_file_before_it_refuses_to_open_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    def refuse(*args: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", without_direct)
    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    write(tmp_path / "file", some(5000))
    assert (tmp_path / "file").stat().st_size == 5000


def test_files_go_past_the_page_cache(tmp_path: Path) -> None:
    write(tmp_path / "file", some(5000))
    fd = disk.open_direct(tmp_path / "file", os.O_RDONLY)
    assert disk.fcntl.fcntl(fd, disk.fcntl.F_GETFL) & os.O_DIRECT
    os.close(fd)


# --- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_read_exactly(tmp_path: Path, direct: bool) -> None:
    data = some(3 * SMALL + 5)
    write(tmp_path / "file", data)
    fd = disk.open_direct(tmp_path / "file", os.O_RDONLY) if direct else os.open(tmp_path / "file", os.O_RDONLY)
    buffer = disk.aligned(4 * SMALL)
    disk.read_exactly(fd, buffer, SMALL, len(data), tmp_path / "file")
    assert buffer[: 2 * SMALL + 5].tobytes() == data[SMALL:].tobytes()
    os.truncate(tmp_path / "file", 2 * SMALL + 100)  # after it was opened
    with pytest.raises(CheckpointError, match=rf"file.*{2 * SMALL + 100}.*{len(data)}"):
        disk.read_exactly(fd, buffer, SMALL, len(data), tmp_path / "file")
    os.close(fd)


# --- the rest ---------------------------------------------------------------------------------------------


def test_buffers_are_used_again_and_do_not_pile_up() -> None:
    buffers = disk.Buffers(keep=3 * 4096)
    with buffers.lend(4096) as first:
        pass
    with buffers.lend(100) as second:
        assert second is first
        with buffers.lend(2 * 4096) as third:
            assert third is not first
            assert third.ctypes.data % disk.ALIGN == 0
    with buffers.lend(4 * 4096):
        pass  # larger than what may be kept
    assert sorted(b.nbytes for b in buffers._idle) == [4096, 2 * 4096]


def test_a_failure_stops_what_has_not_begun() -> None:
    done: list[int] = []
    first = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            first.set()
            raise ValueError("the first")
        first.wait(10)
        done.append(item)

    with pytest.raises(ValueError, match="the first"):
        disk.in_parallel(work, range(10_000), threads=2)
    assert len(done) < 10_000


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "some/file does not exist"),
        (PermissionError(errno.EACCES, "Permission denied"), "no right to read some/file"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "no right to read some/file"),
        (OSError(errno.ENOSPC, "No space left"), "the disk is full: cannot read some/file"),
        (OSError(errno.EDQUOT, "Quota exceeded"), "the disk is full: cannot read some/file"),
        (FileExistsError(errno.EEXIST, "File exists"), r"cannot read some/file: File exists \(is a file where"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), r".* Not a directory \(is a file where"),
        (OSError(errno.EIO, "Input/output error"), "cannot read some/file: Input/output error"),
    ],
)
def test_complaints_become_sentences(error: OSError, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{sentence}"), disk.explained(Path("some/file"), "read"):
        raise error


def test_folders_are_made_with_durable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_folder", synced.append)
    for _ in range(2):
        disk.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "file")


def test_what_cannot_be_discarded_is_left(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    disk.discard([tmp_path / "none", tmp_path / "folder", tmp_path / "file"])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_discarding_later(tmp_path: Path) -> None:
    files = [tmp_path / str(n) for n in range(5)]
    for path in files:
        path.touch()
    disk.discard_later(files)
    settle()
    assert not [*tmp_path.iterdir()]


def test_a_small_file_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "write", lambda fd, view, real=os.write: real(fd, view[:3]))
    disk.write_durably(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert synced == [str(tmp_path / "file")]
    with pytest.raises(FileExistsError):
        disk.write_durably(tmp_path / "file", b"")
