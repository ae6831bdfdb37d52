"""torch.distributed.checkpoint, in and out; torch itself is the judge, on one rank and on two."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from holdfast.checkpoint.formats import dcp, dcp_write, torchsave
from holdfast.checkpoint.pieces import Catalogue, Ref
from holdfast.errors import CheckpointError
from tests.checkpoint.formats.helpers import Model, bare, on_ranks, raw, read_tree, sharded, trained

pytestmark = pytest.mark.filterwarnings("ignore")
STATE = {
    "model": {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {
        "state": {"a.weight": {"step": torch.tensor(2.0), "exp_avg": torch.rand(3, 4)}},
        "param_groups": [
            {"params": ["a.weight"], "lr": 0.1, "betas": (0.9, 0.99)},
            {"params": ["a.bias"], "lr": 0.2, "betas": (0.8, 0.99)},
        ],
    },
    "step": 7,
    "list": [1, [2, None]],
    "mixed": [torch.ones(2), {"x": b"y"}, "z"],
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 3),
    "pair": (1, torch.arange(3)),
}


def save(tree: Any, path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(tree, storage_writer=FileSystemWriter(path, **options))
    return path


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}])
def test_what_torch_saves(tmp_path: Path, options: dict[str, Any]) -> None:
    path = save(STATE, tmp_path / "dcp", **options)
    assert dcp.recognise(path)
    assert bare(read_tree(dcp.open(path))) == bare(STATE)


def test_torch_writes_tied_tensors_twice(tmp_path: Path) -> None:
    """So the names are two tensors, as far as a reader can tell."""
    model, _ = trained()
    catalogue = dcp.open(save({"model": model.state_dict()}, tmp_path / "a"))
    assert catalogue.tied == {}
    assert bare(read_tree(catalogue)) == bare({"model": dict(model.state_dict())})


def full_state(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    found = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": found[0], "optimizer": found[1], "step": 7}


def sharded_training() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sharded(Model())
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is large]} for large in (True, False)]
    optimizer = torch.optim.AdamW([{**groups[0], "weight_decay": 0.3}, groups[1]], lr=0.01)
    model(torch.randint(0, 7, (4,))).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints by FSDP2 on two ranks in several forms, and the state as torch itself gathers it."""
    folder = tmp_path_factory.mktemp("dcp")

    def work(rank: int) -> Any:
        model, optimizer = sharded_training()
        save(full_state(model, optimizer), folder / "nested")
        flat = full_state(model, optimizer, flatten_optimizer_state_dict=True)
        save(flat, folder / "flat")
        save({**flat["model"], "optimizer": flat["optimizer"], "train": {"step": 7}}, folder / "titan")
        save({"app": {"model": flat["model"], "optim": flat["optimizer"]}}, folder / "app")
        return full_state(model, optimizer, full_state_dict=True, cpu_offload=True)

    return folder, on_ranks(2, work, folder)[0]


def test_shards_of_two_ranks(by_two_ranks: tuple[Path, dict[str, Any]]) -> None:
    folder, state = by_two_ranks
    catalogue = dcp.open(folder / "nested")
    assert bare(read_tree(catalogue)) == bare(state)
    assert len(catalogue.tensors["model/layers.0.weight"].pieces) == 2
    assert set(catalogue.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.parametrize("form", ["flat", "titan", "app"])
def test_flat_optimizers_get_their_groups_back(by_two_ranks: tuple[Path, dict[str, Any]], form: str) -> None:
    folder, state = by_two_ranks
    found = read_tree(dcp.open(folder / form))
    assert bare(found["model"]) == bare(state["model"])
    assert bare(found["optimizer"]["state"]) == bare(state["optimizer"]["state"])
    groups = found["optimizer"]["param_groups"]
    assert {frozenset(g["params"]): g["weight_decay"] for g in groups} == {
        frozenset(g["params"]): g["weight_decay"] for g in state["optimizer"]["param_groups"]
    }
    assert [bare({k: v for k, v in g.items() if k != "params"}) for g in groups] == [
        bare({k: v for k, v in g.items() if k != "params"}) for g in state["optimizer"]["param_groups"]
    ]


def test_names_with_dots_in_slots(tmp_path: Path) -> None:
    flat = {"state.a.b.precond.0.L": torch.ones(2), "state.a.b.step": torch.tensor(1.0), "param_groups.a.b.lr": 0.5}
    found = read_tree(dcp.open(save({"model": {"a.b": torch.ones(2)}, "optimizer": flat}, tmp_path / "a")))
    assert bare(found["optimizer"]["state"]) == bare(
        {"a.b": {"precond": {"0": {"L": torch.ones(2)}}, "step": torch.tensor(1.0)}}
    )
    assert found["optimizer"]["param_groups"] == [{"params": ["a.b"], "lr": 0.5}]


def test_numbered_optimizers(tmp_path: Path) -> None:
    _, optimizer = trained(names=False)
    found = read_tree(dcp.open(save({"optimizer": optimizer.state_dict()}, tmp_path / "a")))
    assert bare(found["optimizer"]) == bare(optimizer.state_dict())
    _, optimizer = trained()
    found = read_tree(dcp.open(save({"optimizer": optimizer.state_dict()}, tmp_path / "b")))
    assert "norm.weight" in found["optimizer"]["state"]


def test_the_safetensors_form(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(3, dtype=torch.float16)}, "step": 7}
    path = save(tree, tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
    assert (path / "__0_0.distcp").read_bytes().find(b"DCP_SHARDING_INFO") > 0, "the control: no zips"
    found = dcp.open(path)
    assert bare(read_tree(found)) == bare(tree)


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save({f"w{n}": torch.tensor([n]) for n in range(300)}, tmp_path / "a")
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda file, *rest: opened.append(os.path.basename(file)) or real(file, *rest))
    dcp.open(path)
    assert sorted(opened) == [".metadata", "__0_0.distcp"]


# --- what must be refused -------------------------------------------------------------------------


@pytest.fixture
def damaged(by_two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path) -> Callable[[Callable[[Metadata], None]], Path]:
    """A copy of a checkpoint whose table has been changed."""

    def change(how: Callable[[Metadata], None]) -> Path:
        shutil.copytree(by_two_ranks[0] / "nested", tmp_path / "copy")
        table = pickle.loads((tmp_path / "copy" / ".metadata").read_bytes())
        how(table)
        (tmp_path / "copy" / ".metadata").write_bytes(pickle.dumps(table))
        return tmp_path / "copy"

    return change


W = "model.layers.0.weight"


def lose_part(table: Metadata) -> None:
    del table.state_dict_metadata[W].chunks[1]


def double_part(table: Metadata) -> None:
    table.state_dict_metadata[W].chunks.append(table.state_dict_metadata[W].chunks[0])


def move_part(table: Metadata) -> None:
    table.state_dict_metadata[W].chunks[1] = ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([2, 5]))
    table.storage_data[MetadataIndex(W, (4, 0))] = table.storage_data[MetadataIndex(W, (3, 0))]


def lose_place(table: Metadata) -> None:
    del table.storage_data[MetadataIndex(W, (3, 0))]


def lie_about_shape(table: Metadata) -> None:
    table.storage_data[MetadataIndex(W, (3, 0))] = table.storage_data[MetadataIndex(W, (0, 0))]


def lie_about_dtype(table: Metadata) -> None:
    table.state_dict_metadata[W].properties.dtype = torch.int32


def point_outside(table: Metadata) -> None:
    table.storage_data[MetadataIndex(W, (0, 0))].relative_path = "../nested/__0_0.distcp"


def point_nowhere(table: Metadata) -> None:
    table.storage_data[MetadataIndex(W, (0, 0))].relative_path = "__7_0.distcp"


def point_beyond(table: Metadata) -> None:
    table.storage_data[MetadataIndex(W, (0, 0))].length += 1 << 30


def compress(table: Metadata) -> None:
    table.storage_data[MetadataIndex(W, (0, 0))].transform_descriptors = ["stream.zstd"]


def lose_list_item(table: Metadata) -> None:
    name = "optimizer.param_groups.0.lr"
    keys = [key for key in table.planner_data if key.startswith("optimizer.param_groups.0.")]
    assert name in keys
    for key in keys:
        del table.state_dict_metadata[key]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (lose_part, rf"parts of {W} are missing, 15 of 25"),
        (double_part, rf"two parts of {W} overlap"),
        (move_part, rf"a part of {W} at \(4, 0\)"),
        (lose_place, rf"does not say where {W} at \(3, 0\) is"),
        (lie_about_shape, rf"{W} at \(3, 0\) is torch.float32 of shape \(3, 5\)"),
        (lie_about_dtype, rf"{W} at \(0, 0\) is torch.float32"),
        (point_outside, "outside of its folder"),
        (point_nowhere, rf"__7_0.distcp, which holds {W}, is missing"),
        (point_beyond, rf"__0_0.distcp at byte \d+ \({W}\) should have"),
        (compress, rf"{W} is stored through \['stream.zstd'\]"),
        (lose_list_item, r"a list has only the places \[1\]"),
    ],
)
def test_a_wrong_table_is_refused_by_name(damaged: Any, how: Any, match: str) -> None:
    path = damaged(how)
    with pytest.raises(CheckpointError, match=match):
        dcp.open(path)


def test_the_copy_itself_is_sound(damaged: Any, by_two_ranks: tuple[Path, dict[str, Any]]) -> None:
    """The control of the tests around this."""
    assert bare(read_tree(dcp.open(damaged(lambda table: None)))) == bare(by_two_ranks[1])


def test_missing_and_cut_files(damaged: Any) -> None:
    path = damaged(lambda table: None)
    data = (path / "__1_0.distcp").read_bytes()
    (path / "__1_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        dcp.open(path)
    (path / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        dcp.open(path)
    (path / ".metadata").unlink()
    assert dcp.recognise(path)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        dcp.open(path)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_payloads_in_the_table_and_in_objects(tmp_path: Path) -> None:
    path = save({"w": torch.ones(2), "x": Evil(tmp_path / "marker")}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*\(x\).*posix\.system"):
        dcp.open(path)
    (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "marker")))
    with pytest.raises(CheckpointError, match=r"\.metadata.*posix\.system"):
        dcp.open(path)
    (path / ".metadata").write_bytes(pickle.dumps({"no": "table"}))
    with pytest.raises(CheckpointError, match="not a table of DCP"):
        dcp.open(path)
    assert not (tmp_path / "marker").exists()


# --- writing --------------------------------------------------------------------------------------


def zeros(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {key: zeros(value) for key, value in node.items()}
    return [zeros(value) for value in node] if isinstance(node, list) else type(node)() if node is not None else None


def catalogue_of(tree: Any, folder: Path) -> Catalogue:
    torch.save(tree, folder / "source.pt")
    return torchsave.open(folder / "source.pt")


@pytest.mark.parametrize("part", [1 << 20, 16])
def test_torch_loads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(dcp_write, "PART", part)
    catalogue = catalogue_of(STATE, tmp_path)
    done: list[int] = []
    dcp.write(catalogue, tmp_path / "out", progress=done.append)
    into = {**zeros(STATE), "pair": ()}
    torch_dcp.load(into, checkpoint_id=tmp_path / "out")
    assert bare(into) == bare(STATE)
    assert sum(done) == sum(entry.nbytes for entry in catalogue.tensors.values())
    again = dcp.open(tmp_path / "out")
    assert bare(read_tree(again)) == bare(STATE), "there and back"
    assert len(again.tensors["model/a.weight"].pieces) == (1 if part > 16 else 3)


def test_tied_tensors_are_written_once_and_load_under_both_names(tmp_path: Path) -> None:
    model, _ = trained()
    catalogue = catalogue_of({"model": model.state_dict()}, tmp_path)
    dcp.write(catalogue, tmp_path / "out")
    assert dcp.open(tmp_path / "out").tied == {"head.weight": "embed.weight"}
    into = {"model": zeros(dict(model.state_dict()))}
    torch_dcp.load(into, checkpoint_id=tmp_path / "out")
    assert bare(into["model"]) == bare(dict(model.state_dict()))


def test_two_ranks_load_it_into_fsdp(by_two_ranks: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, state = by_two_ranks
    dcp.write(dcp.open(folder / "nested"), tmp_path / "out")

    def work(rank: int) -> Any:
        model, optimizer = sharded_training()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        into = full_state(model, optimizer)
        into["step"] = 0
        torch_dcp.load(into, checkpoint_id=tmp_path / "out")
        set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        found = full_state(model, optimizer, full_state_dict=True, cpu_offload=True)
        return {**found, "step": into["step"]}

    assert bare(on_ranks(2, work, tmp_path)[0]) == bare(state)


def test_empty_dicts_are_kept_and_torch_does_not_mind(tmp_path: Path) -> None:
    catalogue = catalogue_of({"model": {"w": torch.ones(2)}, "empty": {}, "deep": {"in": {}, "x": 1}}, tmp_path)
    dcp.write(catalogue, tmp_path / "out")
    assert dcp.open(tmp_path / "out").tree == catalogue.tree
    into: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "empty": {}, "deep": {"in": {}, "x": 0}}
    torch_dcp.load(into, checkpoint_id=tmp_path / "out")
    assert into["model"]["w"].tolist() == [1, 1]
    assert into["deep"] == {"in": {}, "x": 1}


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    catalogue = catalogue_of({"a": {"b": 1}, "a.b": 2, "model": {"w": torch.ones(1)}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"a\.b"):
        dcp.write(catalogue, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source.pt"], "nothing half written stays"


def test_references_in_tuples(tmp_path: Path) -> None:
    catalogue = catalogue_of({"pair": (torch.ones(2), [torch.zeros(3)])}, tmp_path)
    assert isinstance(catalogue.tree["pair"][0], Ref)
    dcp.write(catalogue, tmp_path / "out")
    found = read_tree(dcp.open(tmp_path / "out"))
    assert raw(found["pair"][1][0]) == raw(torch.zeros(3))
