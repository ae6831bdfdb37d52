"""Real checkpoints of Megatron-core, which itself is the judge: what it loads into one process is what we read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.formats import megatron, open_checkpoint, recognise
from holdfast.checkpoint.pieces import Catalogue, Piece, entry_of
from holdfast.checkpoint.rules import Rules, copies
from holdfast.checkpoint.tensor_reader import read_tensor

JOBS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "pp": 1, "modern": True, "tied": False, "stacked": True, "half": True},
    "pp2": {"tp": 1, "pp": 2, "modern": False, "tied": True, "stacked": False, "half": False},
    "tp2-pp2": {"tp": 2, "pp": 2, "modern": True, "tied": True, "stacked": False, "half": True},
    "tp2-biases": {"tp": 2, "pp": 1, "modern": False, "tied": False, "stacked": True, "half": False},
}
KINDS = ("legacy", "dist")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, run_formats: Callable[..., str]) -> Path:
    """A folder for each job, with what Megatron wrote."""
    folder = tmp_path_factory.mktemp("megatron")
    jobs = [{**job, "folder": str(folder / name)} for name, job in JOBS.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_formats(Path(__file__).with_name("make_megatron.py"), folder / "jobs.json")
    return folder


def expected(folder: Path, kind: str) -> tuple[dict[str, torch.Tensor], list[set[str]]]:
    """Every tensor that Megatron had after loading, by our names, and the names in each of its groups."""
    found = torch.load(folder / "whole.pt")
    tensors: dict[str, torch.Tensor] = {}
    groups: list[set[str]] = [set() for _ in found["groups"]]
    for local, one in found["parameters"].items():
        name = local if kind == "legacy" else one["key"]
        tensors[f"model/{name}"] = one["weight"]
        tensors |= {f"optimizer/state/{name}/{slot}": value for slot, value in one["slots"].items()}
        groups[one["group"]].add(name)
    return tensors, groups


def differing(catalogue: Catalogue, tensors: dict[str, torch.Tensor]) -> list[str]:
    read = {name: read_tensor(catalogue, name) for name in tensors}
    return [name for name, one in tensors.items() if one.dtype != read[name].dtype or not torch.equal(one, read[name])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", JOBS)
def test_every_tensor_is_what_megatron_loads(made: Path, job: str, kind: str) -> None:
    assert recognise(made / job / kind) == "megatron"
    catalogue = open_checkpoint(made / job / kind)
    tensors, groups = expected(made / job, kind)
    assert set(catalogue.tensors) == set(tensors)
    assert differing(catalogue, tensors) == []
    ours = catalogue.tree["optimizer"]["param_groups"]
    assert [set(group["params"]) for group in ours] == groups
    assert [group["wd_mult"] for group in ours] == [1.0, 0.0]
    assert catalogue.tree["step"] == 5
    assert catalogue.tree["megatron"]["args"]["num_layers"] == 4


@pytest.mark.parametrize("job", JOBS)
def test_copies_on_other_ranks_are_equal(made: Path, job: str) -> None:
    catalogue = megatron.open(made / job / "legacy")
    pairs = [(name, pair) for name, entry in catalogue.tensors.items() for pair in copies(entry)]
    assert pairs
    for name, pair in pairs:
        first, other = (read_alone(catalogue, piece) for piece in pair)
        assert torch.equal(first, other), name


def read_alone(catalogue: Catalogue, piece: Piece) -> torch.Tensor:
    entry = entry_of(piece.stored)
    return read_tensor(Catalogue(format="one", root=catalogue.root, files=catalogue.files, tensors={"x": entry}), "x")


def test_the_judge_can_say_no(made: Path) -> None:
    """Control: halves of SwiGLU that are joined like any other matrix differ from what Megatron loads."""
    rules = Rules.from_yaml(r"- {match: 'model/.*\.linear_fc1\.weight', shard: {dim: 0}}")
    catalogue = megatron.open(made / "tp2" / "legacy", rules=rules)
    wrong = differing(catalogue, expected(made / "tp2", "legacy")[0])
    assert len(wrong) == 4 * 3
    assert all(".linear_fc1.weight" in name for name in wrong)
