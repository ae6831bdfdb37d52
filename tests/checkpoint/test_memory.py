"""How much memory saving and loading take: measured in processes of their own, and under a limit."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint import async_save, disk, load, open_checkpoint, save, tensor_reader
from holdfast.checkpoint.pieces import Box, whole
from holdfast.checkpoint.tensor_reader import Want, read_range, read_tensor
from tests.checkpoint.child import cap, forget_peak, in_child, memory, say

MB = 1 << 20
SMALL, LARGE = (16 * MB // 4,), (4096, 75 * MB // 4 // 1024)  # 18 of 16 MB, one of 300 MB
CAP = 200 * MB
# What docs/checkpoint-format.md promises: buffers that are lent and lie idle, and what a cast goes through.
DIRECT = 2 * disk.THREADS * disk.BLOCK + disk.THREADS * (tensor_reader.SPAN + 2 * disk.BLOCK)
CAST = DIRECT + 2 * tensor_reader.CHUNK
NOISE = 24 * MB  # threads, modules that are loaded on the way


def large() -> torch.Tensor:
    return torch.arange(300 * MB // 4, dtype=torch.int32).view(LARGE)


def small(number: int) -> torch.Tensor:
    return torch.full(SMALL, number, dtype=torch.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of almost 600 MB."""
    place = tmp_path_factory.mktemp("large")
    in_child(lambda: save(place, {"large": large(), "small": {str(n): small(n) for n in range(18)}}))
    assert sum(path.stat().st_size for path in place.iterdir()) > 580 * MB
    yield place
    shutil.rmtree(place)


def peak_of(work: Callable[[], object]) -> int:
    """How far the work gets above what was there before it."""
    forget_peak()
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def cap_memory() -> None:
    """Caps it, and checks that the cap holds."""
    cap(resource.RLIMIT_DATA, "VmData", CAP)
    try:
        np.ones(250 * MB, dtype=np.uint8)
    except MemoryError:
        return
    raise AssertionError("the cap does not hold")


# --- more than fits ---------------------------------------------------------------------------------------


def test_one_tensor_at_a_time(folder: Path) -> None:
    def work() -> None:
        cap_memory()
        catalogue = open_checkpoint(folder)
        for number in range(18):
            assert torch.equal(read_tensor(catalogue, f"small/{number}"), small(number))
        for row in range(0, LARGE[0], 512):
            part = read_tensor(catalogue, "large", Box(offset=(row, 0), shape=(512, LARGE[1])))
            assert part[0, 0] == row * LARGE[1]
            assert part[-1, -1] == (row + 512) * LARGE[1] - 1

    in_child(work)


def test_a_tensor_that_is_larger_than_memory_in_ranges(folder: Path) -> None:
    def work() -> None:
        cap_memory()
        catalogue = open_checkpoint(folder)
        total, step = LARGE[0] * LARGE[1], 1 << 22
        out = np.empty(4 * step, dtype=np.uint8)
        for start in range(0, total, step):
            stop = min(start + step, total)
            read_range(catalogue, "large", start, stop, out[: 4 * (stop - start)])
            found = out.view(np.int32)[: stop - start]
            assert (found[0], found[-1]) == (start, stop - 1)

    in_child(work)


def test_columns_of_a_tensor_that_is_larger_than_memory(folder: Path) -> None:
    def work() -> None:
        cap_memory()
        part = read_tensor(open_checkpoint(folder), "large", Box(offset=(0, 7), shape=(LARGE[0], 3)))
        assert torch.equal(part[:, 0], torch.arange(LARGE[0], dtype=torch.int32) * LARGE[1] + 7)

    in_child(work)


def test_a_worker_loads_its_share(folder: Path) -> None:
    def work() -> None:
        cap_memory()
        share = {"small": {str(n): torch.zeros(SMALL, dtype=torch.int32) for n in range(4)}}
        load(folder, share, strict=False)
        assert all(torch.equal(tensor, small(int(n))) for n, tensor in share["small"].items())

    in_child(work)


def test_loading_into_memory_that_is_a_file(folder: Path, tmp_path: Path) -> None:
    """All 300 MB of a tensor, of which no more than the cap can be the process's own."""

    def work() -> None:
        cap_memory()
        count = LARGE[0] * LARGE[1]
        target = torch.from_file(str(tmp_path / "target"), shared=True, size=count, dtype=torch.int32).view(LARGE)
        load(folder, {"large": target})
        assert target[0, 1] == 1
        assert target[-1, -1] == count - 1

    in_child(work)
    (tmp_path / "target").unlink()


# --- how much more than what it is about -------------------------------------------------------------------


def test_saving(tmp_path: Path) -> None:
    def work() -> None:
        tree = {"large": large(), "small": {str(n): small(n) for n in range(4)}}
        say(str(peak_of(lambda: save(tmp_path, tree))))

    assert int(in_child(work)) < DIRECT + NOISE
    shutil.rmtree(tmp_path)


def test_saving_what_is_not_contiguous(tmp_path: Path) -> None:
    def work() -> None:
        tree = {"large": large().t()}
        say(str(peak_of(lambda: save(tmp_path, tree))))

    assert int(in_child(work)) < DIRECT + NOISE
    shutil.rmtree(tmp_path)


def test_saving_beside_takes_one_copy(tmp_path: Path) -> None:
    def work() -> None:
        tree = {"small": {str(n): small(n) for n in range(6)}}
        size = 6 * 16 * MB
        first = peak_of(lambda: async_save(tmp_path, tree).wait())
        again = peak_of(lambda: async_save(tmp_path, tree).wait())
        assert size <= first < size + DIRECT + NOISE, f"{first / MB} MB"
        assert again < DIRECT + NOISE, f"{again / MB} MB the second time"

    in_child(work)


def test_loading(folder: Path) -> None:
    def work() -> None:
        tree = {"large": torch.ones(LARGE, dtype=torch.int32)}
        say(str(peak_of(lambda: load(folder, tree))))

    assert int(in_child(work)) < DIRECT + NOISE


def test_loading_into_another_layout(folder: Path) -> None:
    def work() -> None:
        target = torch.ones(LARGE[::-1], dtype=torch.int32).t()
        wants = [Want(name="large", box=whole(LARGE), out=target)]
        catalogue = open_checkpoint(folder)
        say(str(peak_of(lambda: tensor_reader.read(catalogue, wants))))

    assert int(in_child(work)) < DIRECT + NOISE


def test_loading_with_a_cast(folder: Path) -> None:
    def work() -> None:
        tree = {"large": torch.ones(LARGE, dtype=torch.uint8)}
        say(str(peak_of(lambda: load(folder, tree, cast=True))))

    assert int(in_child(work)) < CAST + NOISE


def test_the_measure_sees_what_is_taken() -> None:
    assert int(in_child(lambda: say(str(peak_of(lambda: np.ones(120 * MB, dtype=np.uint8)))))) > 110 * MB
