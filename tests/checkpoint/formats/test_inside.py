"""What a checkpoint names is read only inside of its folder; what the user names, wherever it leads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint import load, open_checkpoint, save
from holdfast.checkpoint.convert import convert
from holdfast.checkpoint.formats import hf
from holdfast.checkpoint.inside import FOLLOW
from holdfast.checkpoint.listing import find
from holdfast.checkpoint.verify import verify
from holdfast.errors import CheckpointError
from tests.checkpoint.bounded import bounded

TREE = {"model": {"a.w": torch.ones(300), "b.w": torch.zeros(300)}}


def ours(folder: Path) -> str:
    save(folder, TREE)
    return next(name for name in os.listdir(folder) if name.endswith(".safetensors"))


def sharded(folder: Path) -> str:
    save(folder.with_name("source"), TREE)
    hf.write(open_checkpoint(folder.with_name("source")), folder, max_shard_bytes=1200)
    return "model-00002-of-00002.safetensors"


def dcp(folder: Path) -> str:
    torch_dcp.save(TREE, checkpoint_id=folder, no_dist=True)
    return "__0_0.distcp"


def universal(folder: Path) -> str:
    tree = {
        **TREE,
        "optimizer": {
            "state": {name: {"exp_avg": torch.ones(300)} for name in TREE["model"]},
            "param_groups": [{"params": [*TREE["model"]], "lr": 0.1}],
        },
    }
    save(folder.with_name("source"), tree)
    convert(open_checkpoint(folder.with_name("source")), folder, "deepspeed-universal")
    return next(path for path in folder.rglob("fp32.pt")).relative_to(folder).as_posix()


KINDS: dict[str, Callable[[Path], str]] = {"holdfast": ours, "hf": sharded, "dcp": dcp, "deepspeed": universal}


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "checkpoint"
    folder.parent.mkdir()
    name = KINDS[kind](folder)
    names = {*open_checkpoint(folder).tensors}
    outside = tmp_path / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"leads out of.*outside") as caught:
        open_checkpoint(folder)
    assert str(folder / name) in str(caught.value)
    assert FOLLOW in str(caught.value)
    monkeypatch.setenv(FOLLOW, "1")
    assert {*open_checkpoint(folder).tensors} == names


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_inside_of_the_folder_is(tmp_path: Path, kind: str) -> None:
    """The control; and a folder that is itself a link, which the user names."""
    folder = tmp_path / "checkpoint"
    name = KINDS[kind](folder)
    data = (folder / name).with_name("other.data")
    shutil.move(folder / name, data)
    (folder / name).symlink_to(data)
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    assert verify(open_checkpoint(tmp_path / "link")).ok


@pytest.mark.parametrize("kind", KINDS)
def test_pipes_and_devices_are_not_read(tmp_path: Path, kind: str) -> None:
    for odd in ("pipe", "device"):
        folder = tmp_path / odd / "checkpoint"
        folder.parent.mkdir()
        name = KINDS[kind](folder)
        (folder / name).unlink()
        os.mkfifo(folder / name) if odd == "pipe" else (folder / name).symlink_to("/dev/zero")
        said = bounded(lambda folder=folder: open_checkpoint(folder), memory=300 << 20, seconds=20)
        assert said.startswith("CheckpointError: "), said


def test_an_index_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(tmp_path)
    assert find(tmp_path) == []


def test_files_of_hugging_faces_cache_are_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    (repository / "blobs").mkdir()
    sharded(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        shutil.move(path, repository / "blobs" / f"hash{number}")
        path.symlink_to(Path("../../blobs") / f"hash{number}")
    assert load(snapshot, {"model": {"a.w": torch.zeros(300), "b.w": torch.ones(300)}})["model"]["a.w"].sum() == 300
    # A link to the blobs of another repository is none of these.
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    path = snapshot / "model-00001-of-00002.safetensors"
    shutil.move(repository / "blobs" / os.path.basename(os.readlink(path)), other / "hash")
    path.unlink()
    path.symlink_to(other / "hash")
    with pytest.raises(CheckpointError, match="leads out of"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_that_the_user_names_may_be_a_link(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path / "source", TREE)
    to = "torch" if suffix == "pt" else "hf"
    convert(open_checkpoint(tmp_path / "source"), tmp_path / "elsewhere" / f"a.{suffix}", to)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / f"b.{suffix}").symlink_to(tmp_path / "elsewhere" / f"a.{suffix}")
    catalogue = open_checkpoint(tmp_path / "here" / f"b.{suffix}")
    assert verify(catalogue).ok
    assert load(catalogue, {"model": {"a.w": torch.zeros(300), "b.w": torch.ones(300)}})["model"]["a.w"].sum() == 300


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "a\0b", "", "."])
def test_names_in_an_index_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    sharded(folder)
    (tmp_path / "secret").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    index = json.loads((folder / hf.INDEX).read_text())
    index["weight_map"]["a.w"] = name
    (folder / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"outside of its folder|is missing|no name of a file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt", "step"])
def test_folders_that_are_links_out_of_the_folder(tmp_path: Path, pointer: str) -> None:
    inside = {"latest": "tag", "latest_checkpointed_iteration.txt": "iter_0000005", "step": "step-00000007"}[pointer]
    (tmp_path / "run").mkdir()
    if pointer == "step":
        save(tmp_path / "elsewhere", TREE)
    else:
        (tmp_path / "elsewhere").mkdir()
        states = {"module": TREE["model"], "model": TREE["model"], "iteration": 5, "checkpoint_version": 3.0}
        (tmp_path / "elsewhere" / "mp_rank_00").mkdir()
        torch.save(states, tmp_path / "elsewhere" / "mp_rank_00" / "model_optim_rng.pt")
        torch.save(states, tmp_path / "elsewhere" / "mp_rank_00_model_states.pt")
        (tmp_path / "run" / pointer).write_text({"latest": "tag"}.get(pointer, "5"))
    (tmp_path / "run" / inside).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(CheckpointError, match=r"leads out of.*elsewhere"):
        open_checkpoint(tmp_path / "run")
