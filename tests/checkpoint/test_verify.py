"""Every damage is found, with the tensors in it; what cannot be checked is said."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint import convert, open_checkpoint, save
from holdfast.checkpoint.disk import BLOCK
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.rules import Replicate, Rule, Rules
from holdfast.checkpoint.verify import VerifyResult, open_to_verify, verify, work_of
from holdfast.errors import CheckpointError

SIZE = 2 * BLOCK // 4  # elements of two blocks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "a", {"model": {name: torch.full((SIZE,), float(i)) for i, name in enumerate("xyz")}, "step": 1})
    return tmp_path / "a"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def data(folder: Path) -> list[Path]:
    return sorted(folder.glob("data-*"))


def place(catalogue: Catalogue, name: str) -> tuple[Path, int]:
    stored = catalogue.tensors[name].pieces[0].stored
    return catalogue.root / stored.file, stored.offset


def check(path: Path) -> VerifyResult:
    return verify(open_to_verify(path))


def test_an_intact_checkpoint(folder: Path) -> None:
    verdict = check(folder)
    assert verdict.ok
    assert verdict.unchecked == []
    assert verdict.checked == {"block": 7}  # three tensors of two blocks, and a header
    assert verdict.bytes == work_of(open_checkpoint(folder)) == data(folder)[0].stat().st_size


def test_every_flipped_bit_is_found(folder: Path) -> None:
    catalogue = open_checkpoint(folder)
    for name, skip in (("model/x", 100), ("model/z", BLOCK + 50)):
        path, at = place(catalogue, name)
        flip(path, at + skip)
    damaged = check(folder).damaged
    assert [one.tensors for one in damaged] == [("model/x",), ("model/z",)]
    assert all(one.stop - one.start == BLOCK and one.what == "does not match its checksum" for one in damaged)


def test_a_flipped_bit_in_the_header(folder: Path) -> None:
    flip(data(folder)[0], 20)
    [damage] = check(folder).damaged
    assert (damage.start, damage.tensors) == (0, ("model/x",))


def test_files_that_are_missing_short_and_long_are_all_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "FILE", 1)  # a file for each tensor
    split = folder.parent / "split"
    convert.convert(open_checkpoint(folder), split, "holdfast")
    x, y, z = (place(open_checkpoint(split), f"model/{name}")[0] for name in "xyz")
    x.unlink()
    with y.open("r+b") as file:
        file.truncate(BLOCK + 5)
    with z.open("ab") as file:
        file.write(b"more")
    found = {one.file: one for one in check(split).damaged}
    assert {found[x.name].tensors, found[y.name].tensors} == {("model/x",), ("model/y",)}
    assert "No such file" in found[x.name].what
    assert "ends at byte" in found[y.name].what
    assert found[y.name].start == BLOCK
    assert "4 bytes longer" in found[z.name].what


def test_a_damaged_index_is_an_error(folder: Path) -> None:
    flip(folder / "index.json", 200)
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        check(folder)


def test_a_gap_between_pieces_is_found(folder: Path) -> None:
    catalogue = open_checkpoint(folder)
    catalogue.tensors["model/y"] = replace(catalogue.tensors["model/y"], pieces=())
    [damage] = verify(catalogue).damaged
    assert damage.what == f"no file holds [0:{SIZE}] of model/y"


# --- formats of others ----------------------------------------------------------------------------


def test_records_of_torch_save(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(SIZE), "b": torch.ones(5)}, tmp_path / "m.pt")
    intact = check(tmp_path / "m.pt")
    assert intact.ok
    assert intact.unchecked == []
    assert intact.checked["record"] > 2
    path, at = place(open_checkpoint(tmp_path / "m.pt"), "model/a")
    flip(path, at + BLOCK)
    [damage] = check(tmp_path / "m.pt").damaged
    assert damage.tensors == ("model/a",)
    assert "does not match its CRC" in damage.what


def test_torch_save_without_checksums_is_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(5)}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    verdict = check(tmp_path / "m.pt")
    assert verdict.ok
    assert verdict.unchecked == ["m.pt: read to the end, but torch was told to leave checksums out"]


def test_each_of_the_zips_in_a_file_of_dcp(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"a": torch.ones(100), "b": torch.ones(50)}, "step": 3}, checkpoint_id=tmp_path)
    intact = check(tmp_path)
    assert intact.ok
    assert intact.unchecked == [".metadata: read to the end, but the file has no checksums"]
    for name in ("model/a", "model/b"):
        path, at = place(open_checkpoint(tmp_path), name)
        flip(path, at + 7)
    assert sorted(one.tensors for one in check(tmp_path).damaged) == [("model/a",), ("model/b",)]


def test_every_file_that_was_read_is_checked_or_named(tmp_path: Path) -> None:
    """A step that is another number in DCP's table is not seen, and so it is not said that all is well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"a": torch.ones(2)}, "step": 3}, checkpoint_id=tmp_path / "dcp")
    table = tmp_path / "dcp" / ".metadata"
    table.write_bytes(table.read_bytes().replace(b"step", b"rtep"))
    verdict = check(tmp_path / "dcp")
    assert verdict.ok
    assert "step" not in open_checkpoint(tmp_path / "dcp").tree
    assert ".metadata" in verdict.unchecked[0]
    torch.save({"step": 3}, tmp_path / "values.pt")  # no tensor, but bytes
    assert check(tmp_path / "values.pt").checked["record"] > 2


def test_safetensors_have_nothing_to_check(folder: Path) -> None:
    convert.convert(open_checkpoint(folder), folder.parent / "hf", "hf")
    verdict = check(folder.parent / "hf")
    assert verdict.ok
    assert verdict.unchecked == ["model.safetensors: read to the end, but the file has no checksums"]
    assert verdict.bytes == (folder.parent / "hf" / "model.safetensors").stat().st_size


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [None, SIZE - 1])
def test_copies_are_compared_element_by_element(tmp_path: Path, changed: int | None) -> None:
    for rank in range(3):
        norm = torch.arange(float(SIZE))
        if rank == 2 and changed is not None:
            norm[changed] = -1.0
        torch.save({"norm": norm}, tmp_path / f"rank{rank}.pt")
    rules = Rules([Rule(match=".*", pattern=Replicate())])
    catalogue = open_checkpoint(tmp_path / "rank{tp}.pt", rules=rules)
    verdict = verify(catalogue)
    assert verdict.checked["copy"] == 2
    if changed is None:
        assert verdict.ok
        return
    [damage] = verdict.damaged
    assert damage.tensors == ("model/norm",)
    assert damage.what == f"1 of {SIZE:,} elements differ between copies in rank0.pt and rank2.pt"
