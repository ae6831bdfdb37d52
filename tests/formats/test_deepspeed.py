"""Real DeepSpeed checkpoints in, and out into real DeepSpeed. Its own tools and memory are the judges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.formats import deepspeed, deepspeed_universal
from holdfast.checkpoint.pieces import Catalogue, Ref
from holdfast.checkpoint.tensor_reader import read_tensor

pytestmark = pytest.mark.timeout(600)  # the first test waits for all runs of DeepSpeed
SCRIPT = Path(__file__).with_name("make_deepspeed.py")

BF16_OPTIMIZER = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}
RUNS: dict[str, dict[str, Any]] = {
    "zero1-bf16": {"stage": 1, "dtype": "bf16", "schedule": True},
    "zero1-fp32": {"stage": 1},
    "zero1-elastic": {"stage": 1, "zero": {"elastic_checkpoint": True}},
    "zero1-bf16-optimizer": {"stage": 1, "dtype": "bf16", **BF16_OPTIMIZER},
    "zero2-bf16": {"stage": 2, "dtype": "bf16"},
    "zero2-fp16": {"stage": 2, "dtype": "fp16"},
    "zero2-sgd": {"stage": 2, "optimizer": "sgd"},
    "zero2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "zero2-aligned": {"stage": 2, "zero": {"parameter_alignment": True}},
    "zero3-bf16": {"stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 60}},
    "zero3-fp32": {"stage": 3},
    "zero3-sgd": {"stage": 3, "optimizer": "sgd"},
    "none-fp32": {"stage": 0},
    "none-bf16": {"stage": 0, "dtype": "bf16"},
    "zero2-on-3": {"stage": 2, "dtype": "bf16", "world": 3},
    "zero3-on-3": {"stage": 3, "dtype": "bf16", "world": 3},
}
ZERO = [name for name, run in RUNS.items() if run["stage"]]
PARALLEL = {
    "tp-zero1": {"kind": "tp", "stage": 1, "dtype": "bf16"},
    "tp-zero3": {"kind": "tp", "stage": 3, "dtype": "bf16"},
    "pp-zero1": {"kind": "pp", "stage": 1},
    "pp-bf16": {"kind": "pp", "stage": 0, "dtype": "bf16"},
}
CONVERTED = ["zero1-bf16", "zero2-round-robin", "zero3-bf16", "tp-zero1", "tp-zero3"]  # by DeepSpeed, for comparison
STEPS = {"tp-zero1": 2, "tp-zero3": 2}
UNIVERSAL = ["zero1-bf16", "zero1-fp32", "zero2-sgd", "zero3-bf16", "zero3-fp32", "zero3-on-3"]  # by us, to be loaded
TARGETS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, "zero": {"sub_group_size": 50}},
    "zero3-separate-steps": {"stage": 3, "separate_steps": True},
    "bf16-optimizer": {"stage": 1, **BF16_OPTIMIZER},
}


def possible(source: str, target: str) -> bool:
    run = RUNS[source]
    return (target != "bf16-optimizer" or run.get("dtype") == "bf16") and not (
        "steps" in target and run.get("optimizer") == "sgd"
    )


LOADS = [(source, target) for source in UNIVERSAL for target in TARGETS if possible(source, target)]
SGD_AS_ZERO3 = ("zero2-sgd", "zero3")

Run = Callable[..., str]


def work(run_formats: Run, folder: Path, name: str, jobs: Iterable[dict[str, Any]]) -> None:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(list(jobs)))
    run_formats(SCRIPT, file)


@pytest.fixture(scope="session")
def runs(run_formats: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint for each run, made by DeepSpeed, with what it had in memory beside it."""
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs = [
        {
            "kind": "zero",
            "world": 2,
            "fp32": run["stage"] and name != "zero1-bf16-optimizer",
            **run,
            "out": str(folder / name),
        }
        for name, run in RUNS.items()
    ]
    jobs += [{"world": 4, **run, "out": str(folder / name)} for name, run in PARALLEL.items()]
    for name in CONVERTED:
        tag = f"global_step{STEPS.get(name, 3)}"
        there = folder / f"{name}-by-deepspeed"
        there.mkdir()
        jobs.append({"kind": "convert", "from": str(folder / name / tag), "out": str(there / tag)})
    work(run_formats, folder, "runs", jobs)
    return folder


@pytest.fixture(scope="session")
def loads(run_formats: Run, runs: Path) -> Path:
    """DeepSpeed has loaded our universal checkpoints; what it then had in memory."""
    jobs = []
    for source in [*UNIVERSAL, "tp-zero1"]:
        deepspeed_universal.write(deepspeed.open(runs / source), runs / f"{source}-by-us")
    for source, target in LOADS:
        kept = {key: RUNS[source][key] for key in ("dtype", "optimizer", "schedule") if key in RUNS[source]}
        there = {"load": str(runs / f"{source}-by-us"), "out": str(runs / f"{source}-as-{target}")}
        jobs.append(
            {
                "kind": "zero",
                "world": 2,
                **kept,
                **TARGETS[target],
                **there,
                "may_fail": (source, target) == SGD_AS_ZERO3,
            }
        )
    own = {"load": str(runs / "zero3-bf16-by-deepspeed"), "out": str(runs / "zero3-bf16-again")}
    jobs.append({"kind": "zero", "world": 2, "dtype": "bf16", **TARGETS["zero3"], **own})
    for stage in (1, 3):
        there = {"load": str(runs / "tp-zero1-by-us"), "out": str(runs / f"tp-zero1-as-{stage}")}
        jobs.append({"kind": "tp", "world": 4, "dtype": "bf16", "stage": stage, **there})
    work(run_formats, runs, "loads", jobs)
    return runs


def truth_of(folder: Path, name: str = "truth.pt") -> dict[str, Any]:
    return torch.load(folder / name, weights_only=True)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """As bytes: equal values would let -0.0 and NaN through."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted(
        name
        for name in {*found, *wanted}
        if name not in found or name not in wanted or not same(found[name], wanted[name])
    )


def model_of(catalogue: Catalogue) -> dict[str, torch.Tensor]:
    return {name: read_tensor(catalogue, ref.name) for name, ref in catalogue.tree["model"].items()}


def slots_of(catalogue: Catalogue) -> dict[str, dict[str, torch.Tensor]]:
    """What the optimizer has for each element."""
    return {
        name: {slot: read_tensor(catalogue, ref.name) for slot, ref in slots.items() if slot != "step"}
        for name, slots in catalogue.tree["optimizer"]["state"].items()
    }


# --- in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ZERO if name != "zero1-bf16-optimizer"])
def test_weights_are_those_of_zero_to_fp32(runs: Path, name: str) -> None:
    catalogue = deepspeed.open(runs / name)
    model = model_of(catalogue)
    wanted = torch.load(runs / name / "fp32.pth", weights_only=True)
    # ZeRO-1's zero_to_fp32 forgets frozen parameters.
    assert {*model} - {*wanted} == ({*catalogue.frozen} if name.startswith("zero1") else set())
    cast = {n: model[n].float() if model[n].is_floating_point() else model[n] for n in wanted}
    assert differing(cast, {n: w.float() if w.is_floating_point() else w for n, w in wanted.items()}) == []
    assert all(model[n].dtype == torch.float32 for n in catalogue.tree["optimizer"]["state"])


@pytest.mark.parametrize("name", [name for name in ZERO if name != "zero2-round-robin"])
def test_all_is_as_deepspeed_had_it_in_memory(runs: Path, name: str) -> None:
    truth, catalogue = truth_of(runs / name), deepspeed.open(runs / name)
    model, slots = model_of(catalogue), slots_of(catalogue)
    assert differing({n: model[n] for n in truth["weights"]}, truth["weights"]) == []
    assert {*slots} == {*truth["state"]}
    for parameter, wanted in truth["state"].items():
        assert differing(slots[parameter], wanted) == [], parameter
    assert differing({n: model[n] for n in catalogue.buffers}, truth["buffers"]) == []
    frozen = {n: truth["model"][n] for n in ("still.weight", "still.bias", "idle")}
    assert {*catalogue.frozen} == {*frozen}
    assert differing({n: model[n] for n in catalogue.frozen}, frozen) == []
    assert catalogue.tied == {"head.weight": "embed.weight"}
    assert catalogue.tree["model"]["head.weight"] == Ref(name="model/embed.weight")
    assert catalogue.tree["step"] == 3
    assert catalogue.tree["client_state"]["numbers"] == [1, 2.5]
    assert read_tensor(catalogue, "client_state/noise").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", [name for name in ZERO if name != "zero1-elastic"])
def test_groups_have_their_own_hyper_parameters_and_names(runs: Path, name: str) -> None:
    truth, catalogue = truth_of(runs / name), deepspeed.open(runs / name)
    groups = catalogue.tree["optimizer"]["param_groups"]
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == truth["groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    shapes = [{len(catalogue.tensors[f"model/{n}"].shape) for n in group["params"]} for group in groups]
    assert shapes == [{2}, {1}]
    for slots in catalogue.tree["optimizer"]["state"].values():
        assert ("step" in slots) == bool(truth["steps"])
        assert all(read_tensor(catalogue, slots["step"].name).item() == step for step in truth["steps"])


def test_what_is_not_there_is_named(runs: Path) -> None:
    assert "elastic" in deepspeed.open(runs / "zero1-elastic").details["left_out"][0]
    assert deepspeed.open(runs / "zero2-bf16").details["left_out"] == []
    # Each rank of ZeRO-3 has a client_state, and whether its tensors are the same cannot be seen from outside.
    assert "data-parallel rank 1" in deepspeed.open(runs / "zero3-bf16").details["left_out"][0]


@pytest.mark.parametrize("name", ["none-fp32", "none-bf16"])
def test_without_zero_the_optimizer_has_numbers(runs: Path, name: str) -> None:
    truth, catalogue = truth_of(runs / name), deepspeed.open(runs / name)
    assert differing({n: t for n, t in model_of(catalogue).items() if n in truth["model"]}, truth["model"]) == []
    assert catalogue.tied == {"head.weight": "embed.weight"}
    assert [group["params"] for group in catalogue.tree["optimizer"]["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert (catalogue.tree["deepspeed"].get("optimizer") is not None) == (name == "none-bf16")


@pytest.mark.parametrize("name", ["pp-zero1", "pp-bf16"])
def test_pipeline_stages_are_one_model(runs: Path, name: str) -> None:
    catalogue = deepspeed.open(runs / name)
    model, slots = model_of(catalogue), slots_of(catalogue)
    stages = [truth_of(runs / name, f"truth-{stage}.pt") for stage in (0, 1)]
    assert {*slots} == {*stages[0]["weights"], *stages[1]["weights"]}
    for stage in stages:
        assert differing({n: model[n] for n in stage["weights"]}, stage["weights"]) == []
        assert differing({n: model[n] for n in stage["buffers"]}, stage["buffers"]) == []
        for parameter, wanted in stage["state"].items():
            assert differing(slots[parameter], wanted) == [], parameter
    assert catalogue.frozen == ("4.still",)
    assert catalogue.buffers == ("4.scale",)
    assert model["4.still"].tolist() == [0, 1, 2, 3, 4]
    (group,) = catalogue.tree["optimizer"]["param_groups"]
    assert sorted(group["params"]) == sorted(slots)


@pytest.mark.parametrize("name", ["tp-zero1", "tp-zero3"])
def test_tensor_parallel_is_joined_as_deepspeed_joins_it(runs: Path, name: str) -> None:
    ours, theirs = deepspeed.open(runs / name), runs / f"{name}-by-deepspeed" / "global_step2" / "zero"
    model, slots = model_of(ours), slots_of(ours)
    assert len(model) == len([folder for folder in theirs.iterdir() if folder.is_dir()]) == 16
    for parameter, tensor in model.items():
        for slot, value in {"fp32": tensor, **slots[parameter]}.items():
            wanted = torch.load(theirs / parameter / f"{slot}.pt", weights_only=True)["param"]
            assert same(value, wanted), (parameter, slot)
    assert ours.tensors["model/model.layers.0.self_attn.o_proj.weight"].shape == (16, 16)


def test_opening_reads_no_tensor(runs: Path) -> None:
    """Tensors are overwritten: what is opened must not notice."""
    folder = runs / "blank"
    shutil.copytree(runs / "zero3-bf16" / "global_step3", folder)
    before = deepspeed.open(folder)
    for name in before.files:
        data = bytearray((folder / name).read_bytes())
        for entry in before.tensors.values():
            for piece in entry.pieces:
                if piece.stored.file == name:
                    data[piece.stored.offset : piece.stored.offset + piece.stored.nbytes] = (
                        b"\xff" * piece.stored.nbytes
                    )
        (folder / name).write_bytes(data)
    after = deepspeed.open(folder)
    assert after.tensors == before.tensors
    assert after.tree == before.tree


# --- universal, by DeepSpeed ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zero1-bf16", "zero3-bf16"])
def test_deepspeeds_own_universal_checkpoints_are_read(runs: Path, name: str) -> None:
    folder = runs / f"{name}-by-deepspeed"
    assert deepspeed_universal.recognise(folder)
    assert not deepspeed.recognise(folder / "global_step3")
    ours, theirs = deepspeed.open(runs / name), deepspeed_universal.open(folder)
    assert differing(model_of(theirs), model_of(ours)) == []
    assert {*theirs.tensors} == {*ours.tensors}
    for tensor in ours.tensors:
        assert same(read_tensor(theirs, tensor), read_tensor(ours, tensor)), tensor
    for part in ("optimizer", "step", "client_state", "lr_scheduler"):
        assert theirs.tree.get(part) == ours.tree.get(part)
    assert (theirs.tied, {*theirs.frozen}, theirs.buffers) == (ours.tied, {*ours.frozen}, ours.buffers)


# --- universal, by us, into DeepSpeed -------------------------------------------------------------------------


def loaded(loads: Path, source: str, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return truth_of(loads / source), truth_of(loads / f"{source}-as-{target}")


READABLE = [load for load in LOADS if load != SGD_AS_ZERO3]


@pytest.mark.parametrize(("source", "target"), READABLE)
def test_deepspeed_loads_weights_and_optimizer(loads: Path, source: str, target: str) -> None:
    before, after = loaded(loads, source, target)
    assert differing(after["weights"], before["weights"]) == []
    assert (
        differing({n: after["model"][n] for n in before["weights"]}, {n: before["model"][n] for n in before["weights"]})
        == []
    )
    for parameter, wanted in before["state"].items():
        assert differing(after["state"][parameter], wanted) == [], parameter
    assert {*after["steps"]} == {*before["steps"]}
    assert after["groups"] == before["groups"]


@pytest.mark.parametrize(("source", "target"), READABLE)
def test_deepspeed_goes_on_where_it_was(loads: Path, source: str, target: str) -> None:
    _, after = loaded(loads, source, target)
    assert after["global_steps"] == 3
    assert {key: after["client"][key] for key in ("note", "numbers")} == {"note": "hello", "numbers": [1, 2.5]}
    if RUNS[source].get("schedule"):
        assert after["schedule"]["last_batch_iteration"] == 2
    assert differing(after["later"], after["weights"]) == sorted(after["weights"])  # a step was made


# In bf16 the stages round gradients at different points; and the same data needs the same number of workers.
COMPARABLE = [load for load in READABLE if RUNS[load[0]].get("dtype") is None and load[1] != "zero3"]


@pytest.mark.parametrize(("source", "target"), COMPARABLE)
def test_the_next_step_is_the_same(loads: Path, source: str, target: str) -> None:
    before, after = loaded(loads, source, target)
    assert differing(after["later"], before["later"]) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_loads_into_tensor_parallel(loads: Path, stage: int) -> None:
    before, after = deepspeed.open(loads / "tp-zero1"), deepspeed.open(loads / f"tp-zero1-as-{stage}")
    assert {*after.tensors} == {*before.tensors}
    for tensor in before.tensors:
        assert same(read_tensor(after, tensor), read_tensor(before, tensor)), tensor


@pytest.mark.parametrize("source", UNIVERSAL)
def test_our_universal_checkpoint_has_all_that_was_read(loads: Path, source: str) -> None:
    before, after = deepspeed.open(loads / source), deepspeed_universal.open(loads / f"{source}-by-us")
    assert {*after.tensors} == {*before.tensors}
    for tensor in before.tensors:
        assert same(read_tensor(after, tensor), read_tensor(before, tensor)), tensor
    assert after.tree == before.tree
    assert (after.tied, {*after.frozen}, after.buffers) == (before.tied, {*before.frozen}, before.buffers)


# --- what DeepSpeed itself does not do ---------------------------------------------------------------------


@pytest.mark.xfail(
    strict=True, reason="DeepSpeed restores neither buffers nor frozen parameters from a universal checkpoint"
)
@pytest.mark.parametrize("target", ["zero1", "zero3"])
@pytest.mark.parametrize("what", ["scale", "idle"])
def test_deepspeed_loads_what_is_not_trained(loads: Path, target: str, what: str) -> None:
    before, after = loaded(loads, "zero1-bf16", target)
    all_before, all_after = ({**run["model"], **run["buffers"]} for run in (before, after))
    assert same(all_after[what], all_before[what])


@pytest.mark.xfail(strict=True, reason="DeepSpeed's ZeRO-3 gives all groups one tensor as step, and each counts it up")
@pytest.mark.parametrize("source", ["zero1-fp32", "zero3-fp32"])
def test_the_next_step_is_the_same_as_zero3(loads: Path, source: str) -> None:
    before, after = loaded(loads, source, "zero3")
    assert differing(after["later"], before["later"]) == []


@pytest.mark.xfail(strict=True, reason="DeepSpeed's ZeRO-3 loads no optimizer but Adam from a universal checkpoint")
def test_deepspeed_loads_sgd_as_zero3(loads: Path) -> None:
    failed = loads / "zero2-sgd-as-zero3" / "failed-0.txt"
    assert not failed.exists(), failed.read_text()


@pytest.mark.xfail(
    strict=True, reason="from its own universal checkpoint, DeepSpeed's ZeRO-3 gives the first group's values to all"
)
def test_deepspeed_keeps_hyper_parameters_in_its_own_way(loads: Path) -> None:
    """The judge can see the loss: with the same engine, our folder has none (see above)."""
    assert truth_of(loads / "zero3-bf16-again")["groups"] == truth_of(loads / "zero3-bf16")["groups"]


@pytest.mark.xfail(strict=True, reason="DeepSpeed's converter takes round-robin groups in the wrong order")
def test_deepspeed_converts_round_robin_gradients(runs: Path) -> None:
    theirs = deepspeed_universal.open(runs / "zero2-round-robin-by-deepspeed")
    wanted = torch.load(runs / "zero2-round-robin" / "fp32.pth", weights_only=True)
    assert differing(model_of(theirs), wanted) == []
