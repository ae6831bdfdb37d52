"""Scripts that cut their tensors by hand: rules say what each rank's plain tensors are parts of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import load, open_checkpoint, save
from holdfast.checkpoint.rules import Rules
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import CheckpointError, UsageError

RULES = Rules.from_yaml(r"""
- {match: 'model/qkv\.weight', shard: {dim: 0, parts: [4, 2, 2]}}
- {match: 'model/down\.weight', shard: {dim: 1}}
- {match: 'model/norm\.weight', replicate: {}}
""")


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def exchange(self, text: bytes) -> list[bytes]:
        self._board[self.rank] = text
        self._barrier.wait(10)
        found = list(self._board)
        self._barrier.wait(10)
        return found


def together(work: Callable[[Threads], Any], size: int = 2) -> list[Any]:
    board, barrier = [b""] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, Threads(rank, size, board, barrier)) for rank in range(size)]
        return [future.result() for future in futures]


def model(weights: dict[str, torch.Tensor]) -> nn.Module:
    made = nn.Module()
    for name, tensor in weights.items():
        part = nn.Module()
        part.weight = nn.Parameter(tensor.clone())
        made.add_module(name, part)
    return made


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"qkv": torch.randn(8, 3), "down": torch.randn(3, 6), "norm": torch.randn(3)}


def half(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    q, k, v = weights["qkv"].split([4, 2, 2])
    fused = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
    return {"qkv": fused, "down": weights["down"].chunk(2, dim=1)[rank], "norm": weights["norm"]}


def trained(made: nn.Module) -> dict[str, Any]:
    """With an optimizer whose slots are functions of the weights, element by element, on any layout."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    for p in made.parameters():
        p.grad = p.detach() * 2
    optimizer.step()
    return {"model": made, "optimizer": optimizer}


def state_of(tree: dict[str, Any]) -> list[torch.Tensor]:
    slots = [t for state in tree["optimizer"].state.values() for t in state.values()]
    return [*(p.detach() for p in tree["model"].parameters()), *slots]


def test_hand_cut_to_whole_and_back(tmp_path: Path) -> None:
    cut = [trained(model(half(whole(), rank))) for rank in range(2)]
    together(lambda r: save(tmp_path / "cut", cut[r.rank], ranks=r, rules=RULES, place={"tp": r.rank}))

    single = trained(model(whole()))
    loaded = {"model": model({n: torch.zeros_like(w) for n, w in whole().items()})}
    loaded["optimizer"] = torch.optim.AdamW(loaded["model"].parameters(), lr=9.0)
    load(tmp_path / "cut", loaded)
    for mine, theirs in zip(state_of(loaded), state_of(single), strict=True):
        assert torch.equal(mine, theirs)

    save(tmp_path / "whole", loaded)
    again = [{"model": model({n: torch.zeros_like(w) for n, w in half(whole(), r).items()})} for r in range(2)]
    for tree in again:
        tree["optimizer"] = torch.optim.AdamW(tree["model"].parameters(), lr=9.0)
    together(lambda r: load(tmp_path / "whole", again[r.rank], ranks=r, rules=RULES, place={"tp": r.rank}))
    for tree, first in zip(again, cut, strict=True):
        for mine, theirs in zip(state_of(tree), state_of(first), strict=True):
            assert torch.equal(mine, theirs)
        assert tree["optimizer"].param_groups[0]["lr"] == 0.1


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    cut = [{"model": model(half(whole(), rank))} for rank in range(2)]
    together(lambda r: save(tmp_path, cut[r.rank], ranks=r, rules=RULES, place={"tp": r.rank}))
    catalogue = open_checkpoint(tmp_path)
    written = sum(p.box.numel for entry in catalogue.tensors.values() for p in entry.pieces)
    assert written == sum(tensor.numel() for tensor in whole().values())
    assert torch.equal(read_tensor(catalogue, "model/qkv.weight"), whole()["qkv"])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("- {match: 'model/(qkv|down).weight', shard: {dim: 0}}", "no rule matches model/norm"),
        ("- {match: '.*', partial: {}}", "average them before"),
        ("- {match: '.*', shard: {dim: 0}}\n- {match: 'nothing', unique: {}}", "matches no tensor"),
        ("- {match: 'model/(.*)', rename: 'model/new.\\1', replicate: {}}", "a rule renames"),
    ],
)
def test_what_rules_cannot_say_in_a_script_is_refused(tmp_path: Path, rules: str, message: str) -> None:
    cut = [{"model": model(half(whole(), 0))} for _ in range(2)]
    read = Rules.from_yaml(rules)
    with pytest.raises((UsageError, CheckpointError), match=message):
        together(lambda r: save(tmp_path, cut[r.rank], ranks=r, rules=read, place={"tp": r.rank}))
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("width", [4, 1 << 18])
def test_control_without_rules_parts_are_not_taken_for_copies(tmp_path: Path, width: int) -> None:
    cut = [{"weight": torch.full((4, width), float(rank))} for rank in range(2)]
    with pytest.raises((UsageError, CheckpointError), match="weight"):
        together(lambda r: save(tmp_path, cut[r.rank], ranks=r))
    together(lambda r: save(tmp_path, cut[0], ranks=r))
