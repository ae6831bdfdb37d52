"""Frozen weights are written once for a series of checkpoints, and referred to as long as they are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import async_save, index, latest, load, open_checkpoint, save, series
from holdfast.checkpoint.convert import convert
from holdfast.checkpoint.diff import Comparison
from holdfast.checkpoint.listing import find
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.ranks import Alone
from holdfast.checkpoint.saving import Save
from holdfast.checkpoint.shared_files import FOLDER, is_shared
from holdfast.checkpoint.verify import open_to_verify, verify
from holdfast.errors import CheckpointError
from tests.checkpoint.adapters import adapted, is_right, optimizer_of, same, save_step, shared, tree_at, written
from tests.checkpoint.cases import refusal, rewrite, settle
from tests.checkpoint.world import world

BASE = 2 << 20  # bytes of the frozen weights


def references(folder: Path) -> list[str]:
    return [name for name in index.read(folder).files if is_shared(name)]


def test_the_base_is_written_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (file,) = shared(tmp_path)
    assert file.stat().st_size > BASE
    for step in (1, 2, 3):
        folder = series.folder_of(tmp_path, step)
        assert references(folder) == [f"../{FOLDER}/{file.name}"]
        assert written(folder) < BASE / 20
        assert is_right(folder, step)
        assert verify(open_to_verify(folder)).ok
        assert json.loads((folder / index.NAME).read_bytes())["index"]["version"] == 2


def test_also_beside_the_training(tmp_path: Path) -> None:
    for step in (1, 2):
        tree = tree_at(step)
        pending = async_save(series.folder_of(tmp_path, step), tree)
        with torch.no_grad():
            tree["model"][0].base.weight.zero_()  # too late to be saved
        pending.wait()
    assert len(shared(tmp_path)) == 1
    assert all(is_right(series.folder_of(tmp_path, step), step) for step in (1, 2))


def test_a_folder_that_is_no_step_holds_everything(tmp_path: Path) -> None:
    save(tmp_path / "best", tree_at(1))
    assert not shared(tmp_path)
    assert is_right(tmp_path / "best", 1)
    assert json.loads((tmp_path / "best" / index.NAME).read_bytes())["index"]["version"] == 1


def test_little_is_not_worth_a_file(tmp_path: Path) -> None:
    save(series.folder_of(tmp_path, 1), tree_at(1, width=64))
    assert not shared(tmp_path)


def test_weights_that_change_are_written_again(tmp_path: Path) -> None:
    """Without a gradient, and changed all the same, behind torch's back: as an average of weights may be."""
    trees = {step: tree_at(step) for step in (1, 2, 3)}
    trees[2]["model"][0].base.weight.data.view(-1)[-1] += 1
    for step, tree in trees.items():
        save_step(tmp_path, step, tree)
    assert len(shared(tmp_path)) == 3, "and the third one looks at the second alone"
    assert is_right(series.folder_of(tmp_path, 1), 1)
    assert not is_right(series.folder_of(tmp_path, 2), 2), "negative control"
    assert is_right(series.folder_of(tmp_path, 3), 3)
    # The layer that did not change is still the first one.
    assert len(references(series.folder_of(tmp_path, 2))) == 2


def test_what_is_referred_to_is_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (file,) = shared(tmp_path)
    for step in (1, 2):
        series.delete(tmp_path, step)
        series.clean(tmp_path, before=3)
        series.clean_shared(tmp_path)
        assert shared(tmp_path) == [file]
        assert is_right(series.folder_of(tmp_path, 3), 3)
    series.delete(tmp_path, 3)
    series.clean_shared(tmp_path)
    assert not shared(tmp_path), "nobody needs it"


def test_folders_that_are_removed_by_hand(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    shutil.rmtree(series.folder_of(tmp_path, 1))
    assert is_right(series.folder_of(tmp_path, 2), 2)
    shutil.rmtree(series.folder_of(tmp_path, 2))
    save_step(tmp_path, 3, tree_at(3, seed=5))
    assert len(shared(tmp_path)) == 1, "the old one is of no use"
    assert is_right(series.folder_of(tmp_path, 3), 3, seed=5)


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    save_step(tmp_path, 1, tree_at(1, seed=5))
    settle()
    assert is_right(series.folder_of(tmp_path, 1), 1, seed=5)
    assert is_right(series.folder_of(tmp_path, 2), 2)


def test_nothing_is_removed_while_an_index_cannot_be_read(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    path = series.folder_of(tmp_path, 1) / index.NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    save_step(tmp_path, 2, tree_at(2, seed=5))
    assert len(shared(tmp_path)) == 2
    path.write_bytes(whole)
    assert is_right(series.folder_of(tmp_path, 1), 1)


def test_files_of_a_save_that_goes_on_stay(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    (series.folder_of(tmp_path, 1) / index.NAME).unlink()  # as if it had not been committed yet
    series.clean_shared(tmp_path)
    assert len(shared(tmp_path)) == 1
    series.clean(tmp_path, before=2)
    series.clean_shared(tmp_path)
    assert not shared(tmp_path)


def test_a_shared_file_that_goes_before_the_commit(tmp_path: Path) -> None:
    """The save fails, rather than to refer to what is gone; and the next one writes it."""
    save_step(tmp_path, 1)
    work = Save(series.folder_of(tmp_path, 2), tree_at(2), Alone())
    report = work.write([image.fill for image in work.images])
    series.delete(tmp_path, 1)
    series.clean_shared(tmp_path)
    with pytest.raises(CheckpointError, match=FOLDER):
        work.commit([report])
    assert latest(tmp_path) is None
    save_step(tmp_path, 2)
    assert is_right(series.folder_of(tmp_path, 2), 2)


def test_a_shared_file_that_is_lost_or_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    (file,) = shared(tmp_path)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    (found,) = verify(open_to_verify(series.folder_of(tmp_path, 2))).damaged
    assert file.name in found.file
    assert "model/1.base.weight" in found.tensors
    file.unlink()
    assert FOLDER in refusal(series.folder_of(tmp_path, 2))
    assert not verify(open_to_verify(series.folder_of(tmp_path, 2))).ok
    save_step(tmp_path, 3)
    assert is_right(series.folder_of(tmp_path, 3), 3)
    assert latest(tmp_path) == series.folder_of(tmp_path, 3)


def test_one_is_taken_out_by_convert(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path / "run", step)
    place = tmp_path / "elsewhere" / "step-00000002"
    shutil.copytree(series.folder_of(tmp_path / "run", 2), place)
    assert "convert" in refusal(place), "a copy of the folder alone says what to do"
    shutil.rmtree(place)
    source = open_checkpoint(tmp_path / "run")
    assert convert(source, place, "holdfast") == []
    assert is_right(place, 2)
    assert not Comparison(source, open_checkpoint(place)).run().rows
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert is_right(tmp_path / "copy", 2), "a copy of the whole run is complete"


def test_the_list_tells_shared_bytes_apart(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    found = find(tmp_path)
    assert [one.path.name for one in found] == ["step-00000001", "step-00000002"]
    assert all(one.shared > BASE > 20 * one.bytes for one in found)


@pytest.mark.parametrize(
    "name",
    [
        "../data-000000000000-0.safetensors",
        f"../{FOLDER}/../{FOLDER}/data-000000000000-0.safetensors",
        f"../../{FOLDER}/data-000000000000-0.safetensors",
        f"../{FOLDER}/other.safetensors",
        "/etc/passwd",
    ],
)
def test_no_other_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = save_step(tmp_path, 1)
    rewrite(folder, lambda said: said["files"][-1].update(name=name))
    assert "not the name of a data file" in refusal(folder)


def test_a_link_in_the_shared_folder_is_refused(tmp_path: Path) -> None:
    folder = save_step(tmp_path / "run", 1)
    (file,) = shared(tmp_path / "run")
    file.rename(tmp_path / "away")
    file.symlink_to(tmp_path / "away")
    assert "leads out of" in refusal(folder)


def test_version_1_cannot_refer(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    rewrite(folder, lambda said: said.update(version=1))
    assert "not the name of a data file" in refusal(folder)


@pytest.mark.parametrize("digest", ["00", 5, "g" * 32])
def test_digests_that_are_none(tmp_path: Path, digest: Any) -> None:
    folder = save_step(tmp_path, 1)
    rewrite(folder, lambda said: said["digests"]["model/0.base.weight"]["boxes"][0].__setitem__(2, digest))
    assert "is no digest" in refusal(folder)


def test_digests_with_a_gap(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    rewrite(folder, lambda said: said["digests"]["model/0.base.weight"].update(boxes=[]))
    assert "0.base.weight" in refusal(folder)


# --- on several ranks -------------------------------------------------------------------------------------


def save_replicas(root: Path, step: int) -> int:
    save_step(root, step)
    return len(references(series.folder_of(root, step)))


def test_replicas_share_the_writing_and_the_next_layout_refers(tmp_path: Path) -> None:
    assert world(2).run(save_replicas, tmp_path, 1) == [2, 2]
    files = shared(tmp_path)
    assert len(files) == 2
    assert world(3).run(save_replicas, tmp_path, 2) == [2, 2, 2]
    save_step(tmp_path, 3)
    assert shared(tmp_path) == files, "other numbers of ranks refer to the same files"
    assert all(is_right(series.folder_of(tmp_path, step), step) for step in (1, 2, 3))


def save_stage(root: Path, step: int) -> None:
    tree = tree_at(step)
    mine = nn.ModuleDict({str(dist.get_rank()): tree["model"][dist.get_rank()]})
    save(series.folder_of(root, step), {"model": mine, "step": step})


def test_stages_refer_to_what_replicas_wrote(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    files = shared(tmp_path)
    world(2).run(save_stage, tmp_path, 2)
    assert shared(tmp_path) == files
    into = {"model": adapted(99)}
    load(series.folder_of(tmp_path, 2), into)
    assert same(into["model"], tree_at(2)["model"])


def save_shards(root: Path, step: int) -> int:
    model = adapted()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(next(model.parameters()), DTensor)
    save(series.folder_of(root, step), {"model": model, "optimizer": optimizer_of(model), "step": 0})
    return sum(size_of_own(index.read(series.folder_of(root, step))).values())


def size_of_own(catalogue: Catalogue) -> dict[str, int]:
    return {name: file.bytes for name, file in catalogue.files.items() if not is_shared(name)}


def test_shards_are_compared_where_they_lie(tmp_path: Path) -> None:
    """Shards of two ranks hold the boxes that one rank of a smaller world wrote; the other way round it is written."""
    world(3).run(save_shards, tmp_path, 1)
    files = shared(tmp_path)
    assert len(files) == 3
    world(3).run(save_shards, tmp_path, 2)
    assert shared(tmp_path) == files
    save_step(tmp_path, 3)
    assert shared(tmp_path) == files
    world(2).run(save_shards, tmp_path, 4)
    assert len(shared(tmp_path)) == 5, "cut otherwise: written anew"
    assert is_right(series.folder_of(tmp_path, 3), 3)
    into = {"model": adapted(99)}
    load(series.folder_of(tmp_path, 4), into)
    assert same(into["model"], adapted())
