"""Megatron's folders, hand-made: whatever the layout, the whole comes out."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint.formats import megatron
from holdfast.checkpoint.formats.megatron_dist import unflattened, unstacked
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, Stored, TensorEntry
from holdfast.checkpoint.rules import Rule, Rules, Shard, copies
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import CheckpointError, UsageError
from tests.checkpoint.formats.helpers import bare, raw, read_tree
from tests.checkpoint.formats.megatron_files import Layout, master, slot, whole, write

LAYOUTS = {
    "one rank": Layout(),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
    "tp x pp": Layout(tp=2, pp=2, tied=True, half=True),
    "virtual stages": Layout(pp=2, virtual=2, tied=True),
    "old names": Layout(tp=2, pp=2, old=True, gated=False, tied=True),
    "old order of heads": Layout(tp=2, old=True, version=0),
    "old order of heads, next version": Layout(tp=2, old=True, version=1.0),
    "experts": Layout(ep=2, experts=4, tied=True),
    "tp x pp x experts": Layout(tp=2, pp=2, ep=2, experts=4, gated=False),
}


@pytest.mark.parametrize("which", LAYOUTS)
def test_the_whole_comes_out(tmp_path: Path, which: str) -> None:
    layout = LAYOUTS[which]
    tensors = whole(layout)
    write(tmp_path, layout, tensors)
    assert megatron.recognise(tmp_path)
    tree = read_tree(megatron.open(tmp_path))
    weights = {name: master(name, tensors) for name in tensors} if layout.half else tensors
    assert bare_in_order(tree["model"]) == bare_in_order(weights)
    state = {name: {"exp_avg": slot(name, tensors), "kind": "adam"} for name in tensors}
    assert bare_in_order(tree["optimizer"]["state"]) == bare_in_order(state)
    groups = tree["optimizer"]["param_groups"]
    assert [set(group["params"]) for group in groups] == [
        {n for n in tensors if (tensors[n].ndim > 1) is d} for d in (True, False)
    ]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    assert (tree["step"], tree["opt_param_scheduler"]) == (5, {"num_steps": 20})
    assert tree["megatron"]["args"]["tensor_model_parallel_size"] == layout.tp


def bare_in_order(tree: Mapping[str, Any]) -> Any:
    return bare({name: tree[name] for name in sorted(tree)})


def test_copies_are_known(tmp_path: Path) -> None:
    layout = LAYOUTS["tp x pp"]
    catalogue = megatron.open(write(tmp_path, layout, whole(layout)))
    pairs = {name: len(copies(entry)) for name, entry in catalogue.tensors.items()}
    assert pairs["model/decoder.layers.3.input_layernorm.weight"] == 1
    assert pairs["model/embedding.word_embeddings.weight"] == 2  # two parts, each on the first and the last stage
    assert pairs["model/decoder.layers.3.mlp.linear_fc1.weight"] == 0
    assert catalogue.details["tp"] == catalogue.details["pp"] == 2


def test_a_runs_folder_leads_to_its_newest_iteration(tmp_path: Path) -> None:
    layout = Layout(layers=1)
    write(tmp_path / "iter_0000005", layout, whole(layout))
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("5\n")
    assert megatron.recognise(tmp_path)
    assert megatron.open(tmp_path).root == tmp_path / "iter_0000005"
    shutil.copytree(tmp_path / "iter_0000005", tmp_path / "release")
    latest.write_text("release")
    assert megatron.open(tmp_path).root == tmp_path / "release"
    assert set(megatron.open(tmp_path).files) == {
        f"../{latest.name}",
        "mp_rank_00/model_optim_rng.pt",
    }
    for text in ("../iter_0000005", "..", "", "/", "\u00b2", "9" * 5000):
        latest.write_text(text)
        with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt says"):
            megatron.open(tmp_path)
    latest.write_text("6")
    with pytest.raises(CheckpointError, match=r"iter_0000006"):
        megatron.open(tmp_path)
    latest.write_text("soon")
    with pytest.raises(CheckpointError, match="'soon'"):
        megatron.open(tmp_path)


def test_other_folders_are_not_recognised(tmp_path: Path) -> None:
    assert not megatron.recognise(tmp_path)
    assert not megatron.recognise(tmp_path / "none")
    (tmp_path / "mp_rank_00").mkdir()
    assert not megatron.recognise(tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of Megatron"):
        megatron.open(tmp_path)


# --- what is missing or strange -------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["mp_rank_00_000", "mp_rank_01_001", "mp_rank_01_000"])
def test_a_missing_file_is_named(tmp_path: Path, lost: str) -> None:
    layout = Layout(tp=2, pp=2)
    write(tmp_path, layout, whole(layout))
    shutil.rmtree(tmp_path / lost)
    with pytest.raises(CheckpointError, match=rf"{lost}/model_optim_rng\.pt"):
        megatron.open(tmp_path)


def test_a_file_of_another_layout_is_named(tmp_path: Path) -> None:
    write(tmp_path, Layout(tp=2), whole(Layout()))
    shutil.copytree(tmp_path / "mp_rank_01", tmp_path / "mp_rank_02")
    with pytest.raises(CheckpointError, match=r"mp_rank_02/model_optim_rng\.pt.*tp 2 x pp 1 x ep 1"):
        megatron.open(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, Layout(tp=2), whole(Layout()))
    file = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng\.pt"):
        megatron.open(tmp_path)


def test_an_unknown_tensor_is_refused_until_a_rule_knows_it(tmp_path: Path) -> None:
    layout, tensors = (
        Layout(tp=2),
        {**whole(Layout()), "decoder.layers.0.self_attention.novel.weight": torch.ones(4, 4)},
    )
    write(tmp_path, layout, tensors)
    with pytest.raises(CheckpointError, match=r"model/decoder\.layers\.0\.self_attention\.novel\.weight"):
        megatron.open(tmp_path)
    rules = Rules.from_yaml(r"- {match: 'model/.*\.novel\.weight', replicate: {}}")
    catalogue = megatron.open(tmp_path, rules=rules)
    assert catalogue.tensors["model/decoder.layers.0.self_attention.novel.weight"].shape == (4, 4)
    with pytest.raises(UsageError, match="matches no tensor"):
        megatron.open(tmp_path, rules=Rules([*rules.rules, Rule(match="model/none", pattern=Shard(dim=0))]))


def test_an_mlp_of_strange_size_is_not_guessed_at(tmp_path: Path) -> None:
    tensors = {**whole(Layout()), "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(12, 4)}
    write(tmp_path, Layout(tp=2), tensors)
    with pytest.raises(CheckpointError, match=r"model/decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
        megatron.open(tmp_path)


def test_rules_come_before_the_built_in_ones(tmp_path: Path) -> None:
    """A vocabulary without its padding, and fused heads in another order."""
    layout, tensors = Layout(tp=2), whole(Layout())
    write(tmp_path, layout, tensors)
    rules = Rules.from_yaml(
        r"""
        - match: 'model/(embedding\.word_embeddings|output_layer)\.weight'
          shard: {dim: 0, size: 13}
        - match: 'model/(.*)\.linear_qkv\.(.*)'
          rename: 'model/\1.qkv.\2'
          shard: {dim: 0, parts: [8, 2, 2], groups: 2}
        """
    )
    tree = read_tree(megatron.open(tmp_path, rules=rules))
    assert raw(tree["model"]["output_layer.weight"]) == raw(tensors["output_layer.weight"][:13])
    assert tree["optimizer"]["state"]["output_layer.weight"]["exp_avg"].shape == (13, 4)
    groups = tensors["decoder.layers.1.self_attention.linear_qkv.weight"].view(2, 6, 4)
    apart = torch.cat([groups[:, rows].reshape(-1, 4) for rows in (slice(0, 4), slice(4, 5), slice(5, 6))])
    assert raw(tree["model"]["decoder.layers.1.self_attention.qkv.weight"]) == raw(apart)
    assert "decoder.layers.1.self_attention.qkv.weight" in tree["optimizer"]["param_groups"][0]["params"]
    assert tree["optimizer"]["state"]["decoder.layers.1.self_attention.qkv.bias"]["kind"] == "adam"


# --- optimizers that cannot be named --------------------------------------------------------------

ODD: dict[str, tuple[Any, str]] = {
    "chain": ([{}, {}], "has a chain of optimizers"),
    "distributed": ({"optimizer": {"param_groups": [{"lr": 0.1}]}}, "distributed among data-parallel ranks"),
    "count": (
        {"state": {}, "param_groups": [{"params": [0, 1]}]},
        r"has 2 parameters in a group where the model has \d+",
    ),
    "groups": (
        {"state": {}, "param_groups": [{"params": [0], "wd_mult": 1.0}, {"params": [1], "wd_mult": 1.0}]},
        "has 2 groups of parameters",
    ),
}


@pytest.mark.parametrize("which", ODD)
def test_what_cannot_be_named_is_left_out_with_the_reason(tmp_path: Path, which: str) -> None:
    optimizer, reason = ODD[which]
    catalogue = megatron.open(write(tmp_path, Layout(tp=2), whole(Layout()), optimizer=optimizer))
    assert "optimizer" not in catalogue.tree
    assert list(catalogue.tree["model"]) == list(whole(Layout()))
    (said,) = {line.replace("mp_rank_01", "mp_rank_00") for line in catalogue.details["left_out"]}
    assert said.startswith("optimizer: mp_rank_00/model_optim_rng.pt ")
    assert re.search(reason, said)


def test_shapes_show_that_the_order_is_another(tmp_path: Path) -> None:
    tensors = whole(Layout())
    write(tmp_path, Layout(), tensors)
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    states = torch.load(file, weights_only=False)
    state = states["optimizer"]["state"]
    state[0], state[1] = state[1], state[0]  # embeddings of words and of positions
    torch.save(states, file)
    catalogue = megatron.open(tmp_path)
    assert "optimizer" not in catalogue.tree
    assert "embedding.word_embeddings.weight is (16, 4)" in str(catalogue.details)


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Layout(tp=2), whole(Layout()))
    file = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    states = torch.load(file, weights_only=False)
    states["optimizer"]["param_groups"][0]["lr"] = 0.2
    torch.save(states, file)
    with pytest.raises(CheckpointError, match="disagree on the settings"):
        megatron.open(tmp_path)


def test_random_numbers_and_extra_states_are_left_out_by_name(tmp_path: Path) -> None:
    tensors = {**whole(Layout()), "decoder.final_layernorm._extra_state": torch.zeros(3, dtype=torch.uint8)}
    catalogue = megatron.open(write(tmp_path, Layout(), tensors, optimizer=None, rng_state=[{"a": torch.ones(2)}]))
    assert "decoder.final_layernorm._extra_state" not in catalogue.tree["model"]
    assert [line.split(":")[0] for line in catalogue.details["left_out"]] == [
        "the extra states of modules (..._extra_state)",
        "rng_state",
    ]


# --- torch_dist -----------------------------------------------------------------------------------


def write_dist(path: Path, items: dict[str, Any], common: dict[str, Any], backend: str = "torch_dist") -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(items, checkpoint_id=path)
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    return path


GROUPS = [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": 0.1}]


def test_torch_dist_with_stacked_layers(tmp_path: Path) -> None:
    weight, norm = torch.randn(3, 4, 2), torch.randn(3, 4)
    items = {
        "decoder.layers.mlp.linear_fc2.weight": weight.bfloat16(),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": norm.bfloat16(),
        "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight": weight,
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": weight + 1,
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight": norm + 1,
        "rng_state/shard_0_1": [{"seed": 3}],
        "decoder.layers.mlp.linear_fc2._extra_state/shard_0_3": [None],
    }
    inner = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": GROUPS}
    path = write_dist(tmp_path / "a", items, {"iteration": 9, "optimizer": {"optimizer": inner}, "x": 1})
    assert megatron.recognise(path)
    catalogue = megatron.open(path)
    tree = read_tree(catalogue)
    weights = {f"decoder.layers.{i}.mlp.linear_fc2.weight": weight[i] for i in range(3)}
    norms = {f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight": norm[i] for i in range(3)}
    halves = {name: one.bfloat16() for name, one in norms.items()}
    assert bare_in_order(tree["model"]) == bare_in_order({**weights, **halves})
    state = {n: {"exp_avg": one + 1, "step": torch.tensor(3.0)} for n, one in {**weights, **norms}.items()}
    assert bare_in_order(tree["optimizer"]["state"]) == bare_in_order(state)
    assert [group["params"] for group in tree["optimizer"]["param_groups"]] == [list(weights), list(norms)]
    assert (tree["step"], tree["megatron"]) == (9, {"x": 1, "args": {}})
    assert catalogue.details["left_out"] == ["rng_state: what each rank has of it"]


def test_torch_dist_needs_no_rules_but_renames(tmp_path: Path) -> None:
    items = {"a.weight": torch.ones(2, 2), "optimizer.state.exp_avg.a.weight": torch.zeros(2, 2)}
    optimizer = {"state": {"common_step": 4}, "param_groups": [{"lr": 0.1}]}
    path = write_dist(tmp_path / "a", items, {"optimizer": optimizer})
    tree = read_tree(megatron.open(path, rules=Rules([Rule(match=r"model/a\.(.*)", rename=r"model/b.\1")])))
    assert list(tree["model"]) == ["b.weight"]
    assert list(tree["optimizer"]["state"]) == ["b.weight"]
    assert tree["optimizer"]["state"]["b.weight"]["step"] == 4
    assert tree["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["b.weight"]}]
    with pytest.raises(UsageError, match="known without rules"):
        megatron.open(path, rules=Rules([Rule(match=".*", pattern=Shard(dim=0))]))


def test_torch_dist_that_cannot_be_read_whole(tmp_path: Path) -> None:
    weight = {"a.weight": torch.ones(2, 2)}
    bucket = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.zeros(9)}
    catalogue = megatron.open(write_dist(tmp_path / "buckets", {**weight, **bucket}, {}))
    assert list(catalogue.tensors) == ["model/a.weight"]
    assert "buckets" in catalogue.details["left_out"][0]
    alone = {"optimizer.state.exp_avg.b.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"b\.weight"):
        megatron.open(write_dist(tmp_path / "alone", {**weight, **alone}, {}))
    with pytest.raises(CheckpointError, match="zarr"):
        megatron.open(write_dist(tmp_path / "zarr", weight, {}, backend="zarr"))
    states = {"optimizer.state.exp_avg.a.weight": torch.ones(2, 2)}
    groups = [{"lr": 0.1}, {"lr": 0.2}]
    common = {"optimizer": {"state": {}, "param_groups": groups}}
    catalogue = megatron.open(write_dist(tmp_path / "groups", {**weight, **states}, common))
    assert "optimizer" not in catalogue.tree
    assert "has 2 groups of parameters" in catalogue.details["left_out"][0]


def test_stacked_layers_are_taken_apart_piece_by_piece(tmp_path: Path) -> None:
    """Three layers of (2, 4): the first two in one piece, of the last each half of the columns."""
    tensor = torch.randn(3, 2, 4)
    (tmp_path / "f").write_bytes(tensor.numpy().tobytes())
    stored = Stored(file="f", offset=0, dtype=torch.float32, shape=(3, 2, 4), strides=(8, 4, 1))
    boxes = [((0, 0, 0), (2, 2, 4)), ((2, 0, 0), (1, 2, 2)), ((2, 0, 2), (1, 2, 2))]
    pieces = (Box(offset=offset, shape=shape) for offset, shape in boxes)
    entry = TensorEntry(
        shape=(3, 2, 4), dtype=torch.float32, pieces=tuple(Piece(box=b, stored=stored.part(b)) for b in pieces)
    )
    made = dict(unstacked("decoder.layers.w", entry))
    catalogue = Catalogue(format="x", root=tmp_path, tensors=made, files={"f": DataFile(bytes=96)})
    for i in range(3):
        assert raw(read_tensor(catalogue, f"decoder.layers.{i}.w")) == raw(tensor[i])


def test_parts_that_were_flattened_get_their_shape_back(tmp_path: Path) -> None:
    """A (4, 6) tensor in parts of (2, 3), each flattened and cut into two ranges."""
    tensor = torch.randn(4, 6)
    parts = tensor.view(2, 2, 2, 3).permute(0, 2, 1, 3).reshape(2, 2, 6).contiguous()
    (tmp_path / "f").write_bytes(parts.numpy().tobytes())
    pieces = []
    for i in range(2):
        for j in range(2):
            for start, stop in ((0, 4), (4, 6)):
                at = 4 * ((i * 2 + j) * 6 + start)
                shape = (1, 1, stop - start)
                stored = Stored(file="f", offset=at, dtype=torch.float32, shape=shape, strides=(1, 1, 1))
                pieces.append(Piece(box=Box(offset=(i, j, start), shape=shape), stored=stored))
    entry = TensorEntry(shape=(2, 2, 6), dtype=torch.float32, pieces=tuple(pieces))
    made = unflattened(entry, (4, 6), "w")
    catalogue = Catalogue(format="x", root=tmp_path, tensors={"w": made}, files={"f": DataFile(bytes=96)})
    assert raw(read_tensor(catalogue, "w")) == raw(tensor)
    for shape in ((4, 5), (24,), (4, 12)):
        with pytest.raises(CheckpointError, match=r"w.*\(2, 2, 6\)"):
            unflattened(entry, shape, "w")
