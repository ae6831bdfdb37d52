"""From format to format: the same bytes, whole or not at all, in little memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint import convert, load, open_checkpoint, save
from holdfast.checkpoint.convert import TARGETS, cast, left_behind, select
from holdfast.checkpoint.diff import Comparison
from holdfast.checkpoint.pieces import Catalogue
from holdfast.checkpoint.verify import verify
from holdfast.errors import CheckpointError, UsageError
from tests.checkpoint.child import cap, in_child

MB = 1 << 20


class Model(nn.Module):
    """A tied, a frozen, an empty and a scalar tensor, a buffer, and sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.ones(0, 3), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(3, 3).t(), requires_grad=False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x))) * self.scale


def made(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 7, "data": {"epoch": 1, "names": ["a", None]}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(tmp_path / "source", made())
    return tmp_path / "source"


def same(a: Path, b: Path) -> bool:
    return Comparison(open_checkpoint(a), open_checkpoint(b)).run().same


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", TARGETS)
def test_there_and_back(source: Path, tmp_path: Path, to: str) -> None:
    convert.convert(open_checkpoint(source), tmp_path / "there", to)
    assert open_checkpoint(tmp_path / "there").format == to
    assert same(source, tmp_path / "there")
    convert.convert(open_checkpoint(tmp_path / "there"), tmp_path / "back", "holdfast")
    assert same(source, tmp_path / "back")
    assert verify(open_checkpoint(tmp_path / "back")).ok
    into = made(seed=1) if to != "hf" else {"model": made(seed=1)["model"]}
    load(tmp_path / "back", into)
    assert all(torch.equal(a, b) for a, b in zip(into["model"].parameters(), made()["model"].parameters(), strict=True))


def test_all_that_was_saved_is_kept(source: Path, tmp_path: Path) -> None:
    convert.convert(open_checkpoint(source), tmp_path / "copy", "holdfast")
    a, b = open_checkpoint(source), open_checkpoint(tmp_path / "copy")
    assert (a.tree, a.tied, a.frozen, a.buffers) == (b.tree, b.tied, b.frozen, b.buffers)
    assert a.tied == {"head.weight": "embed.weight"}
    assert {n: (e.shape, e.dtype) for n, e in a.tensors.items()} == {
        n: (e.shape, e.dtype) for n, e in b.tensors.items()
    }
    assert b.details["converted_from"] == "holdfast"


def test_every_dtype(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool, torch.uint16, torch.complex64]
    tensors = {str(k): torch.arange(-3, 1000).to(torch.float32).to(k) for k in kinds}
    save(tmp_path / "a", {"model": tensors})
    convert.convert(open_checkpoint(tmp_path / "a"), tmp_path / "b", "holdfast")
    assert same(tmp_path / "a", tmp_path / "b")


def test_several_data_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "FILE", 200)
    convert.convert(open_checkpoint(source), tmp_path / "split", "holdfast")
    assert len(open_checkpoint(tmp_path / "split").files) > 3
    assert same(source, tmp_path / "split")


def test_cast_rounds_the_models_floats_alone(source: Path, tmp_path: Path) -> None:
    convert.convert(cast(open_checkpoint(source), "bf16"), tmp_path / "half", "holdfast")
    into = load(tmp_path / "half", {"model": {}, "optimizer": {}})
    expected = made()["model"].state_dict()
    for name, tensor in into["model"].items():
        assert torch.equal(tensor, expected[name].bfloat16() if expected[name].is_floating_point() else expected[name])
    assert into["optimizer"]["state"]["layer.weight"]["exp_avg"].dtype == torch.float32
    with pytest.raises(UsageError, match="int3"):
        cast(open_checkpoint(source), "int3")


def test_sections(source: Path, tmp_path: Path) -> None:
    convert.convert(select(open_checkpoint(source), ["model", "step"]), tmp_path / "part", "holdfast")
    part = open_checkpoint(tmp_path / "part")
    assert list(part.tree) == ["model", "step"]
    assert all(name.startswith("model/") for name in part.tensors)
    with pytest.raises(CheckpointError, match="'ema'"):
        select(open_checkpoint(source), ["ema"])


# --- what is left out is named --------------------------------------------------------------------


def test_what_a_format_cannot_hold(source: Path) -> None:
    catalogue = open_checkpoint(source)
    marks = "the marks of 2 frozen parameters and 1 buffer"
    assert left_behind(catalogue, "holdfast") == left_behind(catalogue, "deepspeed-universal") == []
    assert left_behind(catalogue, "torch") == left_behind(catalogue, "dcp") == [marks]
    assert left_behind(catalogue, "hf") == ["optimizer (12 tensors)", "step", "data", marks]
    with pytest.raises(CheckpointError, match="has no model"):
        left_behind(select(catalogue, ["step"]), "hf")
    with pytest.raises(UsageError, match="'megatron'"):
        left_behind(catalogue, "megatron")


def test_that_deepspeed_makes_float32_of_halves_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    save(tmp_path / "a", {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    assert left_behind(open_checkpoint(tmp_path / "a"), "deepspeed-universal") == [
        "the dtype of 2 tensors, as model/weight (they become float32)"
    ]


def test_what_becomes_something_else_is_said(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.ones(2)}, "rng": np.arange(3, dtype=np.uint32), "seen": {0: "a", "b": {}}, "empty": {}}
    save(tmp_path / "a", tree)
    catalogue = open_checkpoint(tmp_path / "a")
    numpy = "the marks of 1 numpy array, as rng (they become tensors)"
    assert convert.convert(catalogue, tmp_path / "a.pt", "torch") == [numpy]
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (loaded["rng"].dtype, loaded["rng"].tolist()) == (torch.uint32, [0, 1, 2])
    assert (loaded["seen"], loaded["empty"]) == (tree["seen"], {})
    keys = "the type of 1 key, as seen/0 (they become texts)"
    assert convert.convert(catalogue, tmp_path / "dcp", "dcp") == [numpy, keys]
    again = open_checkpoint(tmp_path / "dcp")
    assert {key: again.tree[key] for key in ("seen", "empty")} == {"seen": {"0": "a", "b": {}}, "empty": {}}
    assert again.tensors["rng"].dtype == torch.uint32
    assert left_behind(catalogue, "holdfast") == []


def stages(path: Path, ranks: int) -> Catalogue:
    """An optimizer as two pipeline stages have saved it that hold every other layer, one after the other."""
    model = nn.ModuleDict({str(number): nn.Linear(2, 2, bias=False) for number in (0, 2, 1, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, layer in model.items():
        layer.weight.grad = torch.full((2, 2), float(number))
    optimizer.step()
    save(path, {"model": model, "optimizer": optimizer})
    catalogue = open_checkpoint(path)
    catalogue.details["ranks"] = ranks
    return catalogue


@pytest.mark.parametrize("sections", [["model", "optimizer"], ["optimizer"]])
def test_optimizers_of_several_ranks_are_numbered_in_the_models_order(tmp_path: Path, sections: list[str]) -> None:
    lost = convert.convert(select(stages(tmp_path / "a", 2), sections), tmp_path / "a.pt", "torch")
    assert len(lost) == 1
    assert lost[0].startswith(
        "the order in which 2 ranks had the optimizer's parameters (torch loads optimizers by pos"
    )
    model = nn.ModuleDict({str(number): nn.Linear(2, 2, bias=False) for number in range(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"])
    assert [optimizer.state[layer.weight]["momentum_buffer"][0, 0].item() for layer in model.values()] == [0, 1, 2, 3]


def test_the_order_of_one_rank_is_its_own(tmp_path: Path) -> None:
    assert convert.convert(stages(tmp_path / "a", 1), tmp_path / "a.pt", "torch") == []
    groups = torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["param_names"] == ["0.weight", "2.weight", "1.weight", "3.weight"]


def test_values_that_our_index_cannot_hold(source: Path, tmp_path: Path) -> None:
    catalogue = open_checkpoint(source)
    catalogue.tree["args"] = {"device": torch.device("cpu"), "lr": 0.1, "list": [1, torch.device("cpu")]}
    assert convert.convert(catalogue, tmp_path / "b", "holdfast") == [
        "args/device, which is not a plain value",
        "args/list/1, which is not a plain value",
    ]
    made = open_checkpoint(tmp_path / "b")
    assert made.tree["args"] == {"lr": 0.1, "list": [1, None]}
    assert made.details["left_out"] == ["args/device", "args/list/1"]


# --- whole or not at all --------------------------------------------------------------------------


def test_what_is_there_is_not_replaced_unless_asked(source: Path, tmp_path: Path) -> None:
    convert.convert(open_checkpoint(source), tmp_path / "b", "holdfast")
    with pytest.raises(UsageError, match="--overwrite"):
        convert.convert(open_checkpoint(source), tmp_path / "b", "hf")
    save(tmp_path / "other", {"model": {"w": torch.ones(3)}})
    convert.convert(open_checkpoint(tmp_path / "other"), tmp_path / "b", "hf", overwrite=True)
    assert open_checkpoint(tmp_path / "b").format == "hf"
    assert same(tmp_path / "other", tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["b", "other", "source"]


def test_of_a_link_only_the_link_is_replaced(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "real", {"step": 1})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert.convert(open_checkpoint(source), tmp_path / "link", "holdfast", overwrite=True)
    assert same(source, tmp_path / "link")
    assert open_checkpoint(tmp_path / "real").tree == {"step": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "source"]


def test_what_is_no_checkpoint_or_is_the_source_is_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    for place, said in ((tmp_path / "home", "is not a checkpoint"), (source, "holds what is to be converted")):
        with pytest.raises(UsageError, match=said):
            convert.convert(open_checkpoint(source), place, "holdfast", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()
    assert verify(open_checkpoint(source)).ok


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_source_leaves_the_old_or_nothing(source: Path, tmp_path: Path, to: str, overwrite: bool) -> None:
    if overwrite:
        save(tmp_path / "b", {"model": {"w": torch.ones(3)}})
    catalogue = open_checkpoint(source)
    path = next(source.glob("data-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="is damaged"):
        convert.convert(catalogue, tmp_path / "b", to, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == (["b", "source"] if overwrite else ["source"])
    if overwrite:
        assert verify(open_checkpoint(tmp_path / "b")).ok


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 240 MB: one tensor of 200 MB, and another one."""
    folder = tmp_path_factory.mktemp("large") / "a"

    def work() -> None:
        tensors = {"large": torch.arange(50 * MB, dtype=torch.int32), "other": torch.ones(10 * MB, dtype=torch.int32)}
        save(folder, {"model": tensors, "step": 1})

    in_child(work)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 240_000_000
    return folder


def cap_memory() -> None:
    cap(resource.RLIMIT_AS, "VmSize", 150 * MB)


def test_the_cap_holds() -> None:
    def work() -> None:
        cap_memory()
        with pytest.raises(MemoryError):
            np.ones(200 * MB, dtype=np.uint8)

    in_child(work)


@pytest.mark.parametrize("to", ["holdfast", "hf", "dcp", "torch"])
def test_a_checkpoint_larger_than_memory(large: Path, tmp_path: Path, to: str) -> None:
    def work() -> None:
        cap_memory()
        convert.convert(open_checkpoint(large), tmp_path / "b", to)

    in_child(work)
    made = open_checkpoint(tmp_path / "b")
    assert sum(entry.nbytes for entry in made.tensors.values()) > 240_000_000
    assert verify(made).ok


def test_a_foreign_file_larger_than_memory(tmp_path: Path) -> None:
    in_child(lambda: torch.save({"w": torch.arange(50 * MB, dtype=torch.int32)}, tmp_path / "a.pt"))

    def work() -> None:
        cap_memory()
        convert.convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / "b", "hf")

    in_child(work)
    w = open_checkpoint(tmp_path / "b").tensors["model/w"]
    assert w.nbytes == 200 * MB


def test_comparing_and_checking_under_the_cap(large: Path) -> None:
    def work() -> None:
        cap_memory()
        catalogue = open_checkpoint(large)
        assert Comparison(catalogue, open_checkpoint(large)).run().same
        assert verify(catalogue).ok

    in_child(work)
