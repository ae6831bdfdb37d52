"""Files that only rules can put together: one for each place of a layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.checkpoint import open_checkpoint
from holdfast.checkpoint.rules import Rules
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import CheckpointError, UsageError

RULES = Rules.from_yaml(r"""
- {match: 'model/up\.weight', shard: {dim: 0}}
- {match: 'model/down\.weight', shard: {dim: 1}, rename: 'model/lower.weight'}
- {match: 'model/norm\.weight', replicate: {}}
""")


@pytest.fixture
def parts() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    norm = torch.randn(4)
    return [
        {"up.weight": torch.randn(3, 4), "down.weight": torch.randn(4, 3), "norm.weight": norm.clone()}
        for _ in range(2)
    ]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_of_tensor_parallel_ranks_are_put_together(tmp_path: Path, parts, suffix: str) -> None:
    for rank, part in enumerate(parts):
        path = tmp_path / f"rank{rank}.{suffix}"
        torch.save(part, path) if suffix == "pt" else save_file(part, path)
    catalogue = open_checkpoint(tmp_path / f"rank{{tp}}.{suffix}", rules=RULES)
    wanted = {
        "model/up.weight": torch.cat([part["up.weight"] for part in parts]),
        "model/lower.weight": torch.cat([part["down.weight"] for part in parts], dim=1),
        "model/norm.weight": parts[0]["norm.weight"],
    }
    assert catalogue.tensors.keys() == wanted.keys()
    assert {f"model/{key}" for key in catalogue.tree["model"]} == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(read_tensor(catalogue, name), tensor)


def test_an_optimizer_follows_its_parameters(tmp_path: Path, parts) -> None:
    for rank, part in enumerate(parts):
        state = {name: {"exp_avg": tensor * 2, "step": torch.tensor(3.0)} for name, tensor in part.items()}
        groups = [{"params": list(part), "lr": 0.1}]
        torch.save({"model": part, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / f"{rank}.pt")
    catalogue = open_checkpoint(tmp_path / "{tp}.pt", rules=RULES)
    assert catalogue.tree["optimizer"]["param_groups"][0]["params"] == ["up.weight", "lower.weight", "norm.weight"]
    found = read_tensor(catalogue, "optimizer/state/lower.weight/exp_avg")
    assert torch.equal(found, 2 * torch.cat([part["down.weight"] for part in parts], dim=1))


def test_without_rules_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only rules can put them together"):
        open_checkpoint(tmp_path / "rank{tp}.pt")


def test_no_file_that_fits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file fits"):
        open_checkpoint(tmp_path / "rank{tp}.pt", rules=RULES)


def test_a_missing_rank_is_noticed(tmp_path: Path, parts) -> None:
    torch.save(parts[1], tmp_path / "rank1.pt")
    with pytest.raises(CheckpointError, match=r"up\.weight"):
        open_checkpoint(tmp_path / "rank{tp}.pt", rules=RULES)


def test_rules_rename_where_the_layout_is_known(tmp_path: Path, parts) -> None:
    save_file(parts[0], tmp_path / "model.safetensors")
    rules = Rules.from_yaml(r"- {match: 'model/(.*)\.weight', rename: 'model/net.\1.weight'}")
    catalogue = open_checkpoint(tmp_path, rules=rules)
    assert sorted(catalogue.tree["model"]) == ["net.down.weight", "net.norm.weight", "net.up.weight"]
    assert torch.equal(read_tensor(catalogue, "model/net.up.weight"), parts[0]["up.weight"])
    with pytest.raises(UsageError, match="known without rules"):
        open_checkpoint(tmp_path, rules=RULES)
