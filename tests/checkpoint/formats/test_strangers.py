"""Further traps in checkpoints of strangers: bytes that are shared, shards without room, settings without end."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint import open_checkpoint, save
from holdfast.checkpoint.formats.canonical import canonical
from holdfast.checkpoint.formats.deepspeed_zero import flat_groups
from holdfast.checkpoint.listing import find
from holdfast.checkpoint.pieces import Stored
from holdfast.checkpoint.trees import leaves
from holdfast.checkpoint.verify import verify
from holdfast.errors import CheckpointError
from tests.checkpoint.bounded import bounded
from tests.checkpoint.cases import rewrite


def attempt(path: Path) -> str:
    try:
        return f"opened with {len(open_checkpoint(path).tensors)}"
    except CheckpointError as error:
        return f"refused: {error}"


def test_an_object_of_dcp_is_not_read_under_many_names(tmp_path: Path) -> None:
    torch_dcp.save({"big": [*range(3000)], "w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert "3000" in str(len(open_checkpoint(tmp_path).tree["big"])), "the control"
    table = pickle.loads((tmp_path / ".metadata").read_bytes())
    (first,) = [key for key in table.storage_data if key.fqn == "big"]
    for number in range(3000):
        name = f"copy{number}"
        table.state_dict_metadata[name] = table.state_dict_metadata["big"]
        table.storage_data[replace(first, fqn=name)] = table.storage_data[first]
        table.planner_data[name] = (name,)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    said = bounded(lambda: attempt(tmp_path), memory=250 << 20, seconds=20)
    assert said.startswith("refused: "), said
    assert "inside of what comes before it" in said


def test_records_of_a_zip_that_share_bytes_are_damage(tmp_path: Path) -> None:
    """Each would be read to the end: a megabyte under ten thousand names is ten gigabytes to check."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    assert verify(open_checkpoint(tmp_path / "a.pt")).ok, "the control"
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        record = archive.getinfo("a/data/0")
        for number in range(50):
            twin = zipfile.ZipInfo(f"a/data/x{number}")
            for key in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(twin, key, getattr(record, key))
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
        archive.writestr("a/more", b"")  # so that the directory is written anew
    result = verify(open_checkpoint(tmp_path / "a.pt"))
    assert "share bytes" in result.damaged[0].what
    assert result.bytes < 10_000


def test_a_parameter_larger_than_its_shards_is_refused_before_it_is_cut() -> None:
    """One element on each rank, and a parameter of a trillion: it would be cut into a trillion pieces."""
    line = Stored(file="a", offset=0, dtype=torch.float32, shape=(1,), strides=(1,))
    state: dict[str, Any] = {"single_partition_of_fp32_groups": [line], "base_optimizer_state": {}}
    assert len(flat_groups([state], ["a"], [{"w": (1,)}])) == 1, "the control"
    for shape in ((10**6, 10**6), (-1, -1), (1,) * 70, (0.5,)):
        with pytest.raises(CheckpointError, match=r"room for|no tensor can have"):
            flat_groups([state], ["a"], [{"w": shape}])


def test_settings_are_not_repeated_for_each_parameter_without_end() -> None:
    group = {"params": [*range(5000)], **{f"setting{number}": number for number in range(5000)}}
    assert len(leaves({"optimizer": {"state": {}, "param_groups": [group]}})) < 20_000
    honest = {"params": [*range(50)], **{f"setting{number}": number for number in range(20)}}
    assert len(leaves({"optimizer": {"state": {}, "param_groups": [honest]}})) == 1001, "the control"


def test_groups_are_put_together_without_comparing_each_with_each() -> None:
    def flat(count: int) -> dict[str, Any]:
        return {f"param_groups.w{k}.lr": k // 2 * 0.5 for k in range(count)}

    groups = canonical({"model": {}, "optimizer": flat(6)}, where=Path("a"))["optimizer"]["param_groups"]
    assert groups == [{"params": [f"w{k}", f"w{k + 1}"], "lr": k / 4} for k in (0, 2, 4)]
    mixed = {
        "param_groups.a.lr": 1,
        "param_groups.b.lr": 1.0,
        "param_groups.c.lr": (1, 2),
        "param_groups.d.lr": (1.0, 2),
    }
    groups = canonical({"model": {}, "optimizer": mixed}, where=Path("a"))["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["a", "b"], ["c", "d"]], "equal values are equal settings"
    many = bounded(
        lambda: len(canonical({"model": {}, "optimizer": flat(20_000)}, where=Path("a"))), memory=250 << 20, seconds=10
    )
    assert many == "2"


@pytest.mark.parametrize("saved", [1e300, -1e300, 10**400, float("nan")])
def test_a_time_that_is_none_does_not_end_the_list(tmp_path: Path, saved: float) -> None:
    save(tmp_path, {"x": torch.ones(2)})
    rewrite(tmp_path, lambda said: said["details"].update(saved=saved))
    (found,) = find(tmp_path)
    assert isinstance(found.to_json()["saved"], str)
