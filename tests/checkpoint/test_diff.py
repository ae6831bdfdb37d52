"""Two checkpoints beside each other: what differs is found and counted, what does not is not."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import diff_tensors, open_checkpoint, save, transfer
from holdfast.checkpoint.diff import CheckpointDiff, Comparison, Row, parse_rename
from holdfast.errors import CheckpointError, UsageError

_numbers = itertools.count()


def saved(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / f"c{next(_numbers)}"
    save(path, tree)
    return path


def diff(a: Path, b: Path, **options: Any) -> CheckpointDiff:
    return Comparison(open_checkpoint(a), open_checkpoint(b), **options).run()


def compared(folder: Path, a: dict[str, Any], b: dict[str, Any], **options: Any) -> CheckpointDiff:
    return diff(saved(folder, a), saved(folder, b), **options)


def trained(lr: float = 0.1, decay: float = 0.0) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": [model[0].weight, model[1].weight], "weight_decay": decay}, {"params": [model[0].bias]}]
    optimizer = torch.optim.AdamW([*groups, {"params": [model[1].bias]}], lr=lr)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 1}


# --- equal ----------------------------------------------------------------------------------------


def test_a_checkpoint_equals_itself_and_its_copy(tmp_path: Path) -> None:
    result = compared(tmp_path, trained(), trained())
    assert result.same
    assert (result.equal, result.close, result.notes) == (16, 0, [])
    assert result.values > 1


def test_bits_count_not_values(tmp_path: Path) -> None:
    """NaN equals the same NaN; 0.0 and -0.0 are not the same bits."""
    nan = {"model": {"w": torch.tensor([math.nan, math.inf, 0.0])}}
    assert compared(tmp_path, nan, copy.deepcopy(nan)).same
    minus = {"model": {"w": torch.tensor([math.nan, math.inf, -0.0])}}
    assert compared(tmp_path, nan, minus).rows == [
        Row(name="model/w", kind="values", a="float32", b="float32", differing=1, elements=3, largest=0.0)
    ]


def test_nothing_in_common_is_different(tmp_path: Path) -> None:
    result = compared(tmp_path, {"model": {"w": torch.ones(2)}}, {"weights": {"w": torch.ones(2)}, "step": 1})
    assert not result.same
    assert [(row.name, row.kind) for row in result.rows] == [
        ("model", "only in A"),
        ("weights", "only in B"),
        ("step", "only in B"),
    ]
    assert compared(tmp_path, {}, {}).same


def test_keys_of_two_types_are_two_keys(tmp_path: Path) -> None:
    both = {"data": {1: 5, "1": 6}}
    assert compared(tmp_path, both, both).values == 2
    rows = compared(tmp_path, both, {"data": {1: 7, "1": 6}}).rows
    assert [(row.name, row.a, row.b) for row in rows] == [("data/1", "5", "7")]
    result = compared(tmp_path, {"data": {1: 5, None: 2, "b'x'": 3}}, {"data": {"1": 5, "None": 2, b"x": 3}})
    assert {row.kind for row in result.rows} == {"only in A", "only in B"}
    assert len(result.rows) == 6


def test_a_zero_has_a_sign(tmp_path: Path) -> None:
    assert compared(tmp_path, {"a": 0.0, "b": (1, -0.0)}, {"a": 0.0, "b": (1, -0.0)}).values == 2
    result = compared(tmp_path, {"a": 0.0, "b": (1, -0.0), "c": 0}, {"a": -0.0, "b": (1, 0.0), "c": 0.0})
    assert [row.name for row in result.rows] == ["a", "b"]


def test_sections_that_one_has_alone_are_named_and_no_difference(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    result = compared(tmp_path, {"model": weights, "step": 1}, {"model": weights, "seed": 2})
    assert result.same
    assert (result.sections, result.only_a, result.only_b) == (["model"], ["step"], ["seed"])
    asked = compared(tmp_path, {"model": weights, "step": 1}, {"model": weights}, sections=["model", "step"])
    assert [(row.name, row.kind) for row in asked.rows] == [("step", "only in A")]
    with pytest.raises(UsageError, match="'ema'"):
        compared(tmp_path, {"model": weights}, {"model": weights}, sections=["ema"])


def test_a_second_name_of_a_tied_tensor_is_no_difference(tmp_path: Path) -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    tied["head"].weight = tied["embed"].weight
    bare = {"embed.weight": tied["embed"].weight.detach()}
    result = compared(tmp_path, {"model": tied}, {"model": bare})
    assert result.same
    assert result.notes == ["model/head.weight, only in A, is a second name of model/embed.weight"]
    assert not compared(tmp_path, {"model": bare}, {"model": {"head.weight": bare["embed.weight"]}}).same


def test_an_optimizer_by_numbers_is_compared_in_its_order(tmp_path: Path) -> None:
    named = saved(tmp_path, trained())
    for lr, same in ((0.1, True), (0.2, False)):
        tree = trained(lr)
        numbered = saved(tmp_path, {"optimizer": tree["optimizer"].state_dict()})
        result = diff(named, numbered)
        assert result.same == same
        assert result.notes == ["one optimizer goes by numbers: its parameters are compared in their order"]


def test_a_step_may_be_a_tensor_or_a_number(tmp_path: Path) -> None:
    a, b = {"optimizer": {"step": torch.tensor(7.0)}}, {"optimizer": {"step": 7}}
    assert compared(tmp_path, a, b).same
    assert not compared(tmp_path, a, {"optimizer": {"step": 8}}).same


# --- different ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.complex64],
)
def test_how_many_elements_differ_and_by_how_much(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.arange(12).to(torch.float32).to(dtype)
    b = a.to(torch.complex64 if dtype.is_complex else torch.float32).clone()
    b[3], b[5] = 7, 1
    [row] = compared(tmp_path, {"model": {"w": a}}, {"model": {"w": b.to(dtype)}}).rows
    assert (row.kind, row.differing, row.elements, row.largest) == ("values", 2, 12, 4.0)


def test_parts_of_large_tensors_and_many_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_tensors, "BATCH", 1000)
    monkeypatch.setattr(diff_tensors, "PART", 7)
    monkeypatch.setattr(transfer, "FILES", 3)
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (), (0, 3), (17, 31), (5, 1, 2), (1000,)] + [(n,) for n in range(20)]
    a = {f"w{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    b, expected = {}, {}
    for name, tensor in a.items():
        b[name] = tensor + torch.randint(0, 2, tensor.shape, generator=generator)
        apart = (b[name].double() - tensor.double()).abs()
        if apart.any():
            expected[f"model/{name}"] = (int((apart != 0).sum()), float(apart.max()))
    result = compared(tmp_path, {"model": a}, {"model": b})
    assert {row.name: (row.differing, row.largest) for row in result.rows} == expected
    assert result.equal == len(sizes) - len(expected) > 0


def test_dtype_shape_names_and_values(tmp_path: Path) -> None:
    a = {"model": {"w": torch.ones(4), "s": torch.ones(2, 3), "x": torch.ones(1)}, "step": 1, "note": "a"}
    b = {"model": {"w": torch.ones(4).bfloat16(), "s": torch.ones(6), "y": torch.ones(1)}, "step": 2, "note": "a"}
    rows = {row.name: row for row in compared(tmp_path, a, b).rows}
    assert {name: row.kind for name, row in rows.items()} == {
        "model/w": "dtype",
        "model/s": "shape",
        "step": "value",
        "model/x": "only in A",
        "model/y": "only in B",
    }
    assert (rows["model/w"].a, rows["model/w"].b, rows["model/w"].differing) == ("float32", "bfloat16", 0)
    assert (rows["model/s"].a, rows["model/s"].b) == ("2 x 3", "6")
    assert (rows["step"].a, rows["step"].b) == ("1", "2")


def test_settings_are_compared_for_each_parameter(tmp_path: Path) -> None:
    rows = compared(tmp_path, trained(), trained(decay=0.5)).rows
    names = ["0.weight", "1.weight"]
    assert [row.name for row in rows if row.kind == "value"] == [
        f"optimizer/param_groups/{name}/weight_decay" for name in names
    ]


# --- tolerance and names --------------------------------------------------------------------------


def test_tolerance(tmp_path: Path) -> None:
    a, b = {"model": {"w": torch.tensor([1.0, 2.0])}}, {"model": {"w": torch.tensor([1.0, 2.5])}}
    assert compared(tmp_path, a, b, tolerance=0.5).close == 1
    [row] = compared(tmp_path, a, b, tolerance=0.4).rows
    assert (row.differing, row.largest) == (1, 0.5)
    half = {"model": {"w": a["model"]["w"].half()}}
    assert compared(tmp_path, a, half, tolerance=0.0).same
    assert not compared(tmp_path, a, half).same


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_every_tolerance(tmp_path: Path, value: float) -> None:
    a, b = {"model": {"w": torch.tensor([1.0])}}, {"model": {"w": torch.tensor([value])}}
    [row] = compared(tmp_path, a, b, tolerance=1e30).rows
    assert row.largest == math.inf
    assert row.to_json()["largest"] == "inf"


def test_rename(tmp_path: Path) -> None:
    a, b = {"model": {"module.w": torch.ones(2)}}, {"model": {"w": torch.ones(2)}}
    assert not compared(tmp_path, a, b).same
    assert compared(tmp_path, a, b, renames=[parse_rename(r"module\.=")]).same
    with pytest.raises(UsageError, match="matches no name in A"):
        compared(tmp_path, a, b, renames=[parse_rename("nothing=x")])
    two = {"model": {"a": torch.ones(1), "b": torch.ones(1)}}
    with pytest.raises(UsageError, match="model/c"):
        compared(tmp_path, two, two, renames=[parse_rename("[ab]$=c")])


@pytest.mark.parametrize("text", ["a", "=b", "(=x", r"a=\1"])
def test_a_bad_rename_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rename"):
        parse_rename(text)


def test_a_damaged_checkpoint_is_an_error_and_no_difference(tmp_path: Path) -> None:
    a, b = (saved(tmp_path, {"model": {"w": torch.ones(100)}}) for _ in range(2))
    path = next(b.glob("data-*"))
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        diff(a, b)
