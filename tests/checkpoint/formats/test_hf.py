"""Safetensors of Hugging Face and of DCP, in and out; safetensors' and torch's own readers are the judges."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from holdfast.checkpoint import open_checkpoint, save
from holdfast.checkpoint.formats import hf, torchsave
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.safetensors_writer import DTYPES
from holdfast.errors import CheckpointError, UsageError
from tests.checkpoint.formats.helpers import Model, bare, on_ranks, read_tree, sharded, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "b.weight": torch.rand(5, 2, 3, dtype=torch.float16),
}


def catalogue_of(tree: Any, folder: Path) -> Catalogue:
    torch.save(tree, folder / "source.pt")
    return torchsave.open(folder / "source.pt")


def write_sharded(folder: Path) -> Path:
    """What transformers writes for a large model, in three files."""
    folder.mkdir()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    cuts = [["a.weight", "a.bias"], ["scalar", "empty"], ["b.weight"]]
    for file, inside in zip(names, cuts, strict=True):
        save_file({name: WEIGHTS[name] for name in inside}, folder / file, metadata={"format": "pt"})
    table = {name: file for file, inside in zip(names, cuts, strict=True) for name in inside}
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return folder


def test_one_file_in_three_places(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    save_file(WEIGHTS, tmp_path / "other.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / "other.safetensors"):
        assert hf.recognise(path)
        assert bare(read_tree(hf.open(path))) == bare({"model": WEIGHTS})


def test_several_files(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "a")
    assert hf.recognise(folder)
    catalogue = hf.open(folder)
    assert bare(read_tree(catalogue)) == bare({"model": WEIGHTS})
    assert sorted(catalogue.files) == sorted(os.listdir(folder))  # the index too
    (folder / hf.INDEX).unlink()
    assert bare(read_tree(hf.open(folder))) == bare({"model": WEIGHTS}), "numbers tell that all are there"


def test_every_dtype(tmp_path: Path) -> None:
    line = torch.arange(48, dtype=torch.uint8)
    weights = {str(d): (line % 2 if d is torch.bool else line).clone().view(d) for d in DTYPES if not d.is_complex}
    save_file(weights, tmp_path / "model.safetensors")
    assert bare(read_tree(hf.open(tmp_path))["model"]) == bare(weights)


def test_tied_names_that_the_file_notes(tmp_path: Path) -> None:
    model, _ = trained()
    save_model(model, str(tmp_path / "model.safetensors"))
    catalogue = hf.open(tmp_path)
    assert set(read_tree(catalogue)["model"]) == set(model.state_dict())
    assert {*catalogue.tied, *catalogue.tied.values()} == {"head.weight", "embed.weight"}


def test_notes_that_are_not_of_tied_names(tmp_path: Path) -> None:
    notes = {"format": "pt", "base": "w", "base.model": "somebody's", "holdfast.tied": "{not json"}
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", metadata=notes)
    catalogue = hf.open(tmp_path)
    assert (list(catalogue.tree["model"]), catalogue.tied) == (["w"], {})


@pytest.mark.parametrize("limit", [8, 1000])
def test_tied_names_without_a_dot_come_back(tmp_path: Path, limit: int) -> None:
    shared, other = torch.ones(2), torch.zeros(2)
    model = {"embed": shared, "head": shared, "a": other, "b": other, "c.w": other}
    hf.write(catalogue_of({"model": model}, tmp_path), tmp_path / "out", max_shard_bytes=limit)
    assert len(os.listdir(tmp_path / "out")) == (3 if limit == 8 else 1)
    assert hf.open(tmp_path / "out").tied == {"head": "embed", "b": "a", "c.w": "a"}


def test_other_things_are_not_recognised(tmp_path: Path) -> None:
    assert not hf.recognise(tmp_path)
    (tmp_path / "data-0123456789ab-0.safetensors").write_bytes(bytes(16))
    (tmp_path / "a.safetensors").write_bytes(bytes(16))
    for path in (tmp_path, tmp_path / "a.safetensors", tmp_path / "missing"):
        assert not hf.recognise(path)


# --- what DCP writes ------------------------------------------------------------------------------


COUNT = "norm.num_batches_tracked"


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dcp-hf")

    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = sharded(Model())
        state = get_model_state_dict(model)
        state.pop("head.weight")  # torch itself cannot write a tied tensor here
        for name, together in (("parts", False), ("both", True)):
            writer = HuggingFaceStorageWriter(
                str(folder / name), save_distributed=True, enable_consolidation=together, thread_count=1
            )
            torch_dcp.save(state, storage_writer=writer)
            state.pop(COUNT, None)  # nor can it put whole numbers together
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return {name: value for name, value in full.items() if name != "head.weight"}

    return folder, on_ranks(2, work, folder)[0]


def test_shards_of_dcp(by_two_ranks: tuple[Path, dict[str, Any]]) -> None:
    folder, state = by_two_ranks
    assert hf.recognise(folder / "parts")
    catalogue = hf.open(folder / "parts")
    assert bare(read_tree(catalogue)["model"]) == bare(state)
    assert len(catalogue.tensors["model/layers.0.weight"].pieces) == 2
    state = {name: value for name, value in state.items() if name != COUNT}
    together = hf.open(folder / "both")
    assert all(len(entry.pieces) == 1 for entry in together.tensors.values()), "the whole tensors are beside them"
    assert bare(read_tree(together)["model"]) == bare(state)


def test_shards_of_dcp_before_they_were_put_together(by_two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, state = by_two_ranks
    shutil.copytree(folder / "both" / "sharded", tmp_path / "sharded")
    assert hf.recognise(tmp_path)
    state = {name: value for name, value in state.items() if name != COUNT}
    assert bare(read_tree(hf.open(tmp_path))["model"]) == bare(state)


def test_lost_and_doubled_shards_of_dcp(by_two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path = shutil.copytree(by_two_ranks[0] / "parts", tmp_path / "a")
    first, second = sorted(path.glob("*.safetensors"))
    shutil.copy(second, path / second.name.replace("shard-00002", "shard-00003"))
    with pytest.raises(CheckpointError, match=r"two parts of .* overlap"):
        hf.open(path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"shard-00002"):
        hf.open(path)
    (path / second.name.replace("shard-00002", "shard-00003")).rename(second)
    assert hf.open(path).tensors, "the control"
    first.unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001"):
        hf.open(path)


def test_dcp_on_one_rank(tmp_path: Path) -> None:
    weights = {name: value for name, value in WEIGHTS.items() if name != "empty"}
    torch_dcp.save(dict(weights), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "a")), no_dist=True)
    assert bare(read_tree(hf.open(tmp_path / "a"))["model"]) == bare(weights)


# --- what must be refused -------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the header of a file, whose data stays what it is."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    ("name", "field", "value", "match"),
    [
        ("a.weight", "data_offsets", [0, 40], r"a\.weight of shape \(3, 4\) and dtype F32 cannot be bytes 0 to 40"),
        ("a.weight", "shape", [3, 5], r"a\.weight of shape \(3, 5\)"),
        ("a.weight", "shape", [-3, -4], r"a\.weight of shape \(-3, -4\)"),
        ("a.weight", "shape", 12, r"entry of a\.weight is damaged"),
        ("a.weight", "dtype", "F7", r"a\.weight has dtype F7"),
        ("a.weight", "dtype", ["F32"], r"a\.weight has dtype \['F32'\]"),
        ("a.weight", "shape", [3, 4, *[1] * 70], r"a\.weight of shape \(3, 4, 1,"),
        ("a.weight", "data_offsets", [1 << 40, (1 << 40) + 48], r"cut off inside a\.weight"),
    ],
)
def test_a_wrong_header_is_refused_by_name(tmp_path: Path, name: str, field: str, value: Any, match: str) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    rewrite(tmp_path / "model.safetensors", lambda header: header[name].update({field: value}))
    with pytest.raises(CheckpointError, match=match) as caught:
        hf.open(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_an_empty_tensor_of_a_shape_that_cannot_be(tmp_path: Path) -> None:
    save_file({"none": torch.ones(0, 3)}, tmp_path / "model.safetensors")
    assert hf.open(tmp_path).tensors["model/none"].shape == (0, 3)
    rewrite(tmp_path / "model.safetensors", lambda header: header["none"].update(shape=[0, 1 << 70]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: none of shape \(0, 1180591620717411303424\)"):
        hf.open(tmp_path)


def test_gaps_overlaps_and_doubles_in_a_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    pair = {"a": torch.ones(4), "b": torch.zeros(4)}
    save_file(pair, path)
    rewrite(path, lambda header: header["b"].update(data_offsets=[0, 16]))
    with pytest.raises(CheckpointError, match=r"b overlaps"):
        hf.open(path)
    rewrite(path, lambda header: header.pop("a") and header["b"].update(data_offsets=[16, 32]))
    with pytest.raises(CheckpointError, match=r"b is behind a gap"):
        hf.open(path)
    save_file(pair, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="4 bytes longer"):
        hf.open(path)
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"x")
    with pytest.raises(CheckpointError, match="a is there twice"):
        hf.open(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    for keep in [*range(0, len(data), 13), len(data) - 1]:
        (tmp_path / "model.safetensors").write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            hf.open(tmp_path)


def change_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / hf.INDEX).read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    (folder / hf.INDEX).write_text(json.dumps(index))


def test_a_set_of_files_that_is_not_whole(tmp_path: Path) -> None:
    second = "model-00002-of-00003.safetensors"
    lost = write_sharded(tmp_path / "lost")
    (lost / second).unlink()
    with pytest.raises(CheckpointError, match=rf"{second}.*scalar"):
        hf.open(lost)
    (lost / hf.INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"{second} is missing"):
        hf.open(lost)

    wrong = write_sharded(tmp_path / "wrong")
    change_index(wrong, **{"a.bias": second})
    with pytest.raises(CheckpointError, match=rf"{second}.*a\.bias"):
        hf.open(wrong)
    change_index(wrong, **{"a.bias": None, "c": second})
    with pytest.raises(CheckpointError, match=rf"{second}.*\bc\b"):
        hf.open(wrong)
    change_index(wrong, c="../lost/" + second)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        hf.open(wrong)
    (wrong / hf.INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        hf.open(wrong)

    double = write_sharded(tmp_path / "double")
    save_file({"scalar": WEIGHTS["scalar"], "a.bias": WEIGHTS["a.bias"], "empty": WEIGHTS["empty"]}, double / second)
    with pytest.raises(CheckpointError, match=rf"a\.bias.*model-00001-of-00003.*{second}"):
        hf.open(double)

    mixed = write_sharded(tmp_path / "mixed")
    save_file(WEIGHTS, mixed / "model.safetensors")
    with pytest.raises(CheckpointError, match="which does not mention it"):
        hf.open(mixed)
    two = write_sharded(tmp_path / "two")
    (two / hf.INDEX).unlink()
    save_file({"x": torch.ones(1)}, two / "model-00001-of-00009.safetensors")
    with pytest.raises(CheckpointError, match="not of the same set"):
        hf.open(two)


# --- writing --------------------------------------------------------------------------------------


def test_one_file_is_written(tmp_path: Path) -> None:
    model, optimizer = trained()
    catalogue = catalogue_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    done: list[int] = []
    hf.write(catalogue, tmp_path / "out", progress=done.append)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert bare(loaded) == bare({name: wanted[name] for name in loaded})
    assert loaded.keys() == wanted.keys()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    again = Model()
    load_model(again, tmp_path / "out" / "model.safetensors")
    assert bare(dict(again.state_dict())) == bare(dict(model.state_dict()))
    assert bare(read_tree(hf.open(tmp_path / "out"))["model"]) == bare(dict(model.state_dict())), "there and back"
    assert sum(done) >= sum(value.nbytes for value in wanted.values())


def test_several_files_are_written(tmp_path: Path) -> None:
    hf.write(catalogue_of(WEIGHTS, tmp_path), tmp_path / "out", max_shard_bytes=60)
    files = sorted(os.listdir(tmp_path / "out"))
    assert files == [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), hf.INDEX]
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in WEIGHTS.values())
    loaded = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert bare(loaded) == bare(WEIGHTS)
    assert bare(read_tree(hf.open(tmp_path / "out"))) == bare({"model": WEIGHTS})


def test_a_path_with_the_suffix_is_one_file(tmp_path: Path) -> None:
    hf.write(catalogue_of(WEIGHTS, tmp_path), tmp_path / "out.safetensors", max_shard_bytes=60)
    loaded = load_file(tmp_path / "out.safetensors")
    assert bare({name: loaded[name] for name in WEIGHTS}) == bare(WEIGHTS)
    with pytest.raises(UsageError, match="exists already"):
        hf.write(hf.open(tmp_path / "out.safetensors"), tmp_path / "out.safetensors")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no model"):
        hf.write(catalogue_of({"rng": torch.ones(1), "step": 1}, tmp_path), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"\bx\b.*int"):
        hf.write(catalogue_of({"model": {"w": torch.ones(1), "x": 3}}, tmp_path), tmp_path / "out")
    assert os.listdir(tmp_path) == ["source.pt"]


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": {"wave": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(UsageError, match=r"wave is torch\.complex128"):
        hf.write(open_checkpoint(tmp_path / "a"), tmp_path / "b")
    assert not (tmp_path / "b").exists()
