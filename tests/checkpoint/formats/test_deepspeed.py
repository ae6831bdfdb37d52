"""DeepSpeed's layouts in miniature, made by hand. tests/formats has those that DeepSpeed made itself."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.formats import (
    deepspeed,
    deepspeed_universal,
    deepspeed_universal_write,
    open_checkpoint,
    recognise,
)
from holdfast.checkpoint.formats.deepspeed_tp import pattern_of
from holdfast.checkpoint.pieces import Catalogue, DataFile, Ref, Stored, catalogue_tree, entry_of, row_major
from holdfast.checkpoint.rules import Replicate, Rule, Rules, Shard
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import CheckpointError, UsageError

Tensors = Mapping[str, torch.Tensor]
ADAM = ("exp_avg", "exp_avg_sq")


def numbered(shapes: Mapping[str, Sequence[int]], start: int = 0) -> dict[str, torch.Tensor]:
    """Tensors without a value twice."""
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(tuple(shape))
        start += made[name].numel()
    return made


def slot_of(weights: Tensors, number: int) -> dict[str, torch.Tensor]:
    return {name: weight + 1000 * number for name, weight in weights.items()}


def in_turn(tensors: Tensors, ranks: int) -> list[torch.Tensor]:
    """As ZeRO-1 and 2 cut a group: padded to twice the number of ranks."""
    flat = torch.cat([t.flatten() for t in tensors.values()])
    unit = 2 * ranks
    return list(torch.cat([flat, torch.full((-len(flat) % unit,), -1.0)]).chunk(ranks))


def side_by_side(tensors: Tensors, ranks: int) -> list[torch.Tensor]:
    """As ZeRO-3 cuts a group: every parameter by itself."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors.values():
        size = -(-tensor.numel() // ranks)
        padded = torch.cat([tensor.flatten(), torch.full((size * ranks - tensor.numel(),), -1.0)])
        for rank in range(ranks):
            parts[rank].append(padded[rank * size : (rank + 1) * size])
    return [torch.cat(part) for part in parts]


def save_zero(folder: Path, groups: Sequence[Tensors], *, stage: int, ranks: int, mp: int = 0, mps: int = 1,
              **extra: Any) -> Path:  # fmt: skip
    """A checkpoint of one model-parallel rank."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text("global_step7\n")
    cut = side_by_side if stage == 3 else in_turn
    for rank in range(ranks):
        fp32, state, paddings = [], {}, []
        for number, group in enumerate(groups):
            fp32.append(cut(group, ranks)[rank].clone())
            paddings.append(int((fp32[-1] == -1).sum()) if stage < 3 else 0)
            state[number] = {slot: cut(slot_of(group, i + 1), ranks)[rank] for i, slot in enumerate(ADAM)}
            state[number]["step"] = torch.tensor(7.0)
            if stage < 3:  # padding is stripped from the weights alone
                fp32[-1] = fp32[-1][: len(fp32[-1]) - paddings[-1]].clone()
        param_groups = [{"params": [i], "lr": 0.1 * (i + 1)} for i in range(len(groups))]
        base = {"state": state, "param_groups": param_groups}
        saved: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks}
        if stage == 3:
            saved |= {"optimizer_state_dict": base, "fp32_flat_groups": fp32}
        else:
            saved |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": fp32, "group_paddings": paddings}
        torch.save({"optimizer_state_dict": saved}, tag / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
    weights = {name: t for group in groups for name, t in group.items()}
    states = {
        "module": {n: torch.empty(0) if stage == 3 else t.bfloat16() for n, t in weights.items()},
        "param_shapes": [{n: t.shape for n, t in group.items()} for group in groups],
        "buffer_names": [],
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": ranks,
        "mp_world_size": mps,
        **extra,
    }
    for rank in range(ranks if stage == 3 else 1):
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(states, tag / f"{prefix}mp_rank_{mp:02d}_model_states.pt")
    return tag


def assert_holds(catalogue: Catalogue, groups: Sequence[Tensors]) -> None:
    for number, group in enumerate(groups):
        named = catalogue.tree["optimizer"]["param_groups"][number]
        assert (named["params"], named["lr"]) == (list(group), 0.1 * (number + 1))
        for name, weight in group.items():
            assert torch.equal(read_tensor(catalogue, f"model/{name}"), weight)
            for i, slot in enumerate(ADAM):
                assert torch.equal(read_tensor(catalogue, f"optimizer/state/{name}/{slot}"), weight + 1000 * (i + 1))
            assert read_tensor(catalogue, f"optimizer/state/{name}/step").item() == 7


GROUPS = [numbered({"a.weight": (5, 3), "b.weight": (2, 2, 3)}), numbered({"a.bias": (5,), "b": ()}, start=100)]
shapes = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(shapes=shapes, stage=st.sampled_from([1, 2, 3]), ranks=st.integers(1, 4))
def test_any_shapes_on_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], stage: int, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("zero")
    group = numbered({f"p{number}": shape for number, shape in enumerate(shapes)})
    save_zero(folder, [group], stage=stage, ranks=ranks)
    assert_holds(deepspeed.open(folder), [group])
    shutil.rmtree(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_folder_or_tag(tmp_path: Path, stage: int) -> None:
    tag = save_zero(tmp_path, GROUPS, stage=stage, ranks=2, note={"a": (1, b"x")})
    for path in (tmp_path, tag):
        assert recognise(path) == "deepspeed"
        catalogue = deepspeed.open(path)
        assert_holds(catalogue, GROUPS)
        assert catalogue.tree["client_state"] == {"note": {"a": (1, b"x")}}
        assert catalogue.tree["step"] == 7
        pointer = {"../latest"} if path == tmp_path else set()
        assert set(catalogue.files) == {file.name for file in tag.iterdir()} | pointer


def test_what_is_no_plain_data_is_left_out_by_name(tmp_path: Path) -> None:
    save_zero(tmp_path, GROUPS, stage=1, ranks=2, note={"things": {1, 2}})
    assert deepspeed.open(tmp_path).details["left_out"] == ["client_state/note/things: a set"]


def test_what_is_left_out_of_a_list_leaves_its_place(tmp_path: Path) -> None:
    save_zero(tmp_path, GROUPS, stage=1, ranks=2, seen=[{1, 2}, 5, 6])
    catalogue = deepspeed.open(tmp_path)
    assert catalogue.tree["client_state"] == {"seen": [None, 5, 6]}
    assert catalogue.details["left_out"] == ["client_state/seen/0: a set"]


# --- what is wrong is refused by name ------------------------------------------------------------------


def refusal(path: Path, module: Any = deepspeed, rules: Rules | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        module.open(path, rules=rules)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_missing_doubled_truncated_and_surplus_parts(tmp_path: Path, stage: int) -> None:
    tag = save_zero(tmp_path / "whole", GROUPS, stage=stage, ranks=3)
    last = "zero_pp_rank_2_mp_rank_00_optim_states.pt"

    def broken(name: str) -> Path:
        shutil.copytree(tag, tmp_path / name)
        return tmp_path / name

    (broken("missing") / last).unlink()
    assert f"{last} is missing" in refusal(tmp_path / "missing")
    shutil.copy(tag / last, broken("surplus") / last.replace("rank_2", "rank_3"))
    assert f"{last.replace('rank_2', 'rank_3')} is one too many" in refusal(tmp_path / "surplus")
    shutil.copy(tag / last, broken("doubled") / f"bf16_{last}")
    assert f"bf16_{last} and {last} are the same part" in refusal(tmp_path / "doubled")
    data = (tag / last).read_bytes()
    (broken("short") / last).write_bytes(data[: len(data) // 2])
    assert last in refusal(tmp_path / "short")
    for name in list(broken("no-model").glob("*model_states.pt")):
        name.unlink()
    assert "no model_states.pt" in refusal(tmp_path / "no-model")
    for name in list(broken("no-optimizer").glob("*optim_states.pt")):
        name.unlink()
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in refusal(tmp_path / "no-optimizer")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_of_another_run(tmp_path: Path, stage: int) -> None:
    tag = save_zero(tmp_path / "one", GROUPS, stage=stage, ranks=2)
    other = save_zero(tmp_path / "other", [numbered({"a": (40, 3)}), GROUPS[1]], stage=stage, ranks=2)
    last = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / last, tag / last)
    assert last in refusal(tag) or "zero_pp_rank_0" in refusal(tag)
    assert "a.weight" in refusal(tag)


def test_one_rank_without_a_slot(tmp_path: Path) -> None:
    tag = save_zero(tmp_path, GROUPS, stage=1, ranks=2)
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(file)
    del states["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    torch.save(states, file)
    assert f"{file.name} has no exp_avg for a.weight" in refusal(tag)


def test_latest_that_leads_nowhere(tmp_path: Path) -> None:
    save_zero(tmp_path, GROUPS, stage=1, ranks=2)
    (tmp_path / "latest").write_text("global_step8")
    assert "global_step8" in refusal(tmp_path)
    assert not deepspeed.recognise(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    assert "../elsewhere" in refusal(tmp_path)


@pytest.mark.parametrize("tag", ["..", ".", "", "../a", "/", "global_step7/.", "x" * 5000])
def test_latest_never_leads_elsewhere(tmp_path: Path, tag: str) -> None:
    inside = tmp_path / "a" / "b"
    shutil.copytree(save_zero(tmp_path / "made", GROUPS, stage=1, ranks=1), tmp_path / "a")
    inside.mkdir()
    (inside / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="latest names" if len(tag) < 5000 else "no such folder"):
        deepspeed.open(inside)
    (inside / "latest").write_text("..")
    with pytest.raises(CheckpointError, match=r"b/latest names '\.\.'"):
        open_checkpoint(inside)


def test_a_parameter_of_a_universal_checkpoint_never_leads_elsewhere(tmp_path: Path) -> None:
    folder = universal(tmp_path)
    (states,) = folder.glob("*/mp_rank_00_model_states.pt")
    saved = torch.load(states, weights_only=False)
    saved["param_shapes"][0]["../../x"] = torch.Size([1])
    torch.save(saved, states)
    assert "'../../x', which is no folder in zero" in refusal(folder, deepspeed_universal)


def test_weights_alone_without_any_number_of_ranks(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.ones(2)}, "buffer_names": []}, tmp_path / "mp_rank_00_model_states.pt")
    assert [*deepspeed.open(tmp_path).tensors] == ["model/w"]
    torch.save({"module": {"w": torch.ones(2)}, "dp_world_size": "two"}, tmp_path / "mp_rank_00_model_states.pt")
    assert "'two'" in refusal(tmp_path)


def test_experts_are_refused(tmp_path: Path) -> None:
    tag = save_zero(tmp_path, GROUPS, stage=1, ranks=2)
    torch.save({}, tag / "layer_0_expert_3_mp_rank_00_model_states.pt")
    assert "layer_0_expert_3_mp_rank_00_model_states.pt" in refusal(tmp_path)


# --- tensor parallel ---------------------------------------------------------------------------------------

WHOLE = numbered({"column": (4, 3), "row": (3, 4), "norm": (3,), "fused": (8, 3)})


def save_tensor_parallel(folder: Path, **extra: Any) -> None:
    for tp in range(2):
        fused = torch.cat([half.chunk(2)[tp] for half in WHOLE["fused"].chunk(2)])
        part = {"column": WHOLE["column"].chunk(2)[tp], "row": WHOLE["row"].chunk(2, 1)[tp], "norm": WHOLE["norm"]}
        save_zero(folder, [{**part, "fused": fused}], stage=1, ranks=2, mp=tp, mps=2, **extra)


def test_a_cut_that_nobody_tells_is_not_guessed(tmp_path: Path) -> None:
    save_tensor_parallel(tmp_path)
    assert "model/column" in refusal(tmp_path)
    assert "rules" in refusal(tmp_path)


def test_rules_say_how_tensors_are_cut_and_called(tmp_path: Path) -> None:
    save_tensor_parallel(tmp_path)
    rules = Rules(
        [
            Rule(match="model/column", pattern=Shard(dim=0), rename="model/tall"),
            Rule(match="model/row", pattern=Shard(dim=1)),
            Rule(match="model/norm", pattern=Replicate()),
            Rule(match="model/fused", pattern=Shard(dim=0, parts=2)),
        ]
    )
    renamed = {"tall" if name == "column" else name: tensor for name, tensor in WHOLE.items()}
    assert_holds(deepspeed.open(tmp_path, rules=rules), [renamed])


INFO = {
    "tp_replicated_parameter_patterns": ["norm"],
    "parameter_with_row_parallelism_patterns": ["^row$"],
    "parameter_with_2_sub_params_cat_dim_0": [r"fus.d"],
}


def test_what_deepspeed_wrote_about_the_cuts_is_believed(tmp_path: Path) -> None:
    save_tensor_parallel(tmp_path, universal_checkpoint_info=INFO)
    assert_holds(deepspeed.open(tmp_path), [WHOLE])


def test_rules_come_before_what_deepspeed_wrote(tmp_path: Path) -> None:
    save_tensor_parallel(tmp_path, universal_checkpoint_info=INFO)
    rules = Rules([Rule(match="model/norm", pattern=Shard(dim=0))])
    assert deepspeed.open(tmp_path, rules=rules).tensors["model/norm"].shape == (6,)


def test_patterns_of_padded_vocabularies_and_unsupported_ones() -> None:
    info = {"vocabulary_parameter_patterns": ["embed"], "original_vocab_size": 5}
    assert pattern_of("embed.weight", info) == Shard(dim=0, size=5)
    with pytest.raises(CheckpointError, match="odd"):
        pattern_of("odd", {"autotp_unsupported_parameter_patterns": {"odd": "it is odd"}})


def affine(scale: float = 1.0) -> dict[str, Any]:
    """The map of "column", as AutoTP writes it."""
    ranks = {}
    for tp in range(2):
        piece = {"shape": [2, 3], "source": [tp * 6, [3, 1]], "dest": [0, [3, 1]], "locations": [tp], "scale": scale}
        ranks[tp] = {"shard_shape": [2, 3], "pieces": [piece]}
    return {"version": 1, "params": {"^column$": {"logical_shape": [4, 3], "ranks": ranks}}}


def test_maps_come_before_patterns_and_scaled_ones_are_refused(tmp_path: Path) -> None:
    wrong = {**INFO, "parameter_with_row_parallelism_patterns": ["^row$", "^column$"]}
    save_tensor_parallel(tmp_path / "map", universal_checkpoint_info={**wrong, "affine_map": affine()})
    assert_holds(deepspeed.open(tmp_path / "map"), [WHOLE])
    save_tensor_parallel(tmp_path / "scaled", universal_checkpoint_info={**INFO, "affine_map": affine(0.5)})
    assert "column is scaled by 0.5" in refusal(tmp_path / "scaled")


# --- universal -----------------------------------------------------------------------------------------------


def universal(tmp_path: Path, groups: Sequence[Tensors] = GROUPS, stage: int = 1) -> Path:
    save_zero(tmp_path / "zero", groups, stage=stage, ranks=2)
    deepspeed_universal.write(deepspeed.open(tmp_path / "zero"), tmp_path / "universal")
    return tmp_path / "universal"


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_has_what_was_read(tmp_path: Path, stage: int) -> None:
    path = universal(tmp_path, stage=stage)
    assert recognise(path) == recognise(path / "global_step7_universal") == "deepspeed-universal"
    assert_holds(deepspeed_universal.open(path), GROUPS)
    assert deepspeed_universal.open(path).tree == deepspeed.open(tmp_path / "zero").tree
    atom = torch.load(path / "global_step7_universal" / "zero" / "a.weight" / "exp_avg.pt", weights_only=True)
    assert torch.equal(atom["param"], GROUPS[0]["a.weight"] + 1000)


def test_zero3_gets_only_the_hyper_parameters_that_all_groups_share(tmp_path: Path) -> None:
    path = universal(tmp_path) / "global_step7_universal" / "zero" / "optimizer_state.pt"
    state = torch.load(path, weights_only=True)
    assert state["optimizer_state_dict"]["param_groups"] == [{"params": []}]
    assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.2]


@pytest.mark.parametrize("atom", ["fp32", "exp_avg"])
def test_a_missing_atom_is_named(tmp_path: Path, atom: str) -> None:
    tag = universal(tmp_path) / "global_step7_universal"
    (tag / "zero" / "b.weight" / f"{atom}.pt").unlink()
    assert f"b.weight/{atom}.pt is missing" in refusal(tag, deepspeed_universal)


def test_flat_atoms_need_a_shape(tmp_path: Path) -> None:
    tag = universal(tmp_path) / "global_step7_universal"
    for file in (tag / "zero").glob("*/*.pt"):
        if file.stem != "step":  # as ds_to_universal leaves those of ZeRO-3
            torch.save(torch.load(file)["param"].flatten(), file)
    assert_holds(deepspeed_universal.open(tag), GROUPS)
    file = tag / "zero" / "a.weight" / "exp_avg.pt"
    torch.save(torch.zeros(14), file)
    assert "a.weight/exp_avg.pt" in refusal(tag, deepspeed_universal)


def catalogue_of(tmp_path: Path, tree: Mapping[str, Any]) -> Catalogue:
    """A catalogue of tensors in one file."""
    data = b""

    def stored(node: Any) -> Any:
        nonlocal data
        if isinstance(node, torch.Tensor):
            place = Stored(
                file="data", offset=len(data), dtype=node.dtype, shape=tuple(node.shape), strides=row_major(node.shape)
            )
            data += bytes(node.contiguous().view(-1).view(torch.uint8).tolist())
            return entry_of(place)
        if isinstance(node, dict):
            return {key: stored(item) for key, item in node.items()}
        return [stored(item) for item in node] if isinstance(node, list) else node

    filled, tensors = catalogue_tree(stored(dict(tree)))
    (tmp_path / "data").write_bytes(data)
    return Catalogue(
        format="test", root=tmp_path, tensors=tensors, tree=filled, files={"data": DataFile(bytes=len(data))}
    )


def torch_tree(**changes: Any) -> dict[str, Any]:
    """What a script with a factored optimizer has: w has rows and columns, v had no gradient yet, e is frozen."""
    slots = {"step": torch.tensor(3.0), "momentum": torch.ones(2, 3).bfloat16(), "rows": torch.ones(2, 1), "beta": 0.5}
    tree: dict[str, Any] = {
        "model": {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(4).half(), "e": torch.ones(2, dtype=torch.int64)},
        "optimizer": {"state": {"w": slots}, "param_groups": [{"params": ["w", "v"], "lr": torch.tensor(0.1)}]},
        "step": 3,
        "sampler": {"position": torch.arange(2)},
    }
    return {**tree, **changes}


def test_any_optimizer_of_any_format_is_written(tmp_path: Path) -> None:
    done: list[int] = []
    deepspeed_universal.write(catalogue_of(tmp_path, torch_tree()), tmp_path / "out", progress=done.append)
    again = deepspeed_universal.open(tmp_path / "out")
    assert {name: entry.dtype for name, entry in again.tensors.items() if name.startswith("model/")} == {
        "model/w": torch.float32, "model/v": torch.float32, "model/e": torch.int64,
    }  # fmt: skip
    assert again.frozen == ("e",)
    state = again.tree["optimizer"]["state"]
    assert state["w"]["beta"] == 0.5
    assert again.tensors["optimizer/state/w/rows"].shape == (2, 1)
    assert read_tensor(again, "optimizer/state/v/momentum").tolist() == [0] * 4  # one state for all of a group
    assert read_tensor(again, "sampler/position").tolist() == [0, 1]
    assert isinstance(again.tree["optimizer"]["param_groups"][0]["lr"], Ref)
    assert sum(done) >= sum(entry.nbytes for name, entry in again.tensors.items() if name.startswith("model/"))
    names = {file.name for file in (tmp_path / "out" / "global_step3_universal" / "zero" / "w").iterdir()}
    assert names == {"fp32.pt", "momentum.pt", "step.pt"}  # DeepSpeed loads whatever else is there, and fails


def test_what_has_no_place_in_it_is_said(tmp_path: Path) -> None:
    model = {**torch_tree()["model"], "_extra_state": {"scale": torch.ones(1)}, "none": None}
    catalogue = catalogue_of(tmp_path, torch_tree(model=model))
    filled, extra = deepspeed_universal_write.changes(catalogue)
    assert filled.startswith("that 1 parameter, as v, had no state in the optimizer (DeepSpeed gives them zeros")
    assert extra == "the model's _extra_state, which is not a tensor"
    deepspeed_universal.write(catalogue, tmp_path / "out")
    assert set(deepspeed_universal.open(tmp_path / "out").tree["model"]) == {"w", "v", "e"}
    tree = torch_tree()
    tree["optimizer"]["param_groups"] = [{"params": ["w"]}, {"params": ["v"]}]
    (tmp_path / "two").mkdir()
    assert deepspeed_universal_write.changes(catalogue_of(tmp_path / "two", tree)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": None}, "has no optimizer"),
        ({"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, "parameter 0 is not a name"),
        ({"model": {"w": torch.ones(2, 3).double(), "v": torch.ones(4)}}, "w is torch.float64"),
        ({"model": {"w": torch.ones(2, 3), "v": torch.ones(4), "../x": torch.ones(1)}}, "'../x' cannot be the name"),
        ({"client_state": {"module": 1}}, "client_state has the key module"),
    ],
)
def test_what_deepspeed_could_not_load_is_refused_and_leaves_nothing(tmp_path: Path, changes: Any, reason: str) -> None:
    catalogue = catalogue_of(tmp_path, torch_tree(**changes))
    with pytest.raises(CheckpointError, match=reason):
        deepspeed_universal.write(catalogue, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_steps_that_differ_within_a_group_are_refused(tmp_path: Path) -> None:
    tree = torch_tree()
    tree["optimizer"]["state"]["v"] = {"step": torch.tensor(2.0)}
    with pytest.raises(CheckpointError, match=r"v.*2.*w.*3"):
        deepspeed_universal.write(catalogue_of(tmp_path, tree), tmp_path / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = universal(tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        deepspeed_universal.write(deepspeed.open(tmp_path / "zero"), path)


def test_where_both_are_there_the_original_is_meant(tmp_path: Path) -> None:
    path = universal(tmp_path)
    shutil.copytree(tmp_path / "zero", path, dirs_exist_ok=True)
    assert recognise(path) == "deepspeed"
    assert deepspeed_universal.open(path).format == "deepspeed-universal"
