"""torch.save files, in and out; torch itself is the judge."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint.formats import torchsave
from holdfast.checkpoint.pieces import Catalogue, Ref
from holdfast.errors import CheckpointError, UsageError
from tests.checkpoint.formats.helpers import Model, bare, raw, read_tree, trained


def opened(path: Path, tree: Any, **options: Any) -> Catalogue:
    torch.save(tree, path, **options)
    assert torchsave.recognise(path)
    return torchsave.open(path)


@pytest.mark.parametrize("new", [True, False])
def test_a_whole_training_state(tmp_path: Path, new: bool) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "nested": [{"a": (1, None)}]}
    catalogue = opened(tmp_path / "a.pt", state, _use_new_zipfile_serialization=new)
    found = read_tree(catalogue)
    assert bare(found["model"]) == bare(dict(model.state_dict()))
    assert bare(found["nested"]) == bare(state["nested"])
    assert found["step"] == 7
    assert catalogue.tied == {"head.weight": "embed.weight"}
    assert catalogue.tree["model"]["head.weight"] == Ref(name="model/embed.weight")
    names = [["embed.weight", "layers.0.weight", "layers.1.weight"], ["layers.0.bias", "layers.1.bias"]]
    assert [g["params"] for g in found["optimizer"]["param_groups"]] == [
        names[0],
        [*names[1], "norm.weight", "norm.bias"],
    ]
    assert [g["weight_decay"] for g in found["optimizer"]["param_groups"]] == [0.1, 0.0]
    slots = dict(zip([n for g in found["optimizer"]["param_groups"] for n in g["params"]], range(7), strict=True))
    for name, number in slots.items():
        assert bare(found["optimizer"]["state"][name]) == bare(optimizer.state_dict()["state"][number]), name


def test_an_optimizer_without_names_stays_numbered(tmp_path: Path) -> None:
    _, optimizer = trained(names=False)
    found = read_tree(opened(tmp_path / "a.pt", {"optimizer": optimizer.state_dict()}))
    assert bare(found["optimizer"]) == bare(optimizer.state_dict())


@pytest.mark.parametrize(
    ("saved", "keys"),
    [
        ({"a.weight": torch.ones(2), "b": torch.ones(1)}, {"model": ["a.weight", "b"]}),
        ({"a": torch.ones(2), "x._extra_state": None}, {"model": ["a", "x._extra_state"]}),
        ({"state_dict": {"a": torch.ones(2)}, "arch": "vit"}, {"model": ["a"], "arch": "vit"}),
        ({"model_state_dict": {}, "optimizer_state_dict": {}}, {"model": [], "optimizer": []}),
        ({"app": {"model": {"a": torch.ones(2)}, "optim": {}}}, {"model": ["a"], "optimizer": []}),
        ({"net": {"a": torch.ones(2)}, "rng": torch.ones(2)}, {"net": ["a"], "rng": Ref(name="rng")}),
    ],
)
def test_sections_get_their_usual_names(tmp_path: Path, saved: Any, keys: dict[str, Any]) -> None:
    tree = opened(tmp_path / "a.pt", saved).tree
    assert {name: list(value) if isinstance(value, dict) else value for name, value in tree.items()} == keys


def test_what_is_ambiguous_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.pt.*'model'.*'state_dict'"):
        opened(tmp_path / "a.pt", {"model": {"a": torch.ones(2)}, "state_dict": {"a": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        opened(tmp_path / "a.pt", torch.ones(2))
    with pytest.raises(CheckpointError, match="model/1"):
        opened(tmp_path / "a.pt", {"model": {1: torch.ones(2), "1": torch.ones(2)}})
    group = {"params": [0, 1], "param_names": ["a", "a"]}
    with pytest.raises(CheckpointError, match="do not match"):
        opened(tmp_path / "a.pt", {"optimizer": {"state": {}, "param_groups": [group]}})


def test_what_is_read_as_something_else_is_said(tmp_path: Path) -> None:
    saved = {
        "model": {"w": torch.ones(1)},
        "a": np.float32([1, 2]),
        "deep": [{"s": {2, 1}}],
        "c": 1 + 2j,
        "n": np.int8(3),
    }
    catalogue = opened(tmp_path / "a.pt", saved)
    assert {key: catalogue.tree[key] for key in ("a", "deep", "c", "n")} == {
        "a": [1.0, 2.0],
        "deep": [{"s": [1, 2]}],
        "c": "(1+2j)",
        "n": 3,
    }
    assert catalogue.details["left_out"] == [
        "that a was a numpy array of float32: it is a list now",
        "that deep/0/s was a set: it is a list now",
        "that c was a complex number: it is a text now",
    ]
    assert "left_out" not in opened(tmp_path / "b.pt", {"model": {"w": torch.ones(1)}, "n": np.int8(3)}).details


def test_other_files_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        archive.writestr("x", b"")
    for path in (tmp_path, tmp_path / "a", tmp_path / "b", tmp_path / "missing"):
        assert not torchsave.recognise(path)


# --- writing --------------------------------------------------------------------------------------


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "t": (1, [2.5, None, "x"])}
    done: list[int] = []
    catalogue = opened(tmp_path / "a.pt", state)
    torchsave.write(catalogue, tmp_path / "b.pt", progress=done.append)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert bare(loaded["model"]) == bare(dict(model.state_dict()))
    assert bare(loaded["optimizer"]) == bare(optimizer.state_dict())
    assert (loaded["step"], loaded["t"]) == (7, (1, [2.5, None, "x"]))
    weights = loaded["model"]
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr(), "tied stays tied"
    assert sum(done) == sum(entry.nbytes for entry in catalogue.tensors.values())
    assert bare(read_tree(torchsave.open(tmp_path / "b.pt"))) == bare(read_tree(catalogue)), "there and back"

    again, second = Model(), None
    again.load_state_dict(loaded["model"])
    groups = [{"params": [p for p in again.parameters() if (p.ndim > 1) is large]} for large in (True, False)]
    second = torch.optim.AdamW(groups)
    second.load_state_dict(loaded["optimizer"])
    assert bare(second.state_dict()["state"]) == bare(optimizer.state_dict()["state"])


def test_the_archive_is_a_sound_zip(tmp_path: Path) -> None:
    catalogue = opened(tmp_path / "a.pt", {f"w{n}": torch.rand(n) for n in range(9)})
    torchsave.write(catalogue, tmp_path / "b.pt")
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None
    offsets = [entry.pieces[0].stored.offset for entry in torchsave.open(tmp_path / "b.pt").tensors.values()]
    assert [offset % 64 for offset in offsets] == [0] * 9
    mapped = torch.load(tmp_path / "b.pt", mmap=True)
    assert bare(mapped) == bare({"model": torch.load(tmp_path / "a.pt")})


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    line = torch.arange(48, dtype=torch.uint8)
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.uint16, torch.uint32,
             torch.float8_e4m3fn, torch.complex64, torch.int64]  # fmt: skip
    saved = {str(kind): (line % 2 if kind is torch.bool else line.clone()).view(kind) for kind in kinds}
    saved |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "strided": torch.arange(12.0).view(3, 4).T}
    torchsave.write(opened(tmp_path / "a.pt", saved), tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    assert {name: raw(t) for name, t in loaded.items()} == {name: raw(t) for name, t in saved.items()}


def test_records_of_the_long_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchsave, "_LARGE", 100)
    saved = {"small": torch.rand(3), "large": torch.rand(50)}
    torchsave.write(opened(tmp_path / "a.pt", saved), tmp_path / "b.pt")
    assert bare(torch.load(tmp_path / "b.pt", mmap=True)["model"]) == bare(saved)
    assert all(e.pieces[0].stored.offset % 64 == 0 for e in torchsave.open(tmp_path / "b.pt").tensors.values())


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path: Path) -> None:
    catalogue = opened(tmp_path / "a.pt", {"w": torch.rand(100)})
    with pytest.raises(UsageError, match=r"a\.pt"):
        torchsave.write(catalogue, tmp_path / "a.pt")

    def fail(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torchsave.write(catalogue, tmp_path / "b.pt", progress=fail)
    assert os.listdir(tmp_path) == ["a.pt"]
