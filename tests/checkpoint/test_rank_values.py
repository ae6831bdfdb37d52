"""Values of each rank: saved by each, given back to each, kept where none was saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast.checkpoint import load, open_checkpoint, per_rank, save
from holdfast.checkpoint.verify import open_to_verify, verify
from holdfast.errors import CheckpointError, UsageError
from tests.checkpoint.world import world


def own(rank: int) -> dict[str, Any]:
    """Different on each rank: random states of three kinds, and values in containers."""
    random.seed(rank)
    return {
        "rng": {
            "torch": per_rank(torch.Generator().manual_seed(rank).get_state()),
            "numpy": per_rank(np.random.RandomState(rank).get_state()),
            "python": per_rank(random.getstate()),
        },
        "seen": per_rank({"count": rank, "names": [f"shard {rank}", None], "loss": float("nan") if rank else 0.5}),
        "length": per_rank(torch.full((rank + 1,), rank)),
        "step": 7,
    }


def draws(state: dict[str, Any]) -> tuple[float, float, float]:
    """The next number of each generator: what a script that resumes will see."""
    generator = torch.Generator()
    generator.set_state(state["rng"]["torch"])
    numbers = np.random.RandomState()
    numbers.set_state(state["rng"]["numpy"])
    chance = random.Random()
    chance.setstate(state["rng"]["python"])
    return float(torch.rand((), generator=generator)), numbers.rand(), chance.random()


def save_own(folder: Path) -> tuple[float, float, float]:
    tree = own(dist.get_rank())
    save(folder, tree)
    return draws({"rng": {key: marked.value for key, marked in tree["rng"].items()}})


def load_own(folder: Path, shift: int) -> tuple[Any, ...]:
    rank = dist.get_rank()
    into = own(rank + shift)
    into["length"] = per_rank(torch.zeros(rank + 1, dtype=torch.int64))
    state = load(folder, into)
    return draws(state), state["seen"], state["length"].tolist()


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    before = world(2).run(save_own, tmp_path)
    assert before[0] != before[1]
    after = world(2).run(load_own, tmp_path, 10)
    assert [numbers for numbers, _, _ in after] == before
    assert [seen["count"] for _, seen, _ in after] == [0, 1]
    assert [seen["names"] for _, seen, _ in after] == [["shard 0", None], ["shard 1", None]]
    assert [length for _, _, length in after] == [[0], [1, 1]]
    assert verify(open_to_verify(tmp_path)).ok


def test_more_ranks_than_at_the_save_keep_theirs(tmp_path: Path) -> None:
    before = world(2).run(save_own, tmp_path)
    after = world(3).run(load_own, tmp_path, 10)
    assert [numbers for numbers, _, _ in after[:2]] == before
    assert after[2][1]["count"] == 12, "its own"
    assert after[2][0] == draws({"rng": {key: marked.value for key, marked in own(12)["rng"].items()}})


def test_fewer_ranks_leave_the_rest(tmp_path: Path) -> None:
    before = world(2).run(save_own, tmp_path)
    into = {**own(5), "length": per_rank(torch.zeros(1, dtype=torch.int64))}
    assert draws(load(tmp_path, into)) == before[0]


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path, {"pair": (per_rank(torch.arange(3)), 1)})
    target = torch.zeros(3, dtype=torch.int64)
    state = load(tmp_path, {"pair": (per_rank(target), 0)})
    assert state["pair"][0] is target
    assert target.tolist() == [0, 1, 2]
    assert state["pair"][1] == 1


def test_a_tensor_of_a_rank_is_no_copy_of_a_shared_one(tmp_path: Path) -> None:
    shared = torch.arange(4)
    save(tmp_path, {"mine": per_rank(shared), "all": shared})
    state = load(
        tmp_path, {"mine": per_rank(torch.zeros(4, dtype=torch.int64)), "all": torch.zeros(4, dtype=torch.int64)}
    )
    assert torch.equal(state["mine"], shared)
    assert torch.equal(state["all"], shared)


def test_without_the_mark_all_values_are_there_by_rank(tmp_path: Path) -> None:
    world(2).run(save_own, tmp_path)
    assert {rank: seen["count"] for rank, seen in load(tmp_path, {"seen": None})["seen"].items()} == {0: 0, 1: 1}
    assert "seen" in open_checkpoint(tmp_path).tree


def test_bad_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="per_rank"):
        save(tmp_path / "a", {"x": per_rank([per_rank(1)])})
    with pytest.raises(UsageError, match="__per_rank__"):
        save(tmp_path / "a", {"x": {"__per_rank__": {"0": 1}}})
    save(tmp_path / "b", {"x": 1})
    with pytest.raises(CheckpointError, match="x was saved for all"):
        load(tmp_path / "b", {"x": per_rank(0)})
